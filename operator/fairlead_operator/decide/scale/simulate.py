"""Simulates the autoscaler on a trace of arrivals: the operator's own ``decide`` with a simple
fleet.

Owns reading the trace, the fleet's arithmetic and the figures. ``commands/plot`` draws them.

The fleet is a fluid queue. A request takes ``prompt/prefill_rate + output/decode_rate`` seconds of
a slot; each ready pod has ``slots`` slots, and a request without a slot waits. A pod counts from
the moment it is requested, serves ``start_seconds`` later, and ends at once. The model leaves out
that requests of one batch slow each other; see docs/autoscaling.md.
"""

import csv
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fairlead_operator.decide.pods.load import Load, Sample, ServedRequests
from fairlead_operator.decide.scale.autoscale import TICK, History, Policy, Supply, decide

COLUMNS = ("t", "arrivals", "prompt_tokens", "output_tokens")
LONGEST = 31 * 86400.0  # seconds


class TraceError(ValueError):
    """A trace that cannot be read; the message names the line."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """One tick of a trace: the requests that arrive and the seconds of service of each."""

    arrivals: float
    service: float


@dataclass(frozen=True, slots=True)
class Pod:
    """The capacity of one pod. Rates are in tokens/s: prefill of the pod, decode of one request."""

    slots: int
    start_seconds: float = 60.0
    prefill_rate: float = 8000.0
    decode_rate: float = 40.0

    def service(self, prompt_tokens: float, output_tokens: float) -> float:
        return max(1e-3, prompt_tokens / self.prefill_rate + output_tokens / self.decode_rate)


@dataclass(frozen=True, slots=True)
class Moment:
    """The view that a scaler has at one tick."""

    now: float
    supply: Supply
    running: float
    waiting: float


@dataclass(frozen=True, slots=True)
class Row:
    """One tick's outcome. ``replicas`` are requested, ``ready`` of them serve."""

    t: float
    replicas: int
    ready: int
    running: float
    waiting: float
    limited_by: str


Scaler = Callable[[Moment], tuple[int, str]]


@dataclass(slots=True)
class Result:
    rows: list[Row] = field(default_factory=list)
    pod_seconds: float = 0.0
    seconds_over: float = 0.0  # time with more than target * (1 + tolerance) requests per ready pod
    max_waiting: float = 0.0
    request_seconds_waited: float = 0.0
    arrivals: float = 0.0

    @property
    def pod_hours(self) -> float:
        return self.pod_seconds / 3600

    def turns(self) -> list[tuple[float, float]]:
        """The turns of the count from growing to shrinking or back: (time of the change before,
        time).
        """
        turns: list[tuple[float, float]] = []
        direction, last = 0, 0.0
        for row, next_row in itertools.pairwise(self.rows):
            step = next_row.replicas - row.replicas
            if step == 0:
                continue
            if direction and (step > 0) != (direction > 0):
                turns.append((last, next_row.t))
            direction, last = step, next_row.t
        return turns

    def most_turns_an_hour(self) -> int:
        """The most turns that lie, with both of their changes, within one hour."""
        turns = self.turns()
        return max(
            (
                sum(1 for began, at in turns if end - 3600 <= began and at <= end)
                for _, end in turns
            ),
            default=0,
        )

    def summary(self) -> dict[str, Any]:
        hours = len(self.rows) * TICK / 3600
        return {
            "hours": round(hours, 3),
            "requests": round(self.arrivals),
            "podHours": round(self.pod_hours, 3),
            "meanReplicas": round(self.pod_hours / hours, 2) if hours else 0,
            "maxReplicas": max((row.replicas for row in self.rows), default=0),
            "maxWaiting": round(self.max_waiting, 1),
            "meanWaitSeconds": round(self.request_seconds_waited / self.arrivals, 2)
            if self.arrivals
            else 0,
            "secondsOverTarget": round(self.seconds_over),
            "mostTurnsAnHour": self.most_turns_an_hour(),
        }


class OperatorScaler:
    """The operator's ``decide`` with fresh metrics from every ready pod and an even load."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.history = History()

    def __call__(self, moment: Moment) -> tuple[int, str]:
        ready = moment.supply.ready
        share = Sample(
            Load(moment.running / max(1, len(ready)), moment.waiting / max(1, len(ready))),
            moment.now,
        )
        decision = decide(
            self.policy, self.history, dict.fromkeys(ready, share), moment.supply, moment.now
        )
        self.history = decision.history
        return decision.replicas, decision.limited_by


def simulate(trace: Iterable[Bucket], pod: Pod, policy: Policy, scaler: Scaler) -> Result:
    """Run the whole trace, one tick after another. The fleet starts with ``min_replicas`` ready
    pods.
    """
    result = Result()
    pods = [0.0] * policy.min_replicas  # when each is ready, oldest first
    inside, service, now = 0.0, 1.0, 0.0  # requests in the fleet, their mean seconds of service
    for bucket in trace:
        if bucket.arrivals:
            service = (inside * service + bucket.arrivals * bucket.service) / (
                inside + bucket.arrivals
            )
            inside += bucket.arrivals
            result.arrivals += bucket.arrivals
        ready = sum(1 for at in pods if at <= now)
        running = min(inside, float(ready * pod.slots))
        waiting = inside - running
        supply = Supply(len(pods), tuple(map(str, range(ready))), starting=len(pods) - ready)
        replicas, limited_by = scaler(Moment(now, supply, running, waiting))
        pods = (
            [*pods, *[now + pod.start_seconds] * (replicas - len(pods))]
            if replicas > len(pods)
            else pods[:replicas]
        )
        result.rows.append(Row(now, replicas, ready, running, waiting, limited_by))
        result.pod_seconds += TICK * len(pods)
        result.seconds_over += (
            TICK if inside > policy.target * (1 + policy.tolerance) * ready else 0.0
        )
        result.max_waiting = max(result.max_waiting, waiting)
        result.request_seconds_waited += waiting * TICK
        inside -= running * -math.expm1(-TICK / service)
        now += TICK
    return result


def read_trace(lines: Iterable[str], pod: Pod) -> list[Bucket]:
    """Buckets of one tick; seconds without a line have no arrivals. Raises TraceError."""
    arrivals: dict[int, float] = {}
    seconds: dict[int, float] = {}
    last = 0.0
    for t, count, prompt, output in _rows(lines):
        last = t
        tick = int(t // TICK)
        arrivals[tick] = arrivals.get(tick, 0.0) + count
        seconds[tick] = seconds.get(tick, 0.0) + count * pod.service(prompt, output)
    ticks = range(int(last // TICK) + 1)
    return [_bucket(arrivals.get(tick, 0.0), seconds.get(tick, 0.0)) for tick in ticks]


def served_in(lines: Iterable[str]) -> ServedRequests:
    """The requests of a trace and their tokens, as the pods' histograms would count them."""
    rows = list(_rows(lines))
    tokens = sum(count * (prompt + output) for _, count, prompt, output in rows)
    return ServedRequests(sum(count for _, count, _, _ in rows), tokens)


def _rows(lines: Iterable[str]) -> Iterator[tuple[float, float, float, float]]:
    """A CSV of ``t,arrivals,prompt_tokens,output_tokens``: seconds, requests in that second, mean
    tokens of each. Raises TraceError, which names the line.
    """
    reader = csv.reader(lines)
    header = tuple(name.strip() for name in next(reader, []))
    if header != COLUMNS:
        raise TraceError(
            f"line 1: the header must be {','.join(COLUMNS)}, not {','.join(header)[:100]!r}"
        )
    last = -1.0
    for line, cells in enumerate(reader, start=2):
        if not cells:
            continue
        t, count, prompt, output = _numbers(cells, line)
        if not last < t <= LONGEST:
            raise TraceError(
                f"line {line}: t is {t:g}: it must grow from line to line, to at most {LONGEST:g}"
            )
        last = t
        yield t, count, prompt, output
    if last < 0:
        raise TraceError("the trace has no lines")


def _bucket(arrivals: float, seconds: float) -> Bucket:
    return Bucket(arrivals, seconds / arrivals if arrivals else 1.0)


def _numbers(cells: Sequence[str], line: int) -> tuple[float, float, float, float]:
    if len(cells) != len(COLUMNS):
        raise TraceError(f"line {line}: {len(cells)} cells, there must be {len(COLUMNS)}")
    values: list[float] = []
    for name, cell in zip(COLUMNS, cells, strict=True):
        try:
            value = float(cell)
        except ValueError:
            raise TraceError(f"line {line}: {name} is {cell[:40]!r}: it must be a number") from None
        if not math.isfinite(value) or value < 0:
            raise TraceError(
                f"line {line}: {name} is {cell[:40]}: it must be finite and at least 0"
            )
        values.append(value)
    return values[0], values[1], values[2], values[3]
