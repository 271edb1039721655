"""Live requests for the debug view: states, counts and the reason why one waits.

Reads sequences between two steps, in the engine thread; shows no prompt and no text.
"""

from collections import abc
from dataclasses import dataclass

from fairlead_runtime.outputs import RequestView
from fairlead_runtime.request.sequence import FINAL, Request, Sequence, Status
from fairlead_runtime.sizing.groups import NULL


@dataclass(slots=True)
class LiveRequest:
    """A request between its arrival and the end of its last choice."""

    request: Request
    arrived: float  # seconds on the engine's clock
    open: set[int]  # choices without a finish reason
    sequences: tuple[Sequence, ...] = ()
    cached: int = 0  # prompt tokens that its first step found in the prefix cache
    started: float = 0.0  # when its first step began, on the engine's clock


def request_views(
    live: abc.Iterable[LiveRequest],
    waiting: abc.Sequence[Sequence],
    running: int,
    max_requests: int,
    now: float,
) -> list[RequestView]:
    """One view per live request, oldest first. ``waiting`` is in the policy's order."""
    positions = {sequence.id: position for position, sequence in enumerate(waiting)}
    return [_view(request, positions, running, max_requests, now) for request in live]


def _view(
    live: LiveRequest, positions: dict[int, int], running: int, max_requests: int, now: float
) -> RequestView:
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
        blocks=sum(
            unit != NULL for sequence in sequences for table in sequence.tables for unit in table
        ),
        preemptions=sum(sequence.preemptions for sequence in sequences),
        waits_for=_reason(sequences, positions, running, max_requests),
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


def _reason(
    sequences: tuple[Sequence, ...], positions: dict[int, int], running: int, max_requests: int
) -> str:
    if not sequences:
        return "its structured output is being compiled"
    queued = [sequence for sequence in sequences if sequence.id in positions]
    if not queued or any(s.status in {Status.DECODING, Status.PREFILLING} for s in sequences):
        return ""
    first = min(queued, key=lambda sequence: positions[sequence.id])
    ahead = positions[first.id]
    if first.preemptions:
        return (
            f"preempted {first.preemptions} times: "
            f"goes on when its blocks fit again, {ahead} ahead of it"
        )
    if ahead:
        return f"{ahead} ahead of it"
    if running >= max_requests:
        return f"next: waits until fewer than {max_requests} requests (max_requests) run"
    return "next: waits for free cache blocks (safety_margin keeps some for running requests)"
