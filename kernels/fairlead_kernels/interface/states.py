"""States of fixed size of sequences in a pool, and the operations of a packed row that change them.

Owns the values that an operation on states takes. A sequence's whole state is a run of bytes over
units of a pool, in its order; each operation reads one tensor of it, from the sequence's ``source``
units, and writes what it is behind the sequence's last token to its ``target`` units.

    pool     [ unit 0 | unit 1 | unit 2 | unit 3 | ... ]
    run      [ unit 3 | unit 0 | unit 1 ]     of a sequence with the units 3, 0, 1
                  [  tensor  ]                at ``offset``, over two of them

The results of a token depend on its sequence's tokens before it alone, to the bit: neither on how
these are cut into steps, nor on other sequences, nor on the number of threads.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StatePlace:
    """Where one tensor of a state lies. ``pool`` uint8 [units, bytes of a unit], contiguous;
    ``offset``: the tensor's first byte in a sequence's run. Both in multiples of 64 bytes.
    """

    pool: Tensor
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class StateRows:
    """S sequences of a packed row, all on the CPU. ``starts`` int64 [S + 1]: their first tokens,
    and the end of the last; ``prompts`` int64 [S]: how many of a sequence's tokens are of its
    prompt; ``begins`` bool [S]: its state is zeros, whatever its source holds; ``source`` and
    ``target`` int64 [S, n]: the units of its run. Sequences may share a source and never a target,
    and no source is a target.
    """

    starts: Tensor
    prompts: Tensor
    begins: Tensor
    source: Tensor
    target: Tensor


class StateOperations(Protocol):
    """Operations of packed rows that read and write states. They raise ValueError for tensors of
    other shapes, types or devices than they say.
    """

    def causal_convolution(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: Literal["silu"] | None,
        rows: StateRows,
        place: StatePlace,
    ) -> Tensor:
        """A causal convolution of each channel by itself: x [T, C] and weight [C, K], K of 2 or
        more, float32 or bfloat16 alike; bias [C] of their type. The state [C, K - 1] of that type
        holds the last inputs, oldest first. Returns [T, C]; in bfloat16 the sum is rounded, then
        the activation.
        """
        ...

    def gated_delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float,
        rows: StateRows,
        place: StatePlace,
        *,
        normalizes: bool,
    ) -> Tensor:
        """The gated delta rule (S. Yang et al., "Gated Delta Networks", 2024): q, k [T, Hk, Dk],
        v [T, Hv, Dv], float32 or bfloat16 alike, with heads and their elements side by side; g, the
        logarithm of the decay, and beta float32 [T, Hv]. Hk divides Hv. The state S float32
        [Hv, Dk, Dv] becomes S e^g + k (beta (v - k S e^g)) at each token, and gives scale q S.
        ``normalizes``: q and k are divided by their length (with 1e-6 added to its square). Returns
        [T, Hv, Dv] of v's type.
        """
        ...
