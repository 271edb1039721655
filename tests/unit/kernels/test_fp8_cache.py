"""Keys and values as float8_e4m3fn: how they are rounded, written, copied and read."""

import importlib.util
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fairlead_kernels.interface import reference
from fairlead_kernels.interface.attention import Heads, LayerSpec
from fairlead_kernels.interface.cache_write import rounded, write
from fairlead_kernels.plain.copy_blocks import copy_blocks
from fairlead_kernels.plain.torch_attention import TorchAttention
from support.attention_cases import make_case
from support.fp8_reference import MIDDLES, NUMBERS, codes, nearest
from support.operation_cases import operations

CPU, FP8 = torch.device("cpu"), torch.float8_e4m3fn
MIXED = [(0, 7), (12, 1), (3, 1), (9, 5), (30, 1), (0, 1), (31, 1), (16, 8)]


def hard_floats() -> Tensor:
    """Every number of the format, every middle of two, their neighbours in float32, what is too
    large and what is too small, with both signs.
    """
    exact = torch.cat([NUMBERS, MIDDLES]).float()
    near = [torch.nextafter(exact, torch.tensor(to)) for to in (-torch.inf, torch.inf)]
    ends = torch.tensor([449.0, 463.9, 464.0, 465.0, 480.0, 1e6, 3e38, torch.inf, 1e-9, 1e-40])
    positive = torch.cat([exact, *near, ends]).clamp(min=0)
    return torch.cat([positive, -positive])


def bits(x: Tensor) -> Tensor:
    """The codes, with 128 for a sign."""
    return x.view(torch.uint8).int()


def expected_bits(x: Tensor) -> Tensor:
    return (codes(x) + 128 * x.signbit()).int()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_too_large_becomes_the_largest_number_before_torchs_cast_sees_it(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since not every torch's cast does so: this one is made to give NaN, as older ones do."""
    cast = torch.Tensor.to

    def to(x: Tensor, *arguments: Any) -> Tensor:
        return cast(x.masked_fill(x.abs() > 464, torch.nan), *arguments)

    large = torch.tensor([500.0, -6e4, torch.inf, -torch.inf, 7.0], dtype=dtype)
    monkeypatch.setattr(torch.Tensor, "to", to)
    got = rounded(large, FP8)
    monkeypatch.undo()
    assert got.float().tolist() == [448.0, -448.0, 448.0, -448.0, 7.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_number_becomes_the_nearest_of_the_format(dtype: torch.dtype) -> None:
    x = hard_floats().to(dtype)
    assert torch.equal(bits(rounded(x, FP8)), expected_bits(x))
    assert rounded(torch.tensor([torch.nan]), FP8).float().isnan().all(), "a fault stays one"


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
def test_the_operations_of_layers_write_the_same_bits(name: str, dtype: torch.dtype) -> None:
    if name == "triton" and importlib.util.find_spec("triton") is None:
        pytest.skip("Triton comes with torch's CUDA build alone")
    dim = 16
    x = hard_floats().to(dtype)
    x = torch.cat([x, x.new_tensor([torch.nan])])
    x = torch.cat([x, x.new_zeros(-len(x) % dim)]).view(-1, dim)
    # A head for the query, one for the key, one for the value; nothing turns.
    qkv = torch.cat([torch.zeros_like(x), x, x.flip(0)], dim=1)
    caches = [torch.zeros(len(x), 1, 1, dim).to(FP8) for _ in range(2)]
    slots, none = torch.arange(len(x)), torch.zeros(len(x), 0)
    operations(name).rope_write(qkv, none, none, slots, caches[0], caches[1])
    for cache, given_values in zip(caches, (x, x.flip(0)), strict=True):
        got, want = bits(cache).view(-1, dim), expected_bits(given_values.nan_to_num(nan=0.0))
        faults = given_values.isnan()
        assert bool((got[faults] & 127 == 127).all())
        assert torch.equal(got[~faults], want[~faults])


@settings(max_examples=30, deadline=None)
@given(size=st.floats(1e-4, 1e4), seed=st.integers(0, 2**31))
def test_a_key_moves_by_a_16th_of_itself_at_most(size: float, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(300) * size
    got = rounded(x, FP8).float()
    assert torch.equal(got, nearest(x))
    inside = x.abs() <= 448
    assert bool(((got - x).abs() <= x.abs() / 16 + 2.0**-10)[inside].all())


def test_written_keys_land_in_their_slots_and_nowhere_else() -> None:
    torch.manual_seed(0)
    key, value = torch.randn(5, 2, 8) * 400, torch.randn(5, 2, 8) * 400
    slots = torch.tensor([21, 0, 7, 8, 15])
    ours, theirs = ([torch.zeros(6, 4, 2, 8).to(FP8) for _ in range(2)] for _ in range(2))
    write(ours[0], ours[1], slots, key, value)
    reference.write(theirs[0], theirs[1], slots, key, value)
    for cache, other, given_values in zip(ours, theirs, (key, value), strict=True):
        assert torch.equal(bits(cache), bits(other))
        assert torch.equal(cache.float().view(24, 2, 8)[slots], nearest(given_values))
        assert bool((cache.float().view(24, -1).abs().sum(1) > 0).sum() == 5)


def test_copies_of_blocks_are_copies_of_bytes() -> None:
    """All 256 codes, two of which are NaN: a copy by value could lose a sign of those."""
    source = torch.arange(256, dtype=torch.uint8).view(2, 4, 8, 4).view(FP8)
    target = torch.zeros(2, 3, 8, 4).to(FP8)
    copy_blocks(source, target, [(3, 0), (1, 2)], dim=1)
    assert torch.equal(bits(target)[:, [0, 2]], bits(source)[:, [3, 1]])
    assert not bits(target)[:, 1].any()
    copy_blocks(target, target, [(0, 1), (2, 0)], dim=1)
    assert torch.equal(bits(target)[:, [1, 0, 2]], bits(source)[:, [3, 1, 1]])


@pytest.mark.parametrize("block_size", [1, 4, 16, 256])
@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("extras", ["none", "softcap", "sinks"])
def test_plain_torch_attends_to_what_the_cache_holds(
    block_size: int, window: int | None, extras: str
) -> None:
    softcap = 2.0 if extras == "softcap" else None
    spec = LayerSpec(0.3, window, softcap, torch.randn(4) if extras == "sinks" else None)
    exact, half = torch.float32, torch.float16
    for dtype, contiguous in ((exact, False), (exact, True), (half, False)):
        heads = Heads(4, 2, 8, 8, dtype, fp8_cache=True)
        case = make_case(
            MIXED, block_size=block_size, window=window, heads=heads, contiguous=contiguous
        )
        assert case.key_cache.dtype is case.value_cache.dtype is FP8
        backend = TorchAttention(heads, CPU)
        tensors = case.query, case.key_cache, case.value_cache
        got = backend.run(backend.plan(case.ragged), *tensors, spec)
        want = reference.attend(case.ragged, *tensors, spec)
        assert got.dtype is dtype
        atol, rtol = (2e-6, 1e-5) if dtype is exact else (5e-3, 5e-3)
        torch.testing.assert_close(got, want, atol=atol, rtol=rtol)


def test_widened_memory_grows_with_a_piece_and_is_kept() -> None:
    heads = Heads(4, 2, 8, 8, torch.float32, fp8_cache=True)
    backend = TorchAttention(heads, CPU)
    case = make_case([(0, 60), (7, 3), (40, 1)], heads=heads)
    tensors = case.query, case.key_cache, case.value_cache
    places = []
    for _ in range(2):
        backend.run(backend.plan(case.ragged), *tensors, LayerSpec(0.3))
        buffer = backend._wide_keys._buffer
        assert buffer is not None
        places.append((buffer.data_ptr(), buffer.numel()))
    assert places == [places[0]] * 2
    assert places[0][1] == 60 * 2 * 8, "the longest row, not the cache"
