"""Triton's products and attention whose sums have one order, in its interpreter: they compute what
the reference does, and a token's result is the same bits in any step.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from fairlead_kernels.formats.quantize import FP8, quantize
from fairlead_kernels.interface import reference
from fairlead_kernels.interface.attention import Heads, LayerKind, LayerSpec
from fairlead_kernels.interface.layer import Packed
from fairlead_kernels.interface.not_available import NotAvailableError
from fairlead_kernels.proofs.attention_proof import prove_attention
from fairlead_kernels.proofs.triton_proof import prove_operations
from support.attention_cases import Cut, attend_cut, make_case
from support.full import LONG_FORM
from support.operation_cases import ProductCase, fixed_attention, fixed_operations, product_cases

# The interpreter computes what is masked too.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CPU = torch.device("cpu")
examples = settings(
    max_examples=300 if LONG_FORM else 20,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
sizes = st.integers(1, 40)


@examples
@given(case=product_cases.filter(lambda case: case.quantized != "fp8"))
def test_a_product_of_any_size_is_the_references(case: ProductCase) -> None:
    case.check(fixed_operations(), CPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("eight_bits", [False, True])
def test_a_product_of_a_token_is_the_same_beside_any_others(
    dtype: torch.dtype, eight_bits: bool
) -> None:
    ours = fixed_operations()
    torch.manual_seed(0)
    plain = torch.randn(70, 130)
    packed = ours.pack([quantize(plain, "int8")] if eight_bits else [plain], dtype=dtype)
    x, bias = torch.randn(130, 130).to(dtype), torch.randn(70).to(dtype)
    whole = ours.linear(x, packed, bias)
    for part in (slice(129, 130), slice(3, 19), slice(60, 125)):
        assert torch.equal(ours.linear(x[part], packed, bias), whole[part])


@pytest.mark.parametrize("eight_bits", [False, True])
def test_every_number_of_tokens_has_one_tile(
    monkeypatch: pytest.MonkeyPatch, eight_bits: bool
) -> None:
    # Tiles of other sizes may sum otherwise on a GPU, which the interpreter does not show.
    ours = fixed_operations()
    plain = torch.randn(70, 40)
    packed = ours.pack([quantize(plain, "int8")] if eight_bits else [plain])
    launched: list[tuple[int, ...]] = []

    class Kernel:
        def __getitem__(self, _grid: tuple[int, ...]) -> "Kernel":
            return self

        def __call__(self, *_: object, **options: int) -> None:
            launched.append(tuple(options[name] for name in ("TOKENS", "ROWS", "COLUMNS")))

    monkeypatch.setattr(ours, "_kernels", type("Kernels", (), {"multiply_int8": Kernel()}))
    monkeypatch.setattr(ours, "_fixed", type("Kernels", (), {"multiply": Kernel()}))
    for count in (1, 2, 16, 17, 64, 65, 900):
        ours.linear(torch.randn(count, 40), packed)
    assert len(launched) == 7
    assert len(set(launched)) == 1


def test_every_number_of_queries_has_one_tile_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of one tile or of many: the order of a row's sums is that of its keys."""
    launched: list[tuple[object, ...]] = []

    class Kernel:
        def __getitem__(self, _grid: tuple[int, ...]) -> "Kernel":
            return self

        def __call__(self, *_: object, **options: object) -> None:
            launched.append(tuple(sorted(options.items())))

    heads = Heads(4, 2, 16, 16, torch.float32)
    ours = fixed_attention(heads)
    monkeypatch.setattr(ours, "_kernels", type("Kernels", (), {"attend_in_order": Kernel()}))
    counts = []
    for rows in ([(4, 1)], [(9, 1)] * 63, [(0, 300), (7, 1)], [(3, 2)] * 900):
        case = make_case(rows, heads=heads)
        plan = ours.plan(case.ragged)
        counts.append(len(plan.tiles))
        ours.run(plan, case.query, case.key_cache, case.value_cache, LayerSpec(0.3))
    assert counts[0] == 1
    assert counts[-1] == 900
    assert len(set(launched)) == 1


def test_no_product_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = fixed_operations()
    weights = Packed(torch.randn(5, 8).to(FP8), 5, 8, scales=torch.ones(5))
    with pytest.raises(ValueError, match="fp8 products have no fixed order"):
        ours.linear(torch.randn(2, 8), weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_that_compute_what_the_reference_does_are_proven(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    ours = fixed_operations()
    prove_operations(ours, dtype, CPU)
    heads, kinds = Heads(2, 1, 16, 16, dtype), (frozenset({LayerKind(0.2, softcap=5.0)}),)
    attention = fixed_attention(heads)
    prove_attention(attention, heads, kinds, CPU)
    run = attention.run
    monkeypatch.setattr(attention, "run", lambda *arguments: run(*arguments) + 1)
    with pytest.raises(NotAvailableError, match=r"triton in order's kernel for .* differs"):
        prove_attention(attention, heads, kinds, CPU)
    pack = ours.pack
    monkeypatch.setattr(ours, "pack", lambda *x, **y: replace(pack(*x, **y), factor=2.0))
    with pytest.raises(NotAvailableError, match="triton's layer differs from the reference"):
        prove_operations(ours, dtype, CPU)


cuts = st.lists(st.integers(1, 40), min_size=1, max_size=3)


@examples
@given(
    before=st.integers(0, 100),
    chunks=cuts,
    others=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 30)), max_size=2),
    block_size=st.sampled_from([1, 4, 16, 20]),
    window=st.one_of(st.none(), st.integers(1, 100)),
    group=st.integers(1, 7),
    kv=st.integers(1, 2),
    dim=st.sampled_from([8, 16, 33]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    fp8=st.booleans(),
    softcap=st.sampled_from([None, None, 2.0]),
    sinks=st.booleans(),
    seed=st.integers(0, 2**31),
)
# The first key that a window leaves lies in another place of a tile for each of these chunks.
@example(
    before=70,
    chunks=[1, 2, 30],
    others=[],
    block_size=16,
    window=40,
    group=2,
    kv=1,
    dim=16,
    dtype=torch.float32,
    fp8=False,
    softcap=None,
    sinks=False,
    seed=0,
)
def test_a_query_attends_as_defined_and_alike_in_any_step_and_chunk(
    before: int,
    chunks: list[int],
    others: list[tuple[int, int]],
    block_size: int,
    window: int | None,
    group: int,
    kv: int,
    dim: int,
    dtype: torch.dtype,
    fp8: bool,
    softcap: float | None,
    sinks: bool,
    seed: int,
) -> None:
    heads = Heads(group * kv, kv, dim, dim, dtype, fp8_cache=fp8)
    count = sum(chunks)
    case = make_case([(before, count), *others], block_size=block_size, heads=heads, seed=seed)
    spec = LayerSpec(0.3, window, softcap, torch.randn(heads.query) if sinks else None)
    ours = fixed_attention(heads)
    alone = attend_cut(ours, case, spec, [Cut(0, 0, count)])
    whole = attend_cut(Defined(), case, spec, [Cut(0, 0, count)])
    atol = 4e-6 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(alone, whole, atol=atol, rtol=atol)
    begin = 0
    for number, size in enumerate(chunks):
        cut = [Cut(0, begin, size)]
        for row, (_, all_of_it) in enumerate(others, 1):
            rest = 1 if number % 2 else all_of_it
            cut.insert(row % 2 * len(cut), Cut(row, all_of_it - rest, rest))
        together = attend_cut(ours, case, spec, cut)
        at = sum(c.count for c in cut[: cut.index(Cut(0, begin, size))])
        assert torch.equal(together[at : at + size], alone[begin : begin + size])
        begin += size


class Defined:
    """``AttentionBackend`` by the reference."""

    name = "reference"

    def plan(self, ragged: object) -> object:
        return ragged

    def run(self, plan: object, *arguments: object) -> torch.Tensor:
        return reference.attend(plan, *arguments)  # type: ignore[arg-type]


def test_every_number_of_an_fp8_cache_is_read_as_torch_reads_it() -> None:
    # One key each: attention returns its value.
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8)
    heads = Heads(1, 1, 8, 8, torch.bfloat16, fp8_cache=True)
    case = make_case([(0, 1)] * 32, block_size=1, heads=heads)
    blocks = case.ragged.tables[:, 0].long()
    case.value_cache.view(torch.uint8)[blocks] = numbers.view(torch.uint8).view(32, 1, 1, 8)
    rows = [Cut(row, 0, 1) for row in range(32)]
    got = attend_cut(fixed_attention(heads), case, LayerSpec(0.3), rows)
    torch.testing.assert_close(
        got.flatten().float(), numbers.float(), rtol=0, atol=0, equal_nan=True
    )


def test_a_plan_for_another_window_is_refused() -> None:
    case = make_case([(5, 1)], window=3)
    ours = fixed_attention(case.heads)
    plan = ours.plan(replace(case.ragged, window=3))
    with pytest.raises(ValueError, match=r"^window: the layer has None"):
        ours.run(plan, case.query, case.key_cache, case.value_cache, LayerSpec(0.3))
