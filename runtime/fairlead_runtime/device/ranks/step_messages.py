"""The two messages of a step to a rank. Imports no torch: ranks listen before they have it."""

from fairlead_runtime.child.frames import Message

Pairs = list[tuple[int, int]]  # from unit, to unit


class Copies(Message):
    """The copies of a ``scheduling.plan.Work``."""

    offload: Pairs
    restore: Pairs
    copies: Pairs


class Forward(Message):
    """A forward pass: the bytes of a batch's tensors and of what comes to the block tables.
    ``ahead``: the leader's device alone has all ids, and shares them in the pass.
    """

    tensors: list[bytes]
    ahead: bool
