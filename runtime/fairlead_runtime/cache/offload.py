"""Units in host memory, which keep the blocks of offloaded sequences. Owns their ids only; the
runner makes the copies.
"""

from fairlead_runtime.cache.blocks import PoolError


class HostPool:
    """``units`` ids from 0, each held by at most one sequence."""

    def __init__(self, units: int) -> None:
        self.units = units
        self.free = list(range(units - 1, -1, -1))
        self.moved = bytearray(units)  # 1 where a unit was taken or released, as in BlockPool

    def take(self, count: int) -> list[int]:
        if count > len(self.free):
            raise PoolError(f"{count} host units requested, {len(self.free)} free")
        units = [self.free.pop() for _ in range(count)]
        self._mark(units)
        return units

    def release(self, units: list[int]) -> None:
        self.free.extend(reversed(units))
        self._mark(units)

    def _mark(self, units: list[int]) -> None:
        for unit in units:
            self.moved[unit] = 1
