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

import math
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

    def ssd(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        rows: StateRows,
        place: StatePlace,
        *,
        d: Tensor | None = None,
        bias: Tensor | None = None,
        softplus: bool = False,
        bounds: tuple[float, float] = (-math.inf, math.inf),
    ) -> Tensor:
        """Mamba 2's scan, the recurrent form of "state space duality" (Dao and Gu, "Transformers
        are SSMs", 2024): x [T, H, P], b, c [T, G, N] and dt [T, H], float32 or bfloat16 alike, each
        token's elements side by side; a, and d and bias where there are some, float32 [H]. G
        divides H. A time step is dt + bias, or its ``softplus``, and within ``bounds`` for tokens
        of prompts. The state S float32 [H, P, N] becomes S e^(a step) + step x b at each token, and
        gives S c + d x. Returns float32 [T, H, P].
        """
        ...

    def selective_scan(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        rows: StateRows,
        place: StatePlace,
        *,
        d: Tensor | None = None,
        z: Tensor | None = None,
        bias: Tensor | None = None,
        softplus: bool = False,
    ) -> Tensor:
        """Mamba 1's scan (Gu and Dao, "Mamba", 2023): x, z [T, C] and b, c [T, N], float32 or
        bfloat16 alike, each token's elements side by side; dt [T, C] of their type and of any
        strides; a float32 [C, N], d and bias [C]. A time step is dt + bias, or its ``softplus``.
        The state S float32 [C, N] becomes S e^(a step) + step x b at each token, and gives
        (S c + d x) silu(z). Returns float32 [T, C].
        """
        ...
