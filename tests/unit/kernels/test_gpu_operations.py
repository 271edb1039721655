"""A layer's operations on GPUs, without one: those in torch on the CPU, those in Triton in its
interpreter. That Triton compiles its kernels for GPUs is shown too; that they run there is not.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings

from fairlead_kernels.choice import backend
from fairlead_kernels.formats.quantize import quantize
from fairlead_kernels.gpu import triton_operations
from fairlead_kernels.gpu.triton_operations import TritonOperations
from fairlead_kernels.interface import reference
from fairlead_kernels.interface.layer import Norm
from fairlead_kernels.interface.not_available import NotAvailableError
from fairlead_kernels.plain.torch_operations import TorchOperations, prove_fp8
from fairlead_kernels.proofs.triton_proof import prove_operations
from support.full import LONG_FORM
from support.operation_cases import (
    ActivationCase,
    Int4Case,
    NormCase,
    ProductCase,
    RopeCase,
    activation_cases,
    int4_cases,
    interpreted,
    norm_cases,
    operations,
    product_cases,
    rope_cases,
)

# The interpreter computes what is masked too.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
CPU = torch.device("cpu")
both = pytest.mark.parametrize("name", ["torch", "triton"])
# A case is small as it is, and in the interpreter it takes minutes to make it smaller.
examples = settings(
    max_examples=400 if LONG_FORM else 50,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton comes with torch's CUDA build alone",
)


@both
@examples
@given(case=norm_cases)
def test_a_norm_is_the_references(name: str, case: NormCase) -> None:
    case.check(operations(name), CPU)


@both
@examples
@given(case=rope_cases)
def test_rotation_and_the_cache_write_are_the_references(name: str, case: RopeCase) -> None:
    case.check(operations(name), CPU)


@both
@examples
@given(case=activation_cases)
def test_an_activation_with_or_without_a_gate_is_the_references(
    name: str, case: ActivationCase
) -> None:
    case.check(operations(name), CPU)


@both
@examples
@given(case=product_cases)
def test_a_product_of_any_size_is_the_references(name: str, case: ProductCase) -> None:
    case.check(operations(name), CPU)


@both
@examples
@given(case=int4_cases)
def test_a_product_with_weights_of_four_bits_is_the_references(name: str, case: Int4Case) -> None:
    case.check(operations(name), CPU)


@pytest.mark.parametrize("biased", [False, True])
def test_fp8_weights_meet_activations_in_fp8_where_the_device_multiplies_them(
    biased: bool,
) -> None:
    """torch multiplies them on CPUs too, with the same call."""
    torch.manual_seed(0)
    x = torch.randn(7, 96).bfloat16()
    x[1] *= 1e4
    x[2] = 0
    weights = [quantize(torch.randn(n, 96) * n, "fp8") for n in (16, 48)]
    bias = torch.randn(64).bfloat16() if biased else None
    ours = TorchOperations(fp8=True)
    packed = ours.pack(weights, factor=0.5)
    got = ours.linear(x, packed, bias)
    rounded = quantize(x.float(), "fp8").dequantize()
    want = reference.linear(rounded.double(), reference.pack(weights, factor=0.5), bias)
    assert got.dtype is torch.bfloat16
    largest = want.abs().amax(1, keepdim=True)  # of each token: one is 10,000 times as large
    assert bool(((got.double() - want).abs() <= 2**-7 * largest).all())
    exact = reference.linear(x.double(), packed, bias)
    assert not torch.allclose(got.double(), exact, rtol=2**-8), "activations are rounded"
    # Other types, and sizes that the device's product does not take, keep their activations.
    wide = ours.linear(x[:1].float(), packed, None if bias is None else bias.float())
    torch.testing.assert_close(wide.double(), exact[:1], rtol=1e-4, atol=1e-3)
    odd = ours.pack([quantize(torch.randn(15, 96), "fp8")])
    want = reference.linear(x[:1].double(), odd)
    torch.testing.assert_close(ours.linear(x[:1], odd).double(), want, rtol=0, atol=0.2)


@both
@pytest.mark.parametrize("width", [7, 64, 101])
def test_a_layer_norm_far_from_zero_is_that_of_the_deviations(name: str, width: int) -> None:
    deviations = torch.randint(-8, 9, (3, width)).float()
    norm = Norm(torch.ones(width), 1e-5, centered=True)
    got, _ = operations(name).norm(deviations + 1000, norm)
    want, _ = reference.norm(deviations, norm)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@both
def test_a_gate_far_from_zero_is_its_limit(name: str) -> None:
    gate = torch.tensor([[1e4, -1e4, 88.0, -88.0, 0.0]])
    for activation in ("silu", "gelu", "gelu_tanh", "relu"):
        got = operations(name).gated(torch.cat([gate, torch.ones(1, 5)], 1), activation)[0]
        assert got.tolist() == pytest.approx([1e4, 0.0, 88.0, 0.0, 0.0], abs=1e-30)


@needs_triton
@pytest.mark.parametrize("tile", [1, 16, 1 << 10])
def test_a_result_does_not_depend_on_the_tile_that_it_is_in(tile: int) -> None:
    ours, other = TritonOperations(interpreted()._kernels, tile), interpreted()
    x, residual, norm = torch.randn(5, 24), torch.randn(5, 24), Norm(torch.randn(24), 1e-6)
    for one, two in zip(
        ours.norm(x, norm, residual.clone()), other.norm(x, norm, residual.clone()), strict=True
    ):
        assert torch.equal(one, two)
    assert torch.equal(ours.gated(x, "silu"), other.gated(x, "silu"))


def test_a_tensor_that_a_kernel_cannot_read_is_refused_by_name() -> None:
    ours = TritonOperations(None)  # nothing is launched
    x, norm = torch.zeros(3, 8), Norm(torch.ones(8), 1e-6)
    with pytest.raises(ValueError, match=r"^residual: \(3, 7\), not \(3, 8\)"):
        ours.norm(x, norm, torch.zeros(3, 7))
    with pytest.raises(ValueError, match=r"^norm: \(7,\), not \(8,\)"):
        ours.norm(x, Norm(torch.ones(7), 1e-6))
    with pytest.raises(ValueError, match=r"^norm: its weights are not dense"):
        ours.norm(x, Norm(torch.ones(16)[::2], 1e-6))
    cache, slots, angles = torch.zeros(1, 4, 1, 2), torch.arange(3), torch.zeros(3, 2)
    strided = torch.zeros(1, 4, 1, 4)[..., ::2]
    with pytest.raises(ValueError, match=r"^cos: 4 elements to rotate in heads of 2"):
        ours.rope_write(x, torch.zeros(3, 4), torch.zeros(3, 4), slots, cache, cache)
    with pytest.raises(ValueError, match=r"^slots: \(2,\), not \(3,\)"):
        ours.rope_write(x, angles, angles, slots[:2], cache, cache)
    with pytest.raises(ValueError, match=r"must be dense"):
        ours.rope_write(x, angles, angles, slots, strided, cache)


@needs_triton
@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.full)])
def test_every_kernel_that_is_launched_compiles_for_gpus(*, few: bool) -> None:
    """In a process of its own: this one has the interpreter."""
    program = Path(__file__).parents[2] / "support/compile_triton.py"
    # With what this process finds first: kernels with a planted bug, too.
    paths = {"PYTHONPATH": os.pathsep.join([str(program.parents[1]), *sys.path])}
    environment = {**os.environ, **paths, "TRITON_INTERPRET": "0"}
    run = subprocess.run(
        [sys.executable, program, *(["few"] if few else [])],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    compiled = run.stdout.splitlines()
    assert {line.split()[0] for line in compiled} == {
        "norm",
        "rope_write",
        "activate",
        "multiply_int8",
        "multiply_int4",
        "attend",
        "merge",
        "multiply",
        "attend_in_order",
        "multiply_experts",
        "find_cuts",
    }
    assert {line.split()[1] for line in compiled} == {"sm80", "sm90"}


# -- the choice at start


def fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("Failed to find C compiler.\nPlease specify")


@both
def test_kernels_that_compute_what_the_reference_does_are_proven(name: str) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        prove_operations(operations(name), dtype, CPU)
    prove_operations(operations(name), torch.float32, CPU, torch.float8_e4m3fn)


@pytest.mark.parametrize("method", ["norm", "rope_write", "gated"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda out: out.mul_(1.1), "differs from the reference by 0.0"),
        (lambda out: out.mul_(torch.nan), "differs from the reference by nan"),
        (fails, "does not run here: RuntimeError: Failed to find C compiler. Please specify"),
    ],
)
def test_a_kernel_that_fails_or_computes_something_else_is_found_at_start(
    monkeypatch: pytest.MonkeyPatch, method: str, change: Any, reason: str
) -> None:
    own = getattr(TorchOperations, method)

    def broken(self: Any, *arguments: Any) -> Any:
        result = own(self, *arguments)
        change(result[0] if isinstance(result, tuple) else result)
        return result

    monkeypatch.setattr(TorchOperations, method, broken)
    with pytest.raises(NotAvailableError, match=reason):
        prove_operations(TorchOperations(), torch.bfloat16, CPU)


def test_where_triton_does_not_run_layers_are_in_torch_and_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_operations, "load", TorchOperations)
    assert backend.gpu_operations(torch.bfloat16, CPU)[1] == "layers in Triton"
    monkeypatch.setattr(TorchOperations, "gated", fails)
    made, reason = backend.gpu_operations(torch.bfloat16, CPU)
    assert type(made) is TorchOperations
    assert reason.startswith("layers in torch: torch's layer does not run here: RuntimeError: ")


def test_the_product_of_8_bit_floats_is_proven_on_the_device() -> None:
    """torch multiplies them on CPUs too."""
    prove_fp8(CPU)


@pytest.mark.parametrize(
    ("product", "reason"),
    [
        (fails, "8-bit floats does not run here: RuntimeError: Failed to find C compiler"),
        (
            lambda *_, **__: torch.ones(5, 32).bfloat16(),
            "the product of 8-bit floats differs from the reference by",
        ),
    ],
)
def test_where_8_bit_floats_are_not_multiplied_activations_keep_their_type(
    product: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gpu:
        """A device that is called one, whose tensors are the CPU's."""

        type = "cuda"

    def load(*, fp8: bool) -> TorchOperations:
        return TorchOperations(fp8=fp8)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(triton_operations, "load", load)
    monkeypatch.setattr(backend, "prove_operations", lambda *_: None)
    monkeypatch.setattr(backend, "prove_fp8", lambda _: prove_fp8(CPU))
    gpu: Any = Gpu()
    made, said = backend.gpu_operations(torch.bfloat16, gpu)
    assert isinstance(made, TorchOperations)
    assert (made.rounds, said) == (True, "layers in Triton")
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", product)
    made, said = backend.gpu_operations(torch.bfloat16, gpu)
    assert isinstance(made, TorchOperations)
    assert not made.rounds
    assert said.startswith("layers in Triton; activations are not rounded to 8-bit floats: ")
    assert reason in said


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_a_product_with_8_bit_weights_is_rounded_once(form: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, bias = torch.randn(9, 256).to(dtype), torch.randn(40).to(dtype)
    ours = TorchOperations()
    packed = ours.pack([quantize(torch.randn(40, 256) * 30, form)])
    want = reference.linear(x.double(), packed, bias.double())
    got = ours.linear(x, packed, bias)
    assert got.dtype is dtype
    # Half of the last bit of the result, and the rounding of sums in float32.
    limit = torch.finfo(dtype).eps / 2 * want.abs() + 1e-3
    assert bool(((got.double() - want).abs() <= limit).all())


def test_a_missing_triton_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(NotAvailableError, match="Triton is not installed"):
        triton_operations.load()


@needs_triton
def test_a_triton_that_cannot_be_imported_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib, "import_module", fails)
    with pytest.raises(NotAvailableError, match="imported: RuntimeError: Failed to find"):
        triton_operations.load()
