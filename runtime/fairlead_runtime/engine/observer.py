"""The engine's hooks for metrics, and the canary: the one kind of request no metric counts."""

import uuid
from collections.abc import Sequence

from fairlead_runtime.request.sequence import FinishReason, Request, SamplingParams
from fairlead_runtime.scheduling.plan import Event, Work

CANARY = "canary/"  # no client's id holds a slash


class Observer:
    """The engine thread calls every method; what one raises ends no request. This class does
    nothing.

    ``stepped`` comes before ``ended`` of the requests that the step finished.
    """

    def arrived(self, request: Request, at: float) -> None: ...
    def stepped(self, work: Work, events: Sequence[Event], began: float, ended: float) -> None: ...
    def ended(self, request: Request, reason: FinishReason, at: float) -> None: ...


def canary() -> Request:
    """A request for one token that tests the path through scheduler and device."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    return Request(f"{CANARY}{uuid.uuid4().hex}", (0,), params, max_tokens=1)
