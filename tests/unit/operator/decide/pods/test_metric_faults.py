"""Faulty metrics never shrink a fleet, and what is left of good ones still grows it.

Every fault is played against a fleet that should grow, shrink or stay, through the parser and the
decision, in virtual time. A fault begins after twenty good minutes and lasts ten; then all is well
again.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from fairlead_operator.decide.pods.load import Load, LoadError, Sample, parse
from fairlead_operator.decide.scale.autoscale import TICK, History, Policy, Supply, decide
from fairlead_runtime.settings.metric_names import RUNNING, WAITING
from support.full import LONG_FORM

SEEDS = 50 if LONG_FORM else 2
POLICY = Policy(
    min_replicas=1,
    max_replicas=12,
    target=100,
    tolerance=0.1,
    up_window=0,
    up_step=4,
    down_window=300,
    down_step=1,
)
BEGIN, END, STOP = 1200.0, 1800.0, 3000.0
Scrape = Callable[[str], str | None]  # good text → what the scraper gets; None for no answer


def text(load: float, model: str = "demo") -> str:
    running = min(load, 64.0)
    labels = f'{{engine="0",model_name="{model}"}}'
    gauges = f"{RUNNING}{labels} {running}\n{WAITING}{labels} {load - running}\n"
    return f"{gauges}vllm:prompt_tokens_total{labels} 1e6\n"


def value(word: str) -> Scrape:
    """Every value of the gauges replaced by ``word``."""
    return lambda good: "\n".join(f"{line.rpartition(' ')[0]} {word}" for line in good.splitlines())


TEN_MB = text(0) + "x" * 10_000_000
# The pods that a fault strikes: one, some or all of the ready ones.
FAULTS: dict[str, tuple[str, Scrape]] = {
    "one pod is missing": ("one", lambda _: None),
    "some pods are missing": ("some", lambda _: None),
    "all pods are missing": ("all", lambda _: None),
    "no series": ("some", lambda _: "# nothing here\n"),
    "no series anywhere": ("all", lambda _: ""),
    "NaN": ("some", value("NaN")),
    "infinity": ("some", value("+Inf")),
    "negative": ("some", value("-9e15")),
    "null": ("all", value("null")),
    "another model's pod": ("some", lambda _: text(0, "other")),
    "a body of 10 MB": ("some", lambda _: TEN_MB),
    "a 500 page": ("some", lambda _: "<html>internal server error</html>"),
    "a redirect's page": ("all", lambda _: '<a href="http://elsewhere">moved</a>'),
    "an answer after 10 s": ("some", lambda _: None),  # the scraper's limit is shorter
}


@dataclass
class Run:
    """One fleet through one fault. ``replicas`` has one entry a tick."""

    times: list[float] = field(default_factory=list)
    replicas: list[int] = field(default_factory=list)

    def between(self, begin: float, end: float) -> list[int]:
        return [n for t, n in zip(self.times, self.replicas, strict=True) if begin <= t < end]


def play(struck: str, scrape: Scrape, before: int, demand: float, seed: int) -> Run:
    """``before`` replicas with 100 requests each until the fault begins, then ``demand`` requests
    in all.
    """
    rng = random.Random(seed)
    run, history, count, now = Run(), History(), before, 0.0
    seen: dict[str, Sample] = {}
    offset = rng.uniform(0, TICK)
    chosen: set[str] | None = None
    while now < STOP:
        pods = [f"pod-{i}" for i in range(count)]
        total = 100.0 * before if now < BEGIN else demand
        weights = [
            rng.uniform(0.9, 1.1) for _ in pods
        ]  # a pod without answers keeps its last load, within tolerance
        if now >= BEGIN and chosen is None:
            chosen = set(
                {"one": pods[:1], "some": rng.sample(pods, max(1, len(pods) // 2)), "all": pods}[
                    struck
                ]
            )
        for pod, weight in zip(pods, weights, strict=True):
            load = total * weight / sum(weights)
            if not (BEGIN <= now < END and (struck == "all" or pod in (chosen or ()))):
                # What good text gives; parsing it each time would be most of the test's time.
                seen[pod] = Sample(Load(min(load, 64.0), load - min(load, 64.0)), now)
                continue
            body = scrape(text(load))
            try:
                if body is not None:
                    seen[pod] = Sample(parse(body, "demo"), now)
            except LoadError:
                pass  # no sample: exactly what the scraper does
        decision = decide(POLICY, history, seen, Supply(count, tuple(pods)), now + offset * 0.1)
        history, count = decision.history, decision.replicas
        run.times.append(now)
        run.replicas.append(count)
        now += TICK
    return run


@pytest.mark.parametrize("name", FAULTS)
def test_no_fault_shrinks_a_fleet_that_should_shrink(name: str) -> None:
    for seed in range(SEEDS):
        run = play(*FAULTS[name], before=6, demand=120, seed=seed)
        bad = run.between(BEGIN, END)
        assert all(after >= before for before, after in itertools.pairwise(bad)), seed
        assert bad[0] == 6
        assert run.replicas[-1] < 6, "afterwards it does shrink, so the test can fail"


@pytest.mark.parametrize("name", FAULTS)
def test_no_fault_moves_a_fleet_that_should_stay(name: str) -> None:
    for seed in range(SEEDS):
        run = play(*FAULTS[name], before=6, demand=600, seed=seed)
        assert set(run.between(BEGIN - 300, END)) == {6}, seed


@pytest.mark.parametrize("name", FAULTS)
def test_growing_works_on_what_can_still_be_read(name: str) -> None:
    struck, scrape = FAULTS[name]
    for seed in range(SEEDS):
        run = play(struck, scrape, before=4, demand=1500, seed=seed)
        grown = run.between(BEGIN, BEGIN + 60)[-1]
        # Half of the pods see 750 of the 1500; the last good 100 of each silent one count as well.
        assert grown >= (7 if struck != "all" else 4), seed
        assert struck != "all" or grown == 4, "nothing is known: it holds"
        assert run.between(END, END + 60)[-1] == 12, "whole again: all it takes"


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
@pytest.mark.parametrize("demand", [120.0, 600.0, 1200.0])
def test_a_clock_that_jumps_an_hour_shrinks_nothing_before_a_whole_new_window(
    jump: float, demand: float
) -> None:
    for seed in range(SEEDS):
        rng = random.Random(seed)
        history, count, shift = History(), 6, 0.0
        jump_at = rng.randrange(60, 120)
        for tick in range(240):
            shift = jump if tick >= jump_at else 0.0
            now = 1e5 + tick * TICK + shift
            pods = tuple(f"pod-{i}" for i in range(count))
            load = (600 if tick < jump_at - 30 else demand) / count
            seen = {pod: Sample(parse(text(load)), now) for pod in pods}
            decision = decide(POLICY, history, seen, Supply(count, pods), now)
            if jump_at <= tick < jump_at + 300 / TICK:
                assert decision.replicas >= count
            history, count = decision.history, decision.replicas
        assert (count < 6) == (demand < 600)
        assert (count > 6) == (demand > 600)


def test_a_counter_reset_is_no_fault_of_the_gauges() -> None:
    reset = text(90).replace("1e6", "0")
    assert parse(reset, "demo") == parse(text(90), "demo")
