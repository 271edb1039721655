"""Live requests for the debug view: states, counts and the reason why one waits.

Reads sequences between two steps, in the engine thread; shows no prompt and no text.
"""

from collections import abc
from dataclasses import dataclass, field
from typing import NamedTuple

from fairlead_runtime.outputs import RequestView
from fairlead_runtime.request.sequence import FINAL, Request, Sequence, Status
from fairlead_runtime.scheduling.admission import most_needed, room
from fairlead_runtime.scheduling.planner import State


@dataclass(slots=True)
class LiveRequest:
    """A request between its arrival and the end of its last choice."""

    request: Request
    arrived: float  # seconds on the engine's clock
    open: set[int]  # choices without a finish reason
    # Of its prompt's blocks, until it is queued.
    hashes: bytearray = field(default_factory=bytearray)
    sequences: tuple[Sequence, ...] = ()
    cached: int = 0  # prompt tokens that its first step found in the prefix cache
    started: float = 0.0  # when its first step began, on the engine's clock


class _Queue(NamedTuple):
    """What a waiting sequence waits behind."""

    state: State
    positions: dict[int, int]  # by sequence id, in the policy's order
    free: int  # units that those that wait may take


def request_views(live: abc.Iterable[LiveRequest], state: State, now: float) -> list[RequestView]:
    """One view per live request, oldest first."""
    positions = {s.id: position for position, s in enumerate(state.policy.candidates())}
    queue = _Queue(state, positions, room(state))
    return [_view(request, queue, now) for request in live]


def _view(live: LiveRequest, queue: _Queue, now: float) -> RequestView:
    request, sequences = live.request, live.sequences
    return RequestView(
        id=request.id,
        status=_status(sequences),
        tenant=request.tenant,
        priority=request.priority,
        age=now - live.arrived,
        prompt_tokens=len(request.prompt),
        generated_tokens=tuple(sequence.generated for sequence in sequences),
        max_tokens=request.max_tokens,
        blocks=sum(queue.state.cache.units_held(s) for s in sequences if s.holds_units),
        preemptions=sum(sequence.preemptions for sequence in sequences),
        waits_for=_reason(sequences, queue),
        computed_tokens=max((sequence.computed for sequence in sequences), default=0),
        cached_tokens=live.cached,
    )


def _status(sequences: tuple[Sequence, ...]) -> Status:
    """The furthest status of the unfinished choices."""
    states = {sequence.status for sequence in sequences} - FINAL
    for status in (Status.DECODING, Status.PREFILLING):
        if status in states:
            return status
    return Status.PENDING


def _reason(sequences: tuple[Sequence, ...], queue: _Queue) -> str:
    if not sequences:
        return "its structured output is being compiled"
    positions = queue.positions
    queued = [sequence for sequence in sequences if sequence.id in positions]
    if not queued or any(s.status in {Status.DECODING, Status.PREFILLING} for s in sequences):
        return ""
    first = min(queued, key=lambda sequence: positions[sequence.id])
    need = most_needed(queue.state, first)
    blocks = f"needs at most {need} units of the cache, {queue.free} are free"
    if first.preemptions:
        preempted = f"preempted {first.preemptions} times: goes on when its blocks fit again"
        return f"{preempted}, {positions[first.id]} ahead of it; {blocks}"
    if ahead := positions[first.id]:
        return f"{ahead} ahead of it; {blocks}"
    limit = queue.state.limits.max_requests
    if len(queue.state.running) >= limit:
        return f"next: waits until fewer than {limit} requests (max_requests) run; {blocks}"
    if need > queue.free:
        return f"next: {blocks} (safety_margin keeps some for running requests)"
    # Also of one that came since the last step, which nothing has kept waiting.
    return f"next: the next step that has room (max_batch_tokens) takes it; {blocks}"
