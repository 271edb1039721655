"""The simulated fleet's arithmetic, its traces, and how the operator tracks load compared with an
HPA.
"""

import csv
import functools
import io
import itertools
import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from cluster.harness.cel_cases import BASE, merge
from fairlead_operator.commands.backtest import main
from fairlead_operator.commands.plot import sparkline, ticks
from fairlead_operator.decide.scale.autoscale import HOUR, TICK, Policy
from fairlead_operator.decide.scale.simulate import (
    Bucket,
    Moment,
    OperatorScaler,
    Pod,
    Scaler,
    TraceError,
    read_trace,
    simulate,
)
from support.full import LONG_FORM
from support.hpa_simulator import HpaScaler

ROOT = Path(__file__).parents[5]
POD = Pod(slots=80)
HEADER = "t,arrivals,prompt_tokens,output_tokens\n"


def policy(down_step: int) -> Policy:
    return Policy(
        1, 20, 64, tolerance=0.1, up_window=0, up_step=4, down_window=300, down_step=down_step
    )


def fixed(count: int) -> Callable[[Moment], tuple[int, str]]:
    return lambda _: (count, "")


def test_requests_in_the_fleet_follow_littles_law() -> None:
    trace = [Bucket(arrivals=10 * TICK, service=20.0)] * 400
    result = simulate(trace, Pod(slots=1000), policy(1), fixed(1))
    last = result.rows[-1]
    # 10 requests a second for 20 s each, seen right after five seconds' arrivals at once: 200 +
    # about half of 50.
    assert last.running == pytest.approx(10 * TICK / -math.expm1(-TICK / 20), rel=1e-3)
    assert last.waiting == 0
    assert result.pod_hours == pytest.approx(400 * TICK / 3600)


def test_requests_without_a_slot_wait_and_pods_serve_only_once_started() -> None:
    trace = [Bucket(100, 10.0)] + [Bucket(0, 1.0)] * 30
    result = simulate(trace, Pod(slots=10, start_seconds=60), policy(1), fixed(3))
    assert (result.rows[0].running, result.rows[0].waiting, result.max_waiting) == (10, 90, 90)
    assert [row.ready for row in result.rows[:15]] == [1] * 12 + [3] * 3
    assert result.rows[-1].running + result.rows[-1].waiting < 10


def test_a_trace_is_read_into_ticks() -> None:
    lines = [HEADER, "0,1,800,400\n", "4.5,3,800,800\n", "\n", "11,2,0,40\n"]
    buckets = read_trace(lines, Pod(slots=1, prefill_rate=8000, decode_rate=40))
    assert [bucket.arrivals for bucket in buckets] == [4, 0, 2]
    assert [bucket.service for bucket in buckets] == pytest.approx(
        [(10.1 + 3 * 20.1) / 4, 1.0, 1.0]
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: the header must be t,arrivals,prompt_tokens,output_tokens"),
        ("time,n\n0,1\n", "line 1: the header"),
        (HEADER, "no lines"),
        (HEADER + "0,1,2\n", "line 2: 3 cells"),
        (HEADER + "0,x,1,1\n", "line 2: arrivals is 'x'"),
        (HEADER + "0,nan,1,1\n", "line 2: arrivals is nan"),
        (HEADER + "0,-1,1,1\n", "line 2: arrivals is -1"),
        (HEADER + "5,1,1,1\n4,1,1,1\n", "line 3: t is 4"),
        (HEADER + "1e12,1,1,1\n", "line 2: t is 1e+12"),
    ],
)
def test_a_trace_that_cannot_be_read_names_its_line(text: str, message: str) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(text.splitlines(keepends=True), POD)
    assert message in str(caught.value)


def test_turns_are_counted_in_the_worst_hour() -> None:
    counts = [1, 2, 1, 1, 2, 3, 2]
    trace = [Bucket(0, 1.0)] * len(counts)
    result = simulate(trace, POD, policy(1), lambda m: (counts[int(m.now // TICK)], ""))
    assert result.turns() == [(TICK, 2 * TICK), (2 * TICK, 4 * TICK), (5 * TICK, 6 * TICK)]
    assert result.most_turns_an_hour() == 3


# -- the operator beside an HPA with perfect metrics, over a virtual day

Rate = Callable[[float], float]  # seconds → requests a second


def sine(rng: random.Random) -> Rate:
    base, swing, period = rng.uniform(2, 8), rng.uniform(0.3, 0.9), rng.uniform(1, 6) * HOUR
    return lambda t: base * (1 + swing * math.sin(2 * math.pi * t / period))


def square(rng: random.Random) -> Rate:
    base, swing, half = rng.uniform(2, 8), rng.uniform(0.3, 0.9), rng.uniform(0.5, 3) * HOUR
    return lambda t: base * (1 + swing if int(t // half) % 2 else 1 - swing)


def burst(rng: random.Random) -> Rate:
    base, starts = rng.uniform(1, 4), [rng.uniform(0, 24 * HOUR) for _ in range(rng.randint(6, 14))]
    return lambda t: base * (1 + 6 * sum(1 for at in starts if at <= t < at + 600))


def diurnal(rng: random.Random) -> Rate:
    base, phase = rng.uniform(2, 8), rng.random()
    return lambda t: base * (1 + 0.9 * math.sin(2 * math.pi * (t / (24 * HOUR) + phase)))


def noise(rng: random.Random) -> Rate:
    base, level = rng.uniform(2, 8), 0.0

    def rate(_: float) -> float:
        nonlocal level
        level = 0.995 * level + rng.gauss(0, 0.04)
        return base * math.exp(max(-2.0, min(1.2, level)))

    return rate


KINDS = (sine, square, burst, diurnal, noise)
TRACES = [(kind, seed) for kind in KINDS for seed in range(6 if LONG_FORM else 1)]


@functools.cache
def day(kind: Callable[[random.Random], Rate], seed: int) -> list[Bucket]:
    rng = random.Random(seed)
    rate, buckets = kind(rng), []
    for tick in range(int(24 * HOUR / TICK)):
        expected = max(0.0, rate(tick * TICK)) * TICK
        arrivals = max(0, round(rng.gauss(expected, math.sqrt(expected))))
        buckets.append(Bucket(arrivals, POD.service(800, rng.uniform(600, 1000))))
    return buckets


@pytest.mark.parametrize(
    ("kind", "seed"), TRACES, ids=[f"{kind.__name__}-{seed}" for kind, seed in TRACES]
)
def test_a_day_is_tracked_closer_than_by_an_hpa_for_a_tenth_more_pods_at_most(
    kind: Callable[[random.Random], Rate], seed: int
) -> None:
    trace = day(kind, seed)
    limits = policy(down_step=4)
    ours, hpa = (
        simulate(trace, POD, limits, scaler(limits)) for scaler in (OperatorScaler, HpaScaler)
    )
    print(
        f"pod-hours {ours.pod_hours:.1f} of {hpa.pod_hours:.1f}; "
        f"over target {ours.seconds_over:.0f} s of {hpa.seconds_over:.0f} s"
    )
    assert ours.most_turns_an_hour() <= 4
    assert ours.pod_hours <= 1.1 * hpa.pod_hours
    assert ours.seconds_over <= hpa.seconds_over


@pytest.mark.full
def test_with_the_default_step_all_days_together_stay_within_a_tenth_and_closer() -> None:
    hours, over = [0.0, 0.0], [0.0, 0.0]
    for kind, seed in TRACES:
        trace, limits = day(kind, seed), policy(down_step=1)
        scalers: tuple[Scaler, Scaler] = (OperatorScaler(limits), HpaScaler(limits))
        for i, scaler in enumerate(scalers):
            result = simulate(trace, POD, limits, scaler)
            hours[i] += result.pod_hours
            over[i] += result.seconds_over
    assert hours[0] <= 1.1 * hours[1]
    assert over[0] < over[1]


def test_the_worst_load_turns_no_more_than_four_times_an_hour() -> None:
    for half in (30.0, 120.0, 400.0, 900.0):
        square_wave = itertools.cycle(
            [Bucket(200, 20.0)] * int(half / TICK) + [Bucket(0, 20.0)] * int(half / TICK)
        )
        limits = Policy(
            1, 20, 64, tolerance=0, up_window=0, up_step=20, down_window=0, down_step=20
        )
        trace = itertools.islice(square_wave, int(4 * HOUR / TICK))
        assert simulate(trace, POD, limits, OperatorScaler(limits)).most_turns_an_hour() <= 4


# -- the command


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    trace, resource = tmp_path / "trace.csv", tmp_path / "cr.yaml"
    trace.write_text(HEADER + "".join(f"{t},{20 if t < 300 else 1},800,400\n" for t in range(1800)))
    body = merge(BASE, {"spec": {"autoscaling": {"maxReplicas": 6, "targetPerReplica": 50}}})
    resource.write_text(json.dumps(body))
    return str(trace), str(resource)


def run(files: tuple[str, str], *more: str) -> int:
    return main(["--trace", files[0], "--policy", files[1], *more])


def test_the_command_prints_figures_and_pictures(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "plot.svg"
    assert run(files, "--plot", str(plot)) == 0
    out = capsys.readouterr().out
    assert "target 50 requests a pod, 1 to 6 pods" in out
    assert re.search(r"replicas [▁-█]{72} max 5", out)
    assert "scaleDown.stabilizationSeconds" in out
    root = ET.parse(plot).getroot()
    assert len(root.findall(".//{http://www.w3.org/2000/svg}polyline")) == 5
    assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"
    heights = [int(t.get("y", 0)) for t in root.findall("{http://www.w3.org/2000/svg}text")]
    assert heights[1] - heights[0] > 20, "the title and the legend stand apart"


def test_the_documented_trace_gives_the_documented_text_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "autoscaling.md").read_text("utf-8")
    found = re.search(r"```\n\$ fairlead backtest (.*?)\n(.*?)```", page, re.DOTALL)
    assert found
    plot = tmp_path / "picture.svg"
    assert main(found[1].replace("picture.svg", str(plot)).split()) == 0
    assert capsys.readouterr().out == found[2]
    assert plot.read_text() == (ROOT / "docs" / "pictures" / "backtest.svg").read_text()


@pytest.mark.parametrize(
    ("seconds", "unit", "times"),
    [
        (7200.0, "min", [0, 20, 40, 60, 80, 100, 120]),
        (40.0, "s", [0, 5, 10, 15, 20, 25, 30, 35, 40]),
        (4 * 3600.0, "h", [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4]),
        (5 * 86400.0, "d", [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5]),
        (0.0, "s", [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1]),
    ],
)
def test_the_axis_of_time_has_round_numbers_in_one_unit(
    seconds: float, unit: str, times: list[float]
) -> None:
    found, numbers = ticks(seconds)
    assert found == unit
    assert numbers == pytest.approx(times)


def test_the_command_gives_the_same_rows_as_json_and_csv(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(files, "-o", "json") == 0
    report = json.loads(capsys.readouterr().out)
    assert run(files, "-o", "csv") == 0
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(table) == len(report["rows"]) == 1800 / TICK
    assert [int(row["replicas"]) for row in table] == [row["replicas"] for row in report["rows"]]
    assert report["summary"]["requests"] == 300 * 20 + 1500
    assert report["summary"]["podHours"] == pytest.approx(
        sum(r["replicas"] for r in report["rows"]) * TICK / 3600, rel=1e-3
    )


def test_the_command_names_what_it_cannot_read(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = tmp_path / "plain.yaml"
    plain.write_text(json.dumps(BASE))
    assert run((files[0], str(plain))) == 2
    assert "spec.autoscaling: must be set" in capsys.readouterr().err
    assert run((files[1], files[1])) == 2
    assert "line 1: the header must be" in capsys.readouterr().err
    assert run((str(tmp_path / "none"), files[1])) == 2


def test_a_sparkline_keeps_every_peak() -> None:
    assert sparkline([0, 0, 8, 0, 1, 1], 3) == " █▁"
    assert sparkline([], 3) == ""
    assert sparkline([0, 0], 3) == "  "


def test_the_command_takes_the_typical_request_of_an_unset_target_from_the_trace(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    body = merge(BASE, {"spec": {"autoscaling": {"maxReplicas": 6}}})
    Path(files[1]).write_text(json.dumps(body))
    assert run(files, "--concurrent-tokens", "12000") == 0
    out = capsys.readouterr().out
    assert "8 = 0.8 of min(256 maxRequests, 12000 concurrent tokens ÷ 1200 tokens a request" in out
    assert max(line.count("measured") for line in out.splitlines()) == 1
    assert run(files) == 0
    assert "target 256 requests a pod, 1 to 6 pods" in capsys.readouterr().out
