"""Where a layer's keys are stored, and that copies follow the order that the scheduler expects."""

from dataclasses import replace

import pytest
import torch

from fairlead_kernels.interface.attention import Heads
from fairlead_runtime.device.memory.storage import CacheStorage
from fairlead_runtime.scheduling.plan import Work
from fairlead_runtime.sizing.groups import group_layers

HEADS = Heads(4, 2, 8, 8, torch.float32)
FP8 = Heads(4, 2, 8, 8, torch.bfloat16, fp8_cache=True)
CPU = torch.device("cpu")


def storage(
    windows: list[int | None], *, units: int = 6, host_units: int = 0, heads: Heads = HEADS
) -> CacheStorage:
    return CacheStorage(
        group_layers(windows), heads, units=units, block_size=4, device=CPU, host_units=host_units
    )


def stamp(cache: CacheStorage) -> None:
    """Unit u holds u everywhere in the keys and -u in the values."""
    cache.keys[:] = torch.arange(cache.units).view(1, -1, 1, 1, 1)
    cache.values[:] = -torch.arange(cache.units).view(1, -1, 1, 1, 1)


def unit_contents(cache: CacheStorage) -> list[float]:
    first = cache.keys[:, :, 0, 0, 0]
    assert (cache.keys == first[:, :, None, None, None]).all()
    assert (first == first[0]).all()
    assert torch.equal(cache.values, -cache.keys)
    return [float(x) for x in first[0]]


def test_layers_of_one_group_share_a_unit_and_never_its_bytes() -> None:
    cache = storage([None, 8, None, 8])
    places = [cache.layer(i) for i in range(4)]
    assert [group for _, _, group in places] == [0, 1, 0, 1]
    for i, (keys, _, _) in enumerate(places):
        keys[i] = i + 1
    assert [float(cache.layer(i)[0][i].mean()) for i in range(4)] == [1, 2, 3, 4]


def test_bytes_are_those_of_all_units() -> None:
    cache = storage([None, None, None], units=5)
    groups = cache.groups
    assert cache.nbytes == 5 * CacheStorage.unit_bytes(groups, HEADS, 4)
    assert CacheStorage.unit_bytes(groups, HEADS, 4) == 3 * 4 * 2 * (8 + 8) * 4


def test_an_fp8_cache_and_its_host_memory_take_a_byte_an_element() -> None:
    plain = replace(FP8, fp8_cache=False)
    wide, small = (storage([None, 8, None], host_units=3, heads=heads) for heads in (plain, FP8))
    assert small.keys.dtype is small.values.dtype is torch.float8_e4m3fn
    assert small.nbytes == 6 * CacheStorage.unit_bytes(small.groups, FP8, 4) == wide.nbytes // 2
    assert small.host_nbytes == wide.host_nbytes // 2 == small.nbytes // 2


def test_offload_restore_and_copies_keep_every_byte_of_an_fp8_cache() -> None:
    cache = storage([None, None], host_units=3, heads=FP8)
    keys, values = cache.keys.view(torch.uint8), cache.values.view(torch.uint8)
    for part in (keys, values):  # every code, NaN too
        part.copy_(torch.randint(0, 256, part.shape, dtype=torch.uint8))
    before = keys.clone(), values.clone()
    cache.copy(Work(0, offload=[(1, 2), (4, 0)], copies=[(2, 3)]))
    keys[:, [1, 4]] = values[:, [1, 4]] = 0
    cache.copy(Work(1, restore=[(2, 5), (0, 1)]))
    for part, was in zip((keys, values), before, strict=True):
        assert torch.equal(part[:, [0, 1, 2, 3, 5]], was[:, [0, 4, 2, 2, 1]])
        assert not part[:, 4].any()


def test_offload_then_restore_brings_back_the_same_content() -> None:
    cache = storage([None, None], host_units=3)
    stamp(cache)
    cache.copy(Work(0, offload=[(1, 2), (4, 0)]))
    cache.keys[:, [1, 4]] = 99
    cache.values[:, [1, 4]] = -99
    cache.copy(Work(1, restore=[(2, 5), (0, 3)]))
    assert unit_contents(cache) == [0, 99, 2, 4, 99, 1]


def test_offload_comes_before_restore_and_restore_before_copies() -> None:
    cache = storage([None], host_units=2)
    stamp(cache)
    cache.copy(Work(0, offload=[(3, 0)]))
    # Unit 1 is offloaded and restored into in one step, then it is the source of a copy.
    cache.copy(Work(1, offload=[(1, 1)], restore=[(0, 1)], copies=[(1, 4)]))
    assert unit_contents(cache) == [0, 3, 2, 3, 3, 5]
    cache.copy(Work(2, restore=[(1, 0)]))
    assert unit_contents(cache)[0] == 1


def test_offloading_without_host_memory_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="cpu_offload_space"):
        storage([None]).copy(Work(0, offload=[(0, 0)]))
