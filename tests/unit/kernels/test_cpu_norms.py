"""Norms in float32 and bfloat16, alone and with a gate, in C++: the reference's, rounded once."""

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fairlead_kernels.cpu import cpu_operations
from fairlead_kernels.cpu.cpu_norms import CpuGatedNorm, CpuNorm
from fairlead_kernels.interface import reference
from fairlead_kernels.interface.layer import GatedNorm, Norm
from support.full import LONG_FORM
from support.kernel_sets import every_set

examples = settings(max_examples=200 if LONG_FORM else 25, deadline=None)
TYPES = (torch.float32, torch.bfloat16)
types = st.sampled_from(TYPES)
seeds = st.integers(0, 2**31)


def norm_of(width: int, dtype: torch.dtype, *, biased: bool, **settings: Any) -> Norm:
    weight, bias = torch.randn(2, width).to(dtype)
    return Norm(weight, 1e-5, bias=bias if biased else None, **settings)


def assert_rounded_once(got: Tensor, want: Tensor) -> None:
    """``want``: in float64."""
    if got.dtype is torch.float32:
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
    else:
        assert got.dtype is torch.bfloat16
        # To the nearest, or to the next where the sums' own rounding decides.
        assert ((got.double() - want).abs() <= 2.0**-8 * want.abs() * 1.001 + 1e-5).all()


@every_set
@examples
@example(tokens=0, width=20, biased=True, centered=True, offset=0.0, seed=0)
@given(
    tokens=st.integers(1, 20),
    width=st.integers(1, 150),
    biased=st.booleans(),
    centered=st.booleans(),
    offset=st.sampled_from([0.0, 1.0]),
    seed=seeds,
)
def test_a_norm_of_bfloat16_is_the_references_rounded_once(
    instruction_set: str,
    tokens: int,
    width: int,
    biased: bool,
    centered: bool,
    offset: float,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    ours = cpu_operations.load(instruction_set)
    norm = norm_of(width, torch.bfloat16, biased=biased, centered=centered, offset=offset)
    x, residual = (3 * torch.randn(2, tokens, width)).bfloat16()
    if centered and tokens:  # else what rounding leaves of a mean is divided by little
        x[:, 0] += 9
    want, _ = reference.norm(x.double(), norm_in_float64(norm))
    got = CpuNorm(ours.library, norm)(x[None])
    assert_rounded_once(got[0], want)
    assert torch.equal(ours.norm(x, norm)[0], got[0])
    # The residual's sum is rounded, and so it is what torch's is.
    normed, total = ours.norm(x, norm, residual.clone())
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, CpuNorm(ours.library, norm)(x + residual))


def norm_in_float64(norm: Norm) -> Norm:
    return norm.to(torch.float64)


@every_set
@examples
@example(tokens=0, group=20, groups=1, last=True, types_of=TYPES, biased=False, offset=0.0, seed=0)
@given(
    tokens=st.integers(1, 20),
    group=st.integers(1, 70),
    groups=st.integers(1, 4),
    last=st.booleans(),
    types_of=st.tuples(types, types),
    biased=st.booleans(),
    offset=st.sampled_from([0.0, 1.0]),
    seed=seeds,
)
def test_a_norm_with_a_gate_is_the_references(
    instruction_set: str,
    tokens: int,
    group: int,
    groups: int,
    last: bool,
    types_of: tuple[torch.dtype, torch.dtype],
    biased: bool,
    offset: float,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    ours, width = cpu_operations.load(instruction_set), group * groups
    of_x, of_gate = types_of
    gated = GatedNorm(norm_of(width, of_gate, biased=biased, offset=offset), group, last)
    x = 2 * torch.randn(tokens, width).to(of_x)
    gate = (2 * torch.randn(tokens, 2 * width)).to(of_gate)[:, width:]  # a part of a wider row
    got = CpuGatedNorm(ours.library, gated)(x, gate)
    assert got.dtype is of_x
    want = reference.gated_norm(
        x.double(), gate, GatedNorm(norm_in_float64(gated.norm), group, last)
    )
    assert_rounded_once(got, want)


@every_set
@pytest.mark.parametrize("threads", [1, 3])
def test_many_rows_are_shared_by_threads_and_each_is_the_same_bits(
    instruction_set: str, threads: int
) -> None:
    ours, before = cpu_operations.load(instruction_set), torch.get_num_threads()
    x, gate = torch.randn(2, 700, 96).bfloat16()
    norm = norm_of(96, torch.bfloat16, biased=False)
    alone, gated = (
        CpuNorm(ours.library, norm),
        CpuGatedNorm(ours.library, GatedNorm(norm, 48, True)),
    )
    torch.set_num_threads(threads)
    try:
        normed, mixed = alone(x), gated(x, gate)
        for row in (0, 1, 350, 699):
            assert torch.equal(alone(x[row]), normed[row])
            assert torch.equal(gated(x[row], gate[row]), mixed[row])
    finally:
        torch.set_num_threads(before)


def test_tensors_that_do_not_fit_are_refused_by_name() -> None:
    ours = cpu_operations.load()
    half = norm_of(8, torch.bfloat16, biased=False)
    with pytest.raises(ValueError, match=r"x: .* bfloat16 \[\.\.\., 8\] on the CPU is needed"):
        CpuNorm(ours.library, half)(torch.zeros(2, 8))
    with pytest.raises(ValueError, match=r"norm: vectors of torch\.float16"):
        CpuNorm(ours.library, half.to(torch.float16))
    with pytest.raises(ValueError, match="group: 3 of 8 columns"):
        CpuGatedNorm(ours.library, GatedNorm(half, 3, True))
    gated = CpuGatedNorm(ours.library, GatedNorm(half, 4, True))
    with pytest.raises(ValueError, match=r"gate: \(1, 8\) for x \(2, 8\)"):
        gated(torch.zeros(2, 8), torch.zeros(1, 8).bfloat16())
    with pytest.raises(ValueError, match=r"gate: .* bfloat16 \[\.\.\., 8\] on the CPU is needed"):
        gated(torch.zeros(2, 8), torch.zeros(2, 8))
