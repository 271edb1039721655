"""A pod's metrics are a trustworthy number or none at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_operator.decide.pods.load import (
    FRESH_SECONDS,
    Load,
    LoadError,
    Sample,
    ServedRequests,
    parse,
    parse_served,
)
from fairlead_runtime.settings.metric_names import RUNNING, WAITING

GOOD = f"""# HELP {RUNNING} Number of requests in model execution batches.
# TYPE {RUNNING} gauge
{RUNNING}{{engine="0",model_name="demo"}} 3.0
# TYPE {WAITING} gauge
{WAITING}{{engine="0",model_name="demo"}} 2.0
{WAITING}_created{{engine="0",model_name="demo"}} 9.0
vllm:kv_cache_usage_perc{{engine="0",model_name="demo"}} 0.5
"""


def test_a_plain_exposition_is_read() -> None:
    assert parse(GOOD) == parse(GOOD, "demo") == Load(running=3, waiting=2)


def test_the_engines_of_a_pod_are_summed() -> None:
    second = GOOD.replace('engine="0"', 'engine="1"')
    assert parse(GOOD + second).total == 10


def test_one_engines_negative_is_not_made_good_by_another() -> None:
    second = GOOD.replace('engine="0"', 'engine="1"').replace(" 3.0", " -1.0")
    with pytest.raises(LoadError, match=r"is -1\.0"):
        parse(GOOD + second)


def test_timestamps_are_read_over() -> None:
    assert parse(GOOD.replace(" 3.0", " 3.0 1700000000000")) == Load(3, 2)


def test_each_scrape_is_read_anew_after_the_same_heads() -> None:
    for running in (3, 7, 0):
        assert parse(GOOD.replace(" 3.0", f" {running}"), "demo") == Load(running, 2)


def test_another_models_pod_gives_nothing() -> None:
    with pytest.raises(LoadError, match=r"missing for model 'demo'"):
        parse(GOOD.replace("demo", "other"), "demo")


def test_a_label_may_hold_what_looks_like_another() -> None:
    text = GOOD.replace('model_name="demo"', r'note="model_name=\"x\"",model_name="demo"')
    assert parse(text, "demo") == Load(3, 2)


@pytest.mark.parametrize(
    "text",
    [
        "",
        GOOD.replace(" 3.0", " NaN"),
        GOOD.replace(" 3.0", " +Inf"),
        GOOD.replace(" 3.0", " -Inf"),
        GOOD.replace(" 3.0", " -1"),
        GOOD.replace(" 3.0", " -9e15"),
        GOOD.replace(" 3.0", " 1e300"),
        GOOD.replace(" 3.0", " null"),
        GOOD.replace(" 3.0", " 1_0"),  # Python reads it as 10, Prometheus does not
        GOOD.replace(" 3.0", ""),
        GOOD.replace(WAITING, "vllm:something_else"),
        GOOD.replace(RUNNING, "vllm:something_else"),
        GOOD.replace(f'{WAITING}{{engine="0",model_name="demo"}}', f"{WAITING}{{engine="),
        GOOD + "x" * (1 << 20),
        "<html>moved</html>",
    ],
    ids=range(15),
)
def test_doubtful_text_is_refused(text: str) -> None:
    with pytest.raises(LoadError):
        parse(text, "demo")


@given(st.text(max_size=200), st.floats(), st.floats())
def test_whatever_comes_is_sane_or_refused(text: str, running: float, waiting: float) -> None:
    try:
        load = parse(f'{RUNNING} {running}\n{WAITING}{{a="{text}"}} {waiting}\n{text}')
    except LoadError:
        return
    assert load.sane


def test_a_sample_is_fresh_for_15_seconds_and_never_from_the_future() -> None:
    sample = Sample(Load(1, 0), at=100.0)
    assert sample.fresh(100.0)
    assert sample.fresh(100.0 + FRESH_SECONDS - 0.1)
    assert not sample.fresh(100.0 + FRESH_SECONDS)
    assert not sample.fresh(99.9)


def test_hostile_series_are_refused_before_they_cost_time() -> None:
    """The library's parser takes time that grows with the square of a line's length."""
    label = ",".join(f'a{n}="\\\\"' for n in range(100_000))[:900_000]
    with pytest.raises(LoadError, match="more than 40 series, or one of over 1000 bytes"):
        parse(f"{RUNNING}{{{label}}} 1\n{WAITING} 1\n")
    with pytest.raises(LoadError, match="more than 40 series"):
        parse(GOOD + "".join(f'{RUNNING}{{engine="{n}"}} 1\n' for n in range(41)))


def test_series_of_other_names_are_not_parsed() -> None:
    others = "".join(f"vllm:other{{a=malformed {n}\n" for n in range(10_000))
    assert parse(others + GOOD, "demo") == Load(3, 2)


@pytest.mark.parametrize("label", [r"a\"b\\c\nd", "a}b", "a{b", "a,b", "a=b", "a b", "a\u2028b"])
def test_a_models_name_is_unescaped(label: str) -> None:
    name = label.replace(r"\"", '"').replace(r"\n", "\n").replace(r"\\", "\\")
    assert parse(GOOD.replace("demo", label), name) == Load(3, 2)


LENGTHS = """vllm:request_prompt_tokens_bucket{engine="0",le="1.0",model_name="demo"} 0.0
vllm:request_prompt_tokens_count{engine="0",model_name="demo"} 4.0
vllm:request_prompt_tokens_sum{engine="0",model_name="demo"} 400.0
vllm:request_generation_tokens_count{engine="0",model_name="demo"} 4.0
vllm:request_generation_tokens_sum{engine="0",model_name="demo"} 80.0
"""


def test_the_lengths_of_finished_requests_are_summed_over_engines() -> None:
    assert parse_served(GOOD + LENGTHS, "demo") == ServedRequests(4, 480)
    both = LENGTHS + LENGTHS.replace('engine="0"', 'engine="1"')
    assert parse_served(both, "demo") == ServedRequests(8, 960)
    assert parse_served(LENGTHS, "other") == parse_served(GOOD, "demo") == ServedRequests()


@pytest.mark.parametrize("value", ["NaN", "-1", "+Inf", "3.0", "null"])
def test_a_doubtful_length_counts_as_none(value: str) -> None:
    assert parse_served(LENGTHS.replace("} 4.0", f"}} {value}", 1), "demo") == ServedRequests()
