"""EngineConfig: bounds, round trip through arguments, help."""

import argparse
import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_runtime.settings.engine_config import (
    SERVER_ONLY,
    ConfigError,
    EngineConfig,
    add_arguments,
    base_type,
    choices_of,
    flag_of,
)
from fairlead_runtime.settings.other_names import OTHER_NAMES, OtherName, hint_for
from fairlead_runtime.settings.vllm_names import FLAGS, SAME, SHORT

FIELDS = dataclasses.fields(EngineConfig)


def values_of(f: "dataclasses.Field[Any]") -> st.SearchStrategy[Any]:
    """Every value a field accepts."""
    low, high = f.metadata["low"], f.metadata["high"]
    kind = base_type(f.name)
    if choices_of(f.name):
        return st.sampled_from(choices_of(f.name))
    if f.name == "block_size":
        return st.sampled_from([4, 8, 16, 32, 64, 128, 256])
    if f.name == "cors_origin":
        return st.sampled_from(["", "*", "https://app.example:8443"])
    if f.name == "served_name":
        return st.sampled_from(["", "a", "owner/b,c", "an odd näme"])
    if f.name in {"ssl_certfile", "ssl_keyfile"}:
        return st.text(min_size=1, max_size=20)  # neither without the other
    valid: st.SearchStrategy[Any] = {
        bool: st.booleans(),
        int: st.integers(low or 0, high or 2**40),
        float: st.floats(low or 0.0, high or 1e6, allow_nan=False),
        str: st.text(max_size=20),
    }[kind]
    return st.one_of(st.none(), valid) if f.default is None else valid


configs = st.builds(EngineConfig, **{f.name: values_of(f) for f in FIELDS})


@given(configs)
def test_arguments_carry_every_configuration_unchanged(config: EngineConfig) -> None:
    assert EngineConfig.from_args(config.to_args()) == config


def test_arguments_name_only_what_differs_from_the_default_in_field_order() -> None:
    """A release with a new flag must not change the arguments of running pods."""
    assert EngineConfig().to_args() == []
    config = EngineConfig(num_blocks=4, max_batch_tokens=64, allow_block_sharing=False)
    assert config.to_args() == [
        "--max-batch-tokens=64",
        "--num-blocks=4",
        "--no-allow-block-sharing",
    ]


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("max_batch_tokens", 0, "--max-batch-tokens: 0 is below the smallest allowed, 1"),
        ("safety_margin", 0.95, "--safety-margin: 0.95 is above the largest allowed, 0.9"),
        ("safety_margin", float("nan"), "--safety-margin: nan is not finite"),
        ("block_size", 12, "--block-size: 12 is not a power of two"),
        ("block_size", 2, "--block-size: 2 is below"),
        ("scheduler_type", "lifo", "use fifo, prefill_first, priority, fair"),
        ("max_requests", "3", "--max-requests: expected int"),
        ("max_requests", True, "--max-requests: expected int"),
        ("max_requests", None, "--max-requests: must be set"),
        ("cuda_graphs", True, "--cuda-graphs: expected str"),
    ],
)
def test_a_bad_value_names_its_flag_and_the_fix(name: str, value: object, part: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(**{name: value})  # type: ignore[arg-type]
    assert part in str(error.value)
    assert error.value.field == name


def test_an_unknown_setting_names_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match="did you mean max_batch_tokens"):
        EngineConfig.from_mapping({"max_batch_token": 5})


@pytest.mark.parametrize("other", OTHER_NAMES, ids=lambda other: other.name)
def test_another_engines_name_is_refused_with_ours_or_with_the_reason(other: OtherName) -> None:
    names = {f.name for f in FIELDS}
    assert other.name not in names
    assert other.setting in names or (not other.setting and other.note)
    with pytest.raises(ConfigError) as error:
        EngineConfig.from_mapping({other.name: 3})
    assert other.note in error.value.hint
    assert "did you mean" not in error.value.hint
    assert not other.setting or error.value.hint.startswith(f"use {other.setting}, ")


def test_help_shows_every_flag_with_its_default_and_unit() -> None:
    parser = argparse.ArgumentParser(prog="fairlead serve")
    add_arguments(parser)
    text = " ".join(parser.format_help().split())
    for f in FIELDS:
        assert flag_of(f.name) in text
    assert "(default: 8192 tokens)" in text
    assert "(default: none)" in text
    assert "(default: on)" in text


def test_a_step_gives_every_request_a_token() -> None:
    assert EngineConfig(max_batch_tokens=8, max_requests=256).clamped().max_requests == 8
    assert EngineConfig().clamped() == EngineConfig()


def test_every_setting_says_when_to_change_it() -> None:
    for f in FIELDS:
        assert f.metadata["help"], f.name
        assert f.metadata["when"], f.name


def test_flags_of_vllm_that_are_said_to_be_the_same_are_flags_of_ours() -> None:
    ours = {f.name for f in FIELDS} | {"host", "port"}
    assert set(SAME) <= ours
    assert not set(SAME) & set(FLAGS)
    assert set(FLAGS) >= SHORT


def test_a_flag_of_vllm_without_a_place_here_comes_with_what_to_do() -> None:
    action = re.compile(
        r"(^|[:,] )(or )?(leave it out|use|set|send|write|scale|edit|merge|put|take|let)\b"
    )
    for flag, (setting, note) in FLAGS.items():
        assert setting or action.search(note), flag


def test_a_short_flag_of_vllm_is_said_with_one_dash() -> None:
    assert hint_for("tp", ["tensor_parallel"], flag_of) == "use --tensor-parallel, vLLM's -tp"
    assert hint_for("tp", ["seed"], flag_of) == "", "a command without that flag"
    assert hint_for("dp", ["seed"], flag_of).startswith("a pod is one process group")


def test_an_error_says_keywords_where_the_caller_writes_python() -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(ssl_certfile="a.pem")
    words = str(error.value.in_python())
    assert words.startswith("ssl_keyfile: is missing")
    assert "set ssl_certfile and ssl_keyfile" in words
    assert error.value.in_python().hint == error.value.hint, "flags stay for the command line"


@pytest.mark.parametrize(
    ("text", "share"), [("90", 0.9), ("0.9", 0.9), ("90%", 0.9), ("1", 1.0), ("0.5%", 0.005)]
)
def test_the_percentage_of_memory_may_be_one(text: str, share: float) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert parser.parse_args(["--max-memory-percent", text]).max_memory_percent == share


def test_flags_of_servers_may_be_left_out_and_keep_their_defaults() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, without=SERVER_ONLY)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert not flags & {flag_of(name) for name in SERVER_ONLY}
    assert EngineConfig.from_namespace(parser.parse_args(["--seed=3"])) == EngineConfig(seed=3)


@pytest.mark.parametrize(
    ("setting", "names"),
    [("", ()), ("a", ("a",)), ("a,owner/b", ("a", "owner/b")), (" a , b ", ("a", "b"))],
)
def test_a_model_has_the_names_between_the_commas(setting: str, names: tuple[str, ...]) -> None:
    assert EngineConfig(served_name=setting).served_names == names


@pytest.mark.parametrize("setting", ["a,", ",a", "a,,b", "a,b,a", "a, a", " "])
def test_a_name_that_is_empty_or_there_twice_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match="--served-name: has an empty name, or one twice"):
        EngineConfig(served_name=setting)
