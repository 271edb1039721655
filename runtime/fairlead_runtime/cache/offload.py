"""Units in host memory, which keep the blocks of offloaded sequences. Owns their ids only; the
runner makes the copies.
"""

from fairlead_runtime.cache.blocks import PoolError


class HostPool:
    """``units`` ids from 0, each held by at most one sequence."""

    def __init__(self, units: int) -> None:
        self.units = units
        self.free = list(range(units - 1, -1, -1))

    def take(self, count: int) -> list[int]:
        if count > len(self.free):
            raise PoolError(f"{count} host units requested, {len(self.free)} free")
        return [self.free.pop() for _ in range(count)]

    def release(self, units: list[int]) -> None:
        self.free.extend(reversed(units))
