"""4-bit products by humming-kernels: on a stand-in, what they compute, which matrices they take and
what is found at start.
"""

import importlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fairlead_kernels.choice import backend
from fairlead_kernels.formats.int4 import Int4Matrix
from fairlead_kernels.interface import reference
from fairlead_kernels.interface.layer import Packed
from fairlead_kernels.interface.not_available import NotAvailableError
from fairlead_kernels.packages import humming_package
from fairlead_kernels.packages.humming_memory import UNPACKAGED
from fairlead_kernels.packages.humming_products import (
    BOUNDS,
    HummingPacked,
    HummingProducts,
)
from fairlead_kernels.plain.torch_operations import TorchOperations
from fairlead_kernels.proofs.comparison import TOLERANCE
from support import humming_standin
from support.operation_cases import fixed_operations, int4_matrix

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16)
Altered = Callable[[Tensor], Tensor]


def products(
    forward: Callable[..., Any] = humming_standin.humming_forward,
    dtype: torch.dtype = torch.bfloat16,
) -> HummingProducts:
    return HummingProducts(humming_standin.package(forward), dtype, CPU)


def packed(*weights: Int4Matrix, factor: float = 1.0) -> Packed:
    return TorchOperations().pack(list(weights), factor=factor)


@given(
    tokens=st.sampled_from([0, 1, 7, BOUNDS[0], BOUNDS[0] + 1, BOUNDS[1], BOUNDS[-1] + 5]),
    rows=st.lists(st.sampled_from([128, 256, 384]), min_size=1, max_size=3),
    orders=st.tuples(*[st.integers(0, 2)] * 3),
    sizes=st.sampled_from([(32, 2), (32, 6), (64, 1), (64, 3), (128, 2), (320, 1)]),
    biased=st.booleans(),
    factor=st.sampled_from([1.0, 0.3]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_a_product_is_the_references_and_takes_the_planned_bytes(
    tokens: int,
    rows: list[int],
    orders: tuple[int, ...],
    sizes: tuple[int, int],
    biased: bool,
    factor: float,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    group, groups = sizes
    columns = group * groups
    order = torch.randperm(columns).int()
    choices = [None, order, order.flip(0)]
    held = [int4_matrix(n, columns, groups, choices[i]) for n, i in zip(rows, orders, strict=False)]
    total = sum(rows)
    bias = torch.randn(total).to(dtype) if biased else None
    ours = products(dtype=dtype)
    weight = ours.repack(packed(*held, factor=factor))
    assert str(ours) == "4-bit products by humming stand-in"
    assert isinstance(weight, HummingPacked)
    assert (weight.rows, weight.columns, weight.data.dtype) == (total, columns, torch.uint8)
    used = orders[: len(held)]
    changes = sum(bool(b) for a, b in zip((None, *used), used, strict=False) if a != b)
    assert weight.nbytes == total * columns // 2 + total * groups * 5 // 2 + 4 * columns * changes
    x = torch.randn(tokens, columns).to(dtype)
    got = TorchOperations().linear(x, weight, bias)
    assert (got.shape, got.dtype) == ((tokens, total), dtype)
    want = reference.linear(x.double(), reference.pack(held, factor=factor), bias)
    if tokens:
        allowed = 2 * TOLERANCE["int4"][dtype] * float(want.abs().max())
        torch.testing.assert_close(got.double(), want, rtol=0, atol=allowed)


def test_what_it_was_not_made_for_is_refused() -> None:
    weight = products().repack(packed(int4_matrix(128, 128, 2)))
    with pytest.raises(ValueError, match=r"^x: torch.float32, for which its weights were not pack"):
        TorchOperations().linear(torch.randn(2, 128), weight)
    with pytest.raises(ValueError, match=r"^x: \(2, 64\) for weights of 128 columns"):
        TorchOperations().linear(torch.randn(2, 64).bfloat16(), weight)


def test_other_weights_stay_as_they_are() -> None:
    ours = products()
    plain = TorchOperations().pack([torch.randn(64, 64)])
    assert ours.repack(plain) is plain
    assert str(ours) == ""


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (lambda: int4_matrix(192, 128, 2), UNPACKAGED),
        (lambda: int4_matrix(128, 96, 3), UNPACKAGED),
        (lambda: replaced(zeros=torch.full((128, 2), 16).byte()), "a zero point is above 15"),
        (
            lambda: replaced(scales=torch.full((128, 2), 1e-6)),
            "float16 does not hold all of its scales",
        ),
        (
            lambda: replaced(scales=torch.tensor([[1.0, 1e5]]).repeat(128, 1)),
            "float16 does not hold all of its scales",
        ),
    ],
)
def test_a_matrix_that_it_does_not_take_stays_as_it_is_and_the_reason_is_said(
    weight: Callable[[], Int4Matrix], reason: str
) -> None:
    ours, given_ = products(dtype=torch.float16), packed(weight())
    assert ours.repack(given_) is given_
    assert ours.repack(given_) is given_
    assert str(ours) == f"4-bit products of ours: 2 not: {reason}"
    ours.repack(packed(int4_matrix(128, 128, 2)))
    assert str(ours) == f"4-bit products by humming stand-in, 2 not: {reason}"


def replaced(**parts: Tensor) -> Int4Matrix:
    weight = int4_matrix(128, 128, 2)
    held = {"scales": weight.scales, "zeros": weight.zeros} | parts
    return Int4Matrix("int4", weight.bits, **held)


def last_row_doubled(out: Tensor) -> Tensor:
    out[:, -1] *= 2
    return out


@pytest.mark.parametrize(
    ("altered", "above"),
    [
        (torch.zeros_like, 0),
        (torch.zeros_like, BOUNDS[-1]),
        (lambda x: x * torch.nan, BOUNDS[1]),
        (last_row_doubled, BOUNDS[0]),
        (lambda x: x.roll(1, 0), 1),
    ],
)
def test_a_kernel_that_computes_something_else_is_found_at_start(
    altered: Altered, above: int
) -> None:
    """Whichever number of tokens it is for; the matrix stays as it is, and others are tried."""
    calls: list[int] = []

    def forward(config: Any, inputs: Tensor, **more: Any) -> Tensor:
        calls.append(config.rows)
        out = humming_standin.humming_forward(config, inputs, **more)
        return altered(out) if len(inputs) > above and config.rows == 1152 else out

    ours, bad = products(forward), packed(int4_matrix(1152, 128, 2))
    assert ours.repack(bad) is bad
    tried = len(calls)
    assert ours.repack(bad) is bad
    assert len(calls) == tried, "a product that is known to be wrong is not tried again"
    assert isinstance(ours.repack(packed(int4_matrix(256, 128, 2))), HummingPacked)
    assert "2 not: humming's product with [1152, 128]: it differs from the reference" in str(ours)


def test_a_compiler_that_fails_is_a_reason_and_the_next_of_its_shape_is_not_compiled() -> None:
    def forward(*_: Any, **__: Any) -> Any:
        raise RuntimeError("NVRTCCompiler failed\nwith exit code 1")

    ours, weight = products(forward), packed(int4_matrix(128, 64, 1))
    assert ours.repack(weight) is weight
    assert str(ours) == (
        "4-bit products of ours: 1 not: humming's product with [128, 64]: RuntimeError: "
        "NVRTCCompiler failed with exit code 1"
    )


def test_only_the_first_of_a_shape_is_proven() -> None:
    calls: list[int] = []

    def forward(config: Any, inputs: Tensor, **more: Any) -> Tensor:
        calls.append(len(inputs))
        return humming_standin.humming_forward(config, inputs, **more)

    ours = products(forward)
    for _ in range(3):
        ours.repack(packed(int4_matrix(128, 128, 2)))
    assert calls == [1, *BOUNDS, BOUNDS[-1] + 1], "a step for each kernel"
    ours.repack(packed(int4_matrix(128, 128, 4)))
    assert len(calls) == 2 * (2 + len(BOUNDS)), "other groups are other kernels"


def test_so_many_compilers_run_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "HUMMING_MAX_PARALLEL_BUILD_WORKERS"
    monkeypatch.delenv(name, raising=False)
    seen: list[str | None] = []

    def forward(config: Any, inputs: Tensor, **more: Any) -> Tensor:
        seen.append(os.environ.get(name))
        return humming_standin.humming_forward(config, inputs, **more)

    ours = HummingProducts(humming_standin.package(forward), torch.float16, CPU, 3)
    ours.repack(packed(int4_matrix(128, 128, 2)))
    assert set(seen) == {"3"}
    assert name not in os.environ


def test_its_products_are_for_gpus_and_not_where_sums_have_one_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, layers = torch.device("cuda"), TorchOperations()
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(humming_package, "load", humming_standin.package)

    def make(*arguments: Any) -> Any:
        made.append(arguments)

    monkeypatch.setattr(backend, "HummingProducts", make)
    assert backend.int4_products(layers, torch.float16, CPU) == (None, "")
    assert backend.int4_products(fixed_operations(), torch.float16, gpu) == (None, "")
    assert backend.int4_products(None, torch.float16, gpu) == (None, "")
    assert backend.int4_products(layers, torch.float32, gpu) == (
        None,
        "4-bit products of ours: humming has none in float32",
    )
    assert not made
    assert backend.int4_products(layers, torch.float16, gpu, 4) == (None, "")
    assert made[0][1:] == (torch.float16, gpu, 4)


@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        (ModuleNotFoundError("no", name="humming"), "humming-kernels is not installed"),
        (
            ModuleNotFoundError("No module named 'tabulate'", name="tabulate"),
            "humming-kernels cannot be imported: No module named 'tabulate'",
        ),
        (
            RuntimeError("No suitable CUDA 13\nenvironment found."),
            "humming-kernels cannot be imported: RuntimeError: No suitable CUDA 13 environment f",
        ),
    ],
)
def test_a_package_that_cannot_be_imported_is_a_reason(
    raised: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> Any:
        assert name == "humming"
        assert os.environ["HUMMING_DISABLE_PARALLEL_BUILD"] == "1", "it would start processes"
        raise raised

    monkeypatch.setattr(importlib, "import_module", refuse)
    found, why = backend.int4_products(TorchOperations(), torch.float16, torch.device("cuda"))
    assert found is None
    assert why.startswith(f"4-bit products of ours: {reason}")
    with pytest.raises(NotAvailableError):
        humming_package.load()
    assert "HUMMING_DISABLE_PARALLEL_BUILD" not in os.environ
