"""The product of a mixture's experts: Triton's in its interpreter, its stand-in, and the choice."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fairlead_kernels.choice import experts
from fairlead_kernels.choice.experts import ExpertProduct, Matrices
from fairlead_kernels.gpu import triton_experts
from fairlead_kernels.gpu.triton_experts import TritonExperts, tiles
from fairlead_kernels.gpu.triton_operations import MANY_TOKENS
from fairlead_kernels.interface import reference
from fairlead_kernels.interface.not_available import NotAvailableError
from support import triton_standin
from support.full import LONG_FORM
from support.operation_cases import DTYPES, ROUNDING, sum_exactly

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CPU = torch.device("cpu")
# Matrices [E, K, N] as models store them: as they are, transposed, and a part of larger ones.
LAYOUTS: dict[str, Callable[[int, int, int], Tensor]] = {
    "inputs first": torch.randn,
    "outputs first": lambda e, k, n: torch.randn(e, n, k).transpose(1, 2),
    "part": lambda e, k, n: torch.randn(2 * e, k + 3, 2 * n)[::2, 2 : k + 2, 1::2],
}


def ends_of(counts: list[int]) -> Tensor:
    return torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32)


@settings(
    max_examples=200 if LONG_FORM else 3,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
@example(
    counts=[0, 65, 0, 2],
    columns=70,
    rows=70,
    layout="outputs first",
    biased=True,
    dtype=torch.float32,
    seed=0,
)
@given(
    counts=st.lists(st.sampled_from([0, 0, 1, 2, 17, 64, 65]), min_size=1, max_size=3),
    columns=st.integers(1, 70),
    rows=st.integers(1, 40),
    layout=st.sampled_from(sorted(LAYOUTS)),
    biased=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_a_product_is_the_references_however_tokens_are_divided(
    counts: list[int],
    columns: int,
    rows: int,
    layout: str,
    biased: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    weights = LAYOUTS[layout](len(counts), columns, rows)
    # A view keeps its strides where the type changes.
    weights = torch.empty_strided(weights.shape, weights.stride(), dtype=dtype).copy_(weights)
    x, expert_ends = torch.randn(sum(counts), columns).to(dtype), ends_of(counts)
    bias = torch.randn(len(counts), rows).to(dtype) if biased else None
    want = reference.expert_product(x, weights, expert_ends, bias)
    products: list[ExpertProduct] = [experts.looped_product]
    products += [triton_standin.experts(interpreted=interpreted) for interpreted in (False, True)]
    for product in products:
        got = product(x, weights, expert_ends, bias)
        assert got.dtype is dtype
        limit = 2 * ROUNDING[dtype] * (float(want.abs().max()) if len(x) else 0) + 1e-5
        torch.testing.assert_close(got, want, rtol=0, atol=limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_result_is_the_same_bits_beside_any_others(dtype: torch.dtype) -> None:
    ours = triton_standin.experts(interpreted=True)
    sum_exactly()
    torch.manual_seed(0)
    weights, x = torch.randn(3, 130, 40).to(dtype), torch.randn(75, 130).to(dtype)
    whole = ours(x, weights, ends_of([2, 70, 3]))
    for part, counts in ((slice(71, 72), [0, 1, 0]), (slice(1, 9), [1, 7, 0])):
        assert torch.equal(ours(x[part], weights, ends_of(counts)), whole[part])


class Launched:
    """In the place of the kernel: keeps grids and sizes."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []
        self.options: list[dict[str, Any]] = []

    @property
    def multiply_experts(self) -> "Launched":
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grids.append(grid)
        return lambda *_, **options: self.options.append(options)


def test_a_launch_depends_on_shapes_alone_and_has_one_tile() -> None:
    """On tensors without values, of which nothing can be read."""
    launched = Launched()
    ours = TritonExperts(launched)
    weights = torch.empty(128, 48, 200, device="meta")
    expert_ends = torch.empty(128, dtype=torch.int32, device="meta")
    for count in (0, 1, 8, 64, 900):
        out = ours(torch.empty(count, 48, device="meta"), weights, expert_ends)
        assert out.shape == (count, 200)
    assert launched.grids == [(1, 4), (8, 4), (64, 4), (128 + 772 // 64, 4)]
    assert all(options == launched.options[0] for options in launched.options)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=12).filter(any))
def test_no_division_needs_more_tiles_than_the_grid_has(counts: list[int]) -> None:
    def needed(counts: list[int]) -> int:
        return sum(-(-count // MANY_TOKENS) for count in counts)

    total, most = sum(counts), tiles(sum(counts), len(counts))
    assert needed(counts) <= most
    chosen = min(total, len(counts))
    worst = [1] * (chosen - 1) + [total - chosen + 1]
    assert needed(worst) == most


def test_what_does_not_fit_is_refused_by_name() -> None:
    ours = TritonExperts(None)  # nothing is launched
    x, weights, expert_ends = torch.zeros(4, 8), torch.zeros(3, 8, 5), ends_of([1, 1, 2])
    with pytest.raises(ValueError, match=r"^x: \(4, 7\) in torch.float32, not \(4, 8\)"):
        ours(x[:, :7], weights, expert_ends)
    with pytest.raises(ValueError, match=r"^x: .* in torch.float32, not .* in torch.bfloat16"):
        ours(x, weights.bfloat16(), expert_ends)
    with pytest.raises(
        ValueError, match=r"^expert_ends: \(3,\) in torch.int64, not .* in torch.int32"
    ):
        ours(x, weights, expert_ends.long())
    with pytest.raises(ValueError, match=r"^bias: \(3, 4\)"):
        ours(x, weights, expert_ends, torch.zeros(3, 4))


# -- the choice at start


@pytest.mark.parametrize(
    ("columns", "rows", "dtype", "grouped"),
    [
        (64, 100, torch.float32, True),
        (64, 97, torch.float32, False),
        (97, 64, torch.float32, False),
        (64, 104, torch.bfloat16, True),
        (64, 100, torch.bfloat16, False),
        (100, 64, torch.bfloat16, False),
    ],
)
def test_torch_groups_rows_of_whole_16_bytes_alone(
    columns: int, rows: int, dtype: torch.dtype, *, grouped: bool
) -> None:
    sample = Matrices(torch.randn(3, columns, rows).to(dtype), None)
    assert experts.groups_in_torch(sample, CPU) is grouped


@pytest.mark.parametrize("count", [1, 2, 5])
def test_kernels_that_compute_what_the_reference_does_are_proven(count: int) -> None:
    for dtype, bias in itertools.product(DTYPES, (None, torch.randn(count, 96))):
        weights = torch.randn(count, 24, 96).to(dtype) / 50
        sample = Matrices(weights, None if bias is None else bias.to(dtype) / 50)
        experts.prove_product(triton_standin.experts(), sample, "ours")
        experts.prove_product(experts.torch_product, sample, "torch's")
    experts.prove_product(triton_standin.experts(interpreted=True), sample, "ours")


def wrong(x: Tensor, weights: Tensor, expert_ends: Tensor, bias: Tensor | None = None) -> Tensor:
    """Of the last expert's second tile."""
    out = reference.expert_product(x, weights, expert_ends, bias)
    out[-1] *= 1.2
    return out


def wrong_torch(x: Tensor, weights: Tensor, *, offs: Tensor) -> Tensor:
    return wrong(x, weights, offs)


def fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("Failed to find C compiler.\nPlease specify")


class Gpu:
    """A device that is called one, whose tensors are the CPU's, and torch's watch over it."""

    type = "cuda"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mode, self.modes = "default", list[str]()
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: self.mode)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", self._set)

    def _set(self, mode: str) -> None:
        self.mode = mode
        self.modes.append(mode)

    def waits(self, x: Tensor, weights: Tensor, *, offs: Tensor) -> Tensor:
        """torch's product where it reads ``offs`` on the host."""
        if self.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return reference.expert_product(x, weights, offs)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(triton_experts, "load", triton_standin.experts)
    return Gpu(monkeypatch)


SAMPLES = [Matrices(torch.randn(3, 16, 40), torch.randn(3, 40))]


def test_torchs_product_is_taken_where_it_does_not_wait(gpu: Any) -> None:
    assert experts.choose(SAMPLES, gpu) == (None, "experts in torch")
    assert gpu.modes == ["error", "default"]


def test_ours_is_taken_where_torchs_waits(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", gpu.waits)
    product, said = experts.choose(SAMPLES, gpu)
    assert isinstance(product, TritonExperts)
    assert said == "experts in Triton: torch's product waits for the device"
    assert gpu.modes == ["error", "default"]


@pytest.mark.parametrize(
    ("torchs", "reason"),
    [
        (fails, "torch's product does not run here: RuntimeError: Failed to find C compiler."),
        (wrong_torch, "torch's product differs from the reference by"),
    ],
)
def test_ours_is_taken_where_torchs_fails(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, torchs: Any, reason: str
) -> None:
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", torchs)
    product, said = experts.choose(SAMPLES, gpu)
    assert isinstance(product, TritonExperts)
    assert said.startswith(f"experts in Triton: {reason}")


def no_triton() -> Any:
    raise NotAvailableError("Triton is not installed")


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (lambda: wrong, "Triton's product differs from the reference by"),
        (lambda: fails, "Triton's product does not run here: RuntimeError: Failed to find"),
        (no_triton, "Triton is not installed"),
    ],
)
def test_where_both_fail_experts_stay_as_they_are_and_the_reasons_are_said(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, load: Any, reason: str
) -> None:
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", gpu.waits)
    monkeypatch.setattr(triton_experts, "load", load)
    product, said = experts.choose(SAMPLES, gpu)
    assert product is None
    start = "experts in torch, though torch's product waits for the device: "
    assert said.startswith(start + reason)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_without_a_gpu_experts_or_kernels_of_ours_nothing_is_tried(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", fails)
    assert experts.choose(SAMPLES, CPU, kernels) == (None, "")
    assert experts.choose([], gpu, kernels) == (None, "")
    assert experts.choose(SAMPLES, gpu, "torch") == (None, "")
