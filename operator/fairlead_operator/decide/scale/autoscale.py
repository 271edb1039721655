"""The number of replicas, as a pure function of policy, history, samples, supply and time.

Owns the decision and the record of every limit that changed it. Reads no cluster, no metric and no
clock; the caller passes back the history that the last ``decide`` returned.

It guards against failures seen in well-known autoscalers: an average used as a total (replicas
double while models load), a metric that the batch bounds (never reaches its target), missing data
read as zero, NaN read as a number, starting pods that are not counted, and a mean over minutes,
which answers a burst minutes later.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fairlead_operator.decide.pods.load import FRESH_SECONDS, Load, Sample
from fairlead_operator.decide.scale.target import Target
from fairlead_operator.resource.spec import Autoscaling, Signal

TICK = 5.0  # seconds between two decisions
UP_PERIOD, DOWN_PERIOD = 15.0, 60.0  # seconds that maxStep applies to
GAP = FRESH_SECONDS  # seconds without data after which a window starts over
HOUR = 3600.0
WHY_LENGTH = 512  # characters of a decision's ``why`` in the status
# Turns of the last hour above which the next turn down waits: with the turn up that may follow, an
# hour has at most 4.
TURNS = 2
# What one pod adds to the demand, by autoscaling.signal.
DEMAND: Mapping[Signal, Callable[[Load], float]] = {"QueueDepth": lambda load: load.total}


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules of one resource's autoscaling. ``target`` is in requests per pod, windows in
    seconds, steps in pods per period. ``target_formula`` and ``target_inputs``: the arithmetic of a
    target that is not set.
    """

    min_replicas: int
    max_replicas: int
    target: float
    tolerance: float
    up_window: float
    up_step: int
    down_window: float
    down_step: int
    signal: Signal = "QueueDepth"
    target_formula: str = ""
    target_inputs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, autoscaling: Autoscaling, target: Target) -> "Policy":
        return cls(
            min_replicas=autoscaling.min_replicas,
            max_replicas=autoscaling.max_replicas,
            target=target.requests,
            tolerance=autoscaling.tolerance,
            up_window=autoscaling.scale_up.stabilization_seconds,
            up_step=autoscaling.scale_up.max_step,
            down_window=autoscaling.scale_down.stabilization_seconds,
            down_step=autoscaling.scale_down.max_step,
            signal=autoscaling.signal,
            target_formula=target.formula,
            target_inputs=target.inputs,
        )


@dataclass(frozen=True, slots=True)
class Supply:
    """The fleet: requested replicas, and its pods by state.

    ``starting`` counts pods that load or wait for a node, within their start-up deadline: a
    crash-looping pod does not count. ``unready`` names running pods past their start that are not
    ready: they supply nothing, and their requests count.
    """

    current: int
    ready: tuple[str, ...]
    starting: int = 0
    unready: tuple[str, ...] = ()

    @property
    def pods(self) -> int:
        return len(self.ready) + self.starting

    @property
    def running(self) -> tuple[str, ...]:
        """The pods whose load is the demand."""
        return (*self.ready, *self.unready)


@dataclass(frozen=True, slots=True)
class History:
    """The memory of ``decide``. It is empty after a restart: nothing shrinks until the windows are
    full.
    """

    since: float | None = None  # start of ``raws``, which has no gap
    raws: tuple[tuple[float, int], ...] = ()  # (time, replicas that demand asked for)
    changes: tuple[tuple[float, int], ...] = ()  # (time, pods added) of the last periods
    direction: int = 0  # of the last change: 1, -1, or 0 for none yet
    last: float = -math.inf  # time of the last change
    turns: tuple[
        tuple[float, float], ...
    ] = ()  # (time of a turn, time of the change before it), latest hour


@dataclass(frozen=True, slots=True)
class Clamp:
    name: str
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Decision:
    replicas: int
    history: History
    clamps: tuple[Clamp, ...]
    message: str
    inputs: Mapping[str, Any] = field(
        default_factory=dict
    )  # those of the target, from, demand, target, supply, ready, running, fresh, raw

    @property
    def limited_by(self) -> str:
        """The last limit that changed the answer, "" when none did. Tolerance does not count:
        within it the load is on target.
        """
        limits = [clamp.name for clamp in self.clamps if clamp.name != "tolerance"]
        return limits[-1] if limits else ""

    def entry(self, at: str) -> dict[str, Any]:
        """An item of ``status.autoscaling.decisions``."""
        clamps = [{"name": c.name, "before": c.before, "after": c.after} for c in self.clamps]
        message = self.message[:WHY_LENGTH]
        return {"at": at, "to": self.replicas, **self.inputs, "why": message, "clamps": clamps}


class _Answer:
    """A number of replicas, and each limit that changed it."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.clamps: list[Clamp] = []

    def limit(self, name: str, after: int) -> None:
        if after != self.replicas:
            self.clamps.append(Clamp(name, self.replicas, after))
            self.replicas = after


def decide(
    policy: Policy, history: History, samples: Mapping[str, Sample], supply: Supply, now: float
) -> Decision:
    """The replicas to request now. ``samples`` holds each pod's last good sample, ``now`` is the
    time of a monotonic clock.

    Without fresh data the number stays; it shrinks only with fresh data from every running pod
    over a whole window.
    """
    running = supply.running
    usable = {pod: samples[pod] for pod in running if pod in samples and samples[pod].load.sane}
    fresh = [pod for pod, sample in usable.items() if sample.fresh(now)]
    demand = sum(DEMAND[policy.signal](sample.load) for sample in usable.values())
    raw = math.ceil(demand / policy.target - 1e-9)
    inputs = {
        "from": supply.current,
        "demand": demand,
        "target": policy.target,
        "supply": supply.pods,
        "ready": len(supply.ready),
        "running": len(running),
        "fresh": len(fresh),
        "raw": raw,
        **policy.target_inputs,
    }
    if not fresh:
        answer = _Answer(supply.current)
        message = "no fresh metrics: holding"
    else:
        # A running pod without a sample may have any load: this tick must not justify shrinking,
        # now or later.
        demanded = raw if len(usable) == len(running) else max(raw, supply.current)
        history = _with_demand(history, demanded, now, max(policy.up_window, policy.down_window))
        answer = _Answer(raw)
        supplied = policy.target * supply.pods  # requests
        if supplied and abs(demand / supplied - 1) <= policy.tolerance:
            answer.limit("tolerance", supply.current)
        # First, so that no other limit is named where these alone decide.
        _limit_to_bounds(answer, policy)
        if answer.replicas > supply.current:
            _limit_up(answer, policy, history, supply, now)
        elif answer.replicas < supply.current:
            _limit_down(answer, policy, history, supply, now, stale=len(fresh) < len(running))
        arithmetic = f" ({policy.target_formula})" if policy.target_formula else ""
        message = f"{demand:g} requests at {policy.target:g} a pod{arithmetic} ask for {raw}"
    _limit_to_bounds(answer, policy)
    if answer.clamps:
        message += "; " + ", ".join(f"{c.name} {c.before} → {c.after}" for c in answer.clamps)
    history = _with_change(history, answer.replicas - supply.current, now)
    return Decision(answer.replicas, history, tuple(answer.clamps), message, inputs)


def _limit_to_bounds(answer: _Answer, policy: Policy) -> None:
    answer.limit("minReplicas", max(answer.replicas, policy.min_replicas))
    answer.limit("maxReplicas", min(answer.replicas, policy.max_replicas))


def _limit_up(
    answer: _Answer, policy: Policy, history: History, supply: Supply, now: float
) -> None:
    if policy.up_window:
        lasting_need = (
            _over_window(history, policy.up_window, now, min)
            if _window_filled(history, policy.up_window, now)
            else 0
        )
        answer.limit(
            "scaleUp.stabilizationSeconds", max(supply.current, min(answer.replicas, lasting_need))
        )
    added = sum(n for at, n in history.changes if n > 0 and 0 <= now - at < UP_PERIOD)
    answer.limit(
        "scaleUp.maxStep",
        max(supply.current, min(answer.replicas, supply.current - added + policy.up_step)),
    )


def _limit_down(
    answer: _Answer, policy: Policy, history: History, supply: Supply, now: float, *, stale: bool
) -> None:
    if stale:
        answer.limit("staleMetrics", supply.current)
        return
    if not _window_filled(history, policy.down_window, now):
        answer.limit("windowFilling", supply.current)
        return
    needed = _over_window(history, policy.down_window, now, max)
    answer.limit(
        "scaleDown.stabilizationSeconds", min(supply.current, max(answer.replicas, needed))
    )
    if answer.replicas < supply.current and history.direction > 0:
        # A small saving must not use up the turns that a large one may need soon.
        large = 3 * answer.replicas < supply.current
        turns = sum(
            1 for at, before in history.turns if 0 <= now - (before if large else at) < HOUR
        )
        if turns > TURNS:
            answer.limit("flapping", supply.current)
    removed = -sum(n for at, n in history.changes if n < 0 and 0 <= now - at < DOWN_PERIOD)
    lowest = supply.current + removed - policy.down_step
    answer.limit("scaleDown.maxStep", min(supply.current, max(answer.replicas, lowest)))


# -- history


def _with_demand(history: History, raw: int, now: float, window: float) -> History:
    """The history with the replicas demanded now; a gap, or a clock that went back, restarts the
    windows.
    """
    last = history.raws[-1][0] if history.raws else None
    if history.since is None or last is None or not 0 <= now - last <= GAP:
        return replace(history, since=now, raws=((now, raw),))
    recent = tuple(item for item in history.raws if now - item[0] <= window)
    return replace(history, raws=(*recent, (now, raw)))


def _with_change(history: History, added: int, now: float) -> History:
    recent = tuple(c for c in history.changes if 0 <= now - c[0] < DOWN_PERIOD)
    if not added:
        return replace(history, changes=recent)
    direction = 1 if added > 0 else -1
    turns = tuple(turn for turn in history.turns if 0 <= now - turn[0] < HOUR)
    if history.direction not in (0, direction):
        turns = (*turns, (now, history.last))
    return replace(
        history, changes=(*recent, (now, added)), direction=direction, last=now, turns=turns
    )


def _window_filled(history: History, window: float, now: float) -> bool:
    return history.since is not None and now - history.since >= window


def _over_window(
    history: History, window: float, now: float, pick: Callable[[list[int]], int]
) -> int:
    return pick([raw for at, raw in history.raws if now - at <= window])
