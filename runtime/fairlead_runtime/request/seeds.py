"""Seeds of random draws.

Owns the 64-bit mixer and the rule that gives a seed to a request without one. Keeps no state, reads
no clock and imports only constants, so that a replayed run has the same seeds.
"""

from fairlead_kernels.sampling.splitmix64 import GOLDEN, MUL1, MUL2

MASK64 = 2**64 - 1


def mix64(value: int) -> int:
    """One step of splitmix64: a bijection of 64-bit words that maps neighbours far apart."""
    x = (value + GOLDEN) & MASK64
    x = ((x ^ (x >> 30)) * MUL1) & MASK64
    x = ((x ^ (x >> 27)) * MUL2) & MASK64
    return x ^ (x >> 31)


def resolve_seed(seed: int | None, engine_seed: int, arrival_number: int) -> int:
    """The seed of a request, a signed 64-bit number.

    A seed set by the client is used unchanged. Otherwise the seed follows from the engine's seed
    and the arrival number (0, 1, 2 … in the order in which the engine received the requests): two
    requests without a seed differ, and a run with the same engine seed and the same order of
    arrival gives the same seeds.
    """
    if seed is not None:
        return seed
    return mix64(mix64(engine_seed & MASK64) ^ (arrival_number & MASK64)) & (2**63 - 1)
