"""What statistics hook into, and the one kind of request that they never count.

Owns the engine's hooks and the canary. Counts nothing itself.
"""

import itertools
from collections.abc import Sequence

from fairlead_runtime.request import FinishReason, Request, SamplingParams
from fairlead_runtime.scheduling.plan import Event, Work

CANARY = "canary/"  # no client's id holds a slash
_numbers = itertools.count()


class Observer:
    """Every method is called by the engine thread. The default observes nothing.

    ``stepped`` comes before the ``ended`` of the requests that the step finished.
    """

    def arrived(self, request: Request, at: float) -> None: ...
    def stepped(self, work: Work, events: Sequence[Event], began: float, ended: float) -> None: ...
    def ended(self, request: Request, reason: FinishReason, at: float) -> None: ...


def canary() -> Request:
    """A request of one token, in no request metric, that proves the path through scheduler and
    device.
    """
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    return Request(f"{CANARY}{next(_numbers)}", (0,), params, max_tokens=1)
