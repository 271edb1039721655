"""The processes that hold the other parts of a split model, as the one that schedules sees them.

Owns the protocol; ``build/rank_leader.py`` has the processes.
"""

from typing import Protocol

from torch import Tensor

from fairlead_runtime.device.model.batch import Batch
from fairlead_runtime.scheduling.plan import DeviceLostError, Work


class Followers(Protocol):
    """The processes that hold the other parts of the model and make every step with this one."""

    def copy(self, work: Work) -> None:
        """Let them make the copies of ``work``, in their parts of the cache."""
        ...

    def forward(self, batch: Batch, keep: Tensor | None, *, ahead: bool = False) -> None:
        """Let them run this pass. Raises DeviceLostError, as ``copy`` does, when one has ended.
        ``ahead``: its ids are those that ``share`` gives them next.
        """
        ...

    def share(self, ids: Tensor) -> None:
        """Give them the ids of the pass, int64 [T] on this process's device, in its order."""
        ...

    def failure(self, error: Exception) -> DeviceLostError:
        """What to raise after a forward pass raised ``error`` here: the others may be anywhere in
        theirs, so no further pass is possible.
        """
        ...
