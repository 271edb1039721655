"""The parts of a start, in their order, and how the code that runs in one tells of it.

Owns their names: those of the metric's label, of /debug/startup and, in camel case, of the
resource's status. At any time a start is in exactly one part, so their sum is the whole.
"""

from typing import Literal, Protocol

Part = Literal["imports", "download", "weights", "kernels", "self_test", "profile", "cache"]
# imports: from the start of the process until both processes have imported what they need.
# kernels: layers are fused, weights packed, kernels compiled. cache: the cache's memory, captured
# graphs and the tables of tokens, until the server is ready.
PARTS: tuple[Part, ...] = (
    *("imports", "download", "weights", "kernels", "self_test", "profile", "cache"),
)


class Report(Protocol):
    """Tells that a start is in ``part`` now, and has done so much of it: bytes of the download and
    the weights, layers of the kernels and the self-test. ``total`` 0: how much is not known.
    """

    def __call__(self, part: Part, done: int = 0, total: int = 0, /) -> None: ...


def unreported(_part: Part, _done: int = 0, _total: int = 0, /) -> None:
    """For a start that nobody watches."""
