"""Where a layer's keys are stored, and that copies follow the order that the scheduler expects."""

import mmap
from dataclasses import replace

import pytest
import torch

from fairlead_kernels.interface.attention import Heads
from fairlead_kernels.interface.cache_write import write
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
    cache.tensors[0][:] = torch.arange(cache.units).view(1, -1, 1, 1, 1)
    cache.tensors[1][:] = -torch.arange(cache.units).view(1, -1, 1, 1, 1)


def unit_contents(cache: CacheStorage) -> list[float]:
    first = cache.tensors[0][:, :, 0, 0, 0]
    assert (cache.tensors[0] == first[:, :, None, None, None]).all()
    assert (first == first[0]).all()
    assert torch.equal(cache.tensors[1], -cache.tensors[0])
    return [float(x) for x in first[0]]


def test_a_cache_begins_with_a_page() -> None:
    # numpy's zeros begin so, too, or 16 bytes behind it, by their size.
    for units in (1, 30, 3000):
        for tensor in storage([None, 8], units=units).tensors:
            assert tensor.data_ptr() % mmap.PAGESIZE == 0
            assert not tensor.any()


def test_layers_of_one_group_share_a_unit_and_never_its_bytes() -> None:
    cache = storage([None, 8, None, 8])
    places = [cache.layer(i) for i in range(4)]
    assert [group for _, _, group in places] == [0, 1, 0, 1]
    for i, (keys, _, _) in enumerate(places):
        keys[i] = i + 1
    assert [float(cache.layer(i)[0][i].mean()) for i in range(4)] == [1, 2, 3, 4]


# Layers 0, 3 and 6 are full, of 40 elements a token; the others have windows and keep 80.
MIXED_WINDOWS = [None, 8, 8, None, 8, 8, None]
SIZES = [Heads(4, 2 if window else 1, 24, 16, torch.float32) for window in MIXED_WINDOWS]
WIDTHS = [h.kv * (h.dim + h.value_dim) for h in SIZES]


def mixed(heads: list[Heads] = SIZES, host_units: int = 0) -> CacheStorage:
    groups = group_layers(MIXED_WINDOWS, WIDTHS)
    return CacheStorage(groups, heads, units=6, block_size=4, device=CPU, host_units=host_units)


@pytest.mark.parametrize("fp8", [False, True])
def test_layers_of_several_sizes_have_their_places_in_every_unit(fp8: bool) -> None:
    """Two windowed layers take all of a unit, three full ones three quarters."""
    heads = [replace(h, dtype=torch.bfloat16, fp8_cache=True) if fp8 else h for h in SIZES]
    cache = mixed(heads)
    assert [group.layers for group in cache.groups] == [(0, 3, 6), (1, 2), (4, 5)]
    for layer, h in enumerate(heads):
        keys, values, _ = cache.layer(layer)
        assert keys.shape == (6, 4, h.kv, 24)
        assert values.shape == (6, 4, h.kv, 16)
    slots: dict[int, torch.Tensor] = {}
    for group, units in zip(cache.groups, ((5, 2, 0), (1, 3), (4,)), strict=True):
        at = torch.tensor([4 * unit + offset for unit in units for offset in (3, 1)])
        slots |= dict.fromkeys(group.layers, at)
    written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for layer, at in slots.items():
        keys, values, _ = cache.layer(layer)
        h = heads[layer]
        key, value = (torch.randn(len(at), h.kv, dim) for dim in (24, 16))
        write(keys, values, at, key, value)
        written[layer] = key.to(keys.dtype), value.to(values.dtype)
    for layer, expected in written.items():
        for cached, want in zip(cache.layer(layer)[:2], expected, strict=True):
            got = cached.flatten(0, 1).float()[slots[layer]]
            assert torch.equal(got, want.float())


def test_units_of_several_sizes_move_as_a_whole() -> None:
    cache = mixed(host_units=3)
    (places,) = cache.tensors
    assert cache.nbytes == 6 * cache.unit_nbytes == places.nbytes
    assert cache.unit_nbytes == CacheStorage.unit_bytes(cache.groups, SIZES, 4) == 4 * 160 * 4
    assert cache.host_nbytes == 3 * cache.unit_nbytes
    places.copy_(torch.randn(places.shape))
    before = places.clone()
    cache.copy(Work(0, offload=[(1, 2), (4, 0)], copies=[(2, 3)]))
    places[:, [1, 4]] = 99
    cache.copy(Work(1, restore=[(2, 5), (0, 1)]))
    assert torch.equal(places[:, [0, 1, 2, 3, 5]], before[:, [0, 4, 2, 2, 1]])


def test_bytes_are_those_of_all_units() -> None:
    cache = storage([None, None, None], units=5)
    groups = cache.groups
    assert cache.nbytes == 5 * CacheStorage.unit_bytes(groups, HEADS, 4)
    assert CacheStorage.unit_bytes(groups, HEADS, 4) == 3 * 4 * 2 * (8 + 8) * 4


def test_an_fp8_cache_and_its_host_memory_take_a_byte_an_element() -> None:
    plain = replace(FP8, fp8_cache=False)
    wide, small = (storage([None, 8, None], host_units=3, heads=heads) for heads in (plain, FP8))
    assert small.tensors[0].dtype is small.tensors[1].dtype is torch.float8_e4m3fn
    assert small.nbytes == 6 * CacheStorage.unit_bytes(small.groups, FP8, 4) == wide.nbytes // 2
    assert small.host_nbytes == wide.host_nbytes // 2 == small.nbytes // 2


def test_offload_restore_and_copies_keep_every_byte_of_an_fp8_cache() -> None:
    cache = storage([None, None], host_units=3, heads=FP8)
    keys, values = cache.tensors[0].view(torch.uint8), cache.tensors[1].view(torch.uint8)
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
    cache.tensors[0][:, [1, 4]] = 99
    cache.tensors[1][:, [1, 4]] = -99
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
