"""Attention by Triton's kernels against its definition, in Triton's interpreter; that the stand-in
of the kernels, on which the engine is tested, computes what they do; plans, memory and the choice
at start. tests/gpu runs the kernels on a GPU.
"""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fairlead_kernels.choice import backend
from fairlead_kernels.choice.backend import pick
from fairlead_kernels.gpu import triton_attention, triton_package
from fairlead_kernels.gpu.triton_attention import Tiles, TritonAttention
from fairlead_kernels.interface import reference
from fairlead_kernels.interface.attention import (
    NULL,
    DecodeAttention,
    DecodeRows,
    Heads,
    LayerKind,
    LayerSpec,
)
from fairlead_kernels.interface.not_available import NotAvailableError
from fairlead_kernels.packages import flashinfer_package
from fairlead_kernels.plain.torch_operations import TorchOperations
from fairlead_kernels.proofs.attention_proof import prove_attention
from support import triton_standin as standin
from support.attention_cases import Case, make_case
from support.full import LONG_FORM

# The interpreter computes what is masked too.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HEADS = Heads(4, 2, 8, 8, torch.float32)
PLAIN = LayerKind(0.3)
MIXED = [(0, 7), (12, 1), (3, 1), (9, 5), (30, 1), (0, 1), (31, 1), (16, 8)]
both = pytest.mark.parametrize("interpreted", [False, True], ids=["standin", "interpreter"])


def check(attention: TritonAttention, case: Case, spec: LayerSpec) -> None:
    caches = case.key_cache, case.value_cache
    got = attention.run(attention.plan(case.ragged), case.query, *caches, spec)
    want = reference.attend(case.ragged, case.query, *caches, spec)
    assert got.dtype is case.query.dtype
    half = case.heads.dtype is not torch.float32
    # The interpreter cuts bfloat16 off.
    atol, rtol = (2e-2, 2e-2) if half else (4e-6, 1e-5)
    torch.testing.assert_close(got, want, atol=atol, rtol=rtol)


decode = st.tuples(st.integers(0, 50), st.just(1))
row = st.one_of(decode, st.tuples(st.integers(0, 40), st.integers(1, 30)))


@both
# A case is small as it is, and in the interpreter it takes minutes to make it smaller.
@settings(
    max_examples=300 if LONG_FORM else 20,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
@given(
    rows=st.one_of(st.lists(decode, min_size=1, max_size=4), st.lists(row, min_size=1, max_size=4)),
    block_size=st.sampled_from([1, 4, 16, 20]),
    window=st.one_of(st.none(), st.integers(1, 50)),
    group=st.integers(1, 5),
    kv=st.integers(1, 2),
    dims=st.sampled_from([(8, 8), (16, 16), (20, 20), (24, 8), (5, 17)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
    fp8_cache=st.booleans(),
    splits=st.sampled_from([2, 4]),
    least_keys=st.sampled_from([1, 6, 64]),
    seed=st.integers(0, 2**31),
)
def test_any_step_is_attended_as_defined(
    interpreted: bool,
    rows: list[tuple[int, int]],
    block_size: int,
    window: int | None,
    group: int,
    kv: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    softcap: float | None,
    sinks: bool,
    fp8_cache: bool,
    splits: int,
    least_keys: int,
    seed: int,
) -> None:
    """All bytes that are not a row's own are NaN."""
    heads = Heads(group * kv, kv, *dims, dtype, fp8_cache)
    case = make_case(rows, block_size=block_size, window=window, heads=heads, seed=seed)
    ours = standin.attention(heads, interpreted=interpreted, splits=splits, least_keys=least_keys)
    sink = torch.randn(heads.query).to(dtype) if sinks else None
    check(ours, case, LayerSpec(dims[0] ** -0.5, window, softcap, sink))


@both
@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("extras", ["none", "softcap and sinks"])
def test_mixed_rows_match_the_definition(
    window: int | None, extras: str, *, interpreted: bool
) -> None:
    softcap, sinks = (None, None) if extras == "none" else (2.0, torch.randn(4))
    ours = standin.attention(HEADS, interpreted=interpreted)
    check(ours, make_case(MIXED, window=window), LayerSpec(0.3, window, softcap, sinks))


@both
@pytest.mark.parametrize("before", [15, 16, 18])
def test_a_block_that_the_window_has_passed_is_not_read(before: int, *, interpreted: bool) -> None:
    """Its entry names another row's block by then: here one of NaN, which no mask would hide."""
    case = make_case([(before, 1), (before, 3)], window=8)
    others = torch.isin(torch.arange(len(case.key_cache)), case.ragged.tables, invert=True)
    free = int(others.nonzero()[0])
    case.ragged.tables.masked_fill_(case.ragged.tables == NULL, free)
    check(standin.attention(HEADS, interpreted=interpreted), case, LayerSpec(0.3, 8))


@both
@pytest.mark.parametrize(
    "heads",
    [Heads(19, 1, 8, 8, torch.float32), Heads(4, 4, 80, 80, torch.float32)],
    ids=["more heads than a tile is tall", "heads of 80"],
)
def test_heads_beyond_a_tile_or_a_power_of_two_match(heads: Heads, *, interpreted: bool) -> None:
    rows = [(4, 1), (0, 18), (21, 1)]
    ours = standin.attention(heads, interpreted=interpreted)
    check(ours, make_case(rows, heads=heads), LayerSpec(0.2))


@both
def test_every_number_of_fp8_is_read_as_torch_reads_it(*, interpreted: bool) -> None:
    """The value of a row's only key is its result, whatever the score is."""
    heads = Heads(1, 1, 16, 256, torch.float32, fp8_cache=True)
    ours = standin.attention(heads, interpreted=interpreted)
    case = make_case([(0, 1)], heads=heads, block_size=1)
    case.value_cache.view(torch.uint8)[:] = torch.arange(256, dtype=torch.uint8)
    plan = ours.plan(case.ragged)
    got = ours.run(plan, case.query, case.key_cache, case.value_cache, LayerSpec(0.1))
    want = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(got[0, 0], want, rtol=0, atol=0, equal_nan=True)


@both
@pytest.mark.parametrize("at", [0, 13, 28])
def test_a_row_with_a_nan_has_one_and_no_other_row_has(at: int, *, interpreted: bool) -> None:
    """In any of its splits, also where no other key of the split has a score."""
    case = make_case([(28, 1), (28, 1), (20, 3)])
    block = case.ragged.tables[0, at // 4]
    case.key_cache[block, at % 4] = torch.nan
    ours = standin.attention(HEADS, interpreted=interpreted, least_keys=1, splits=32)
    plan = ours.plan(case.ragged)
    got = ours.run(plan, case.query, case.key_cache, case.value_cache, LayerSpec(0.3))
    assert got[0].isnan().all()
    assert got[1:].isfinite().all()


@both
def test_a_decode_is_the_same_whatever_other_rows_a_step_has(*, interpreted: bool) -> None:
    """Bit for bit: its keys are split by its own length alone."""
    ours = standin.attention(HEADS, interpreted=interpreted)
    results = []
    for others in ([], [(5, 1), (60, 1)], [(0, 12), (9, 4)]):
        case = make_case([(30, 1), *others])
        alone = make_case([(30, 1)])
        case.query[0] = alone.query[0]
        plan = ours.plan(case.ragged)
        got = ours.run(plan, case.query, case.key_cache, case.value_cache, LayerSpec(0.3))
        results.append(got[0])
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_query_of_another_type_or_layout_is_attended_and_comes_back_in_its_type() -> None:
    heads = replace(HEADS, dtype=torch.bfloat16)
    case, spec, ours = make_case(MIXED, heads=heads), LayerSpec(0.3), standin.attention(heads)
    caches = case.key_cache, case.value_cache
    want = ours.run(ours.plan(case.ragged), case.query, *caches, spec)
    wide = case.query.transpose(1, 2).contiguous().transpose(1, 2).float()
    assert wide.stride(-1) != 1
    got = ours.run(ours.plan(case.ragged), wide, *caches, spec)
    assert got.dtype is torch.float32
    assert torch.equal(got, want.float())


# -- plans


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("room", [0, 99])
def test_decodes_whose_tables_are_on_the_device_match(window: int | None, room: int) -> None:
    """Larger steps, smaller ones and the first again."""
    ours, spec = standin.attention(HEADS), LayerSpec(0.3, window)
    several = [(12, 1), (3, 1), (30, 1), (0, 1)]
    for rows in (several, [(7, 1), (29, 1)], several):
        case = make_case(rows, window=window)
        order = torch.randperm(9)[: len(rows)]  # of the rows in the table
        tables = torch.full((9, case.ragged.tables.shape[1]), 10**6, dtype=torch.int32)
        tables[order] = case.ragged.tables
        lens = case.ragged.kv_lens
        plan = ours.plan_decodes(DecodeRows(lens, lens.long(), tables, order, 4, window), room)
        got = ours.run(plan, case.query, case.key_cache, case.value_cache, spec)
        want = reference.attend(case.ragged, case.query, case.key_cache, case.value_cache, spec)
        torch.testing.assert_close(got, want, atol=4e-6, rtol=1e-5)
    assert len(ours._fixed) == (2 if room else 0)


@pytest.mark.parametrize("window", [None, 6])
def test_rows_of_any_kind_whose_tables_are_on_the_device_match(window: int | None) -> None:
    case, ours, spec = (
        make_case(MIXED, window=window),
        standin.attention(HEADS),
        LayerSpec(0.3, window),
    )
    order = torch.randperm(9)[: len(MIXED)]
    tables = torch.full((9, case.ragged.tables.shape[1]), 10**6, dtype=torch.int32)
    tables[order] = case.ragged.tables
    plan = ours.plan(replace(case.ragged, tables=tables, rows=order))
    assert plan.tables is tables
    caches = case.key_cache, case.value_cache
    want = reference.attend(case.ragged, case.query, *caches, spec)
    got = ours.run(plan, case.query, *caches, spec)
    torch.testing.assert_close(got, want, atol=4e-6, rtol=1e-5)


def test_plans_at_fixed_addresses_are_the_newest_of_their_group_and_size() -> None:
    """Steps of other sizes between them change nothing: a graph reads where it was captured."""
    ours = standin.attention(HEADS)
    lens = torch.tensor([5, 9], dtype=torch.int32)
    tables, rows = torch.zeros(4, 3, dtype=torch.int32), torch.tensor([2, 1])
    first = ours.plan_decodes(DecodeRows(lens, lens.long(), tables, rows, 4, None, 1), 9)
    ours.plan_decodes(DecodeRows(lens, lens.long(), tables, rows, 4, None, 0), 9)
    more = torch.ones(7, dtype=torch.int32)
    places = torch.arange(7) // 2
    ours.plan_decodes(DecodeRows(more, more.long(), tables, places, 4, None, 1), 9)
    later = DecodeRows(lens + 1, lens.long() + 1, tables, rows.flip(0), 4, None, 1)
    assert ours.plan_decodes(later, 9).decodes.data_ptr() == first.decodes.data_ptr()
    assert first.decodes.tolist() == [[1, 2], [0, 1], [5, 9], [1, 1]]


def test_a_plan_shares_no_memory_with_the_steps_rows() -> None:
    """The batch builder writes the next step into the same memory."""
    case, ours, spec = make_case(MIXED), standin.attention(HEADS), LayerSpec(0.3)
    caches = case.key_cache, case.value_cache
    plan = ours.plan(case.ragged)
    want = reference.attend(case.ragged, case.query, *caches, spec)
    for x in (case.ragged.query_starts, case.ragged.kv_lens, case.ragged.tables):
        x.fill_(-7)
    got = ours.run(plan, case.query, *caches, spec)
    torch.testing.assert_close(got, want, atol=4e-6, rtol=1e-5)


def test_a_layer_with_another_window_and_a_cache_that_is_not_dense_are_refused() -> None:
    case, ours = make_case([(0, 4)]), standin.attention(HEADS)
    plan = ours.plan(case.ragged)
    with pytest.raises(ValueError, match="window: the layer has 4, the plan was made for None"):
        ours.run(plan, case.query, case.key_cache, case.value_cache, LayerSpec(0.3, 4))
    with pytest.raises(ValueError, match="key_cache: it and value_cache must be dense"):
        ours.run(plan, case.query, case.key_cache[:, ::2], case.value_cache, LayerSpec(0.3))


def test_a_tile_fits_a_programs_memory_and_holds_what_products_need() -> None:
    for dim in (8, 64, 80, 128, 192, 256, 512):
        for dtype in (torch.float32, torch.bfloat16):
            tiles = Tiles.of(Heads(8, 2, dim, dim, dtype))
            for size in (tiles.tall, tiles.keys):
                assert 16 <= size <= 64
                assert size & (size - 1) == 0


# -- memory


def test_the_memory_of_splits_is_counted_to_the_byte() -> None:
    """Of each row and head 4 splits of 8 sums, a peak and a total; of a fixed row 4 numbers."""
    ours = standin.attention(HEADS)
    row, lens = 4 * 4 * (8 + 2) * 4, torch.ones(8, dtype=torch.int32)
    assert (ours.reserve(5), ours.fixed_nbytes) == (5 * row, 0)
    ours.plan(make_case([(3, 1)] * 5).ragged)
    assert ours.fixed_nbytes == 0

    def fixed(rows: int, group: int) -> int:
        table = torch.zeros(9, 2, dtype=torch.int32)
        some = lens[:rows]
        step = DecodeRows(some, some.long(), table, torch.arange(rows), 4, None, group)
        ours.plan_decodes(step, 18)
        return ours.fixed_nbytes

    assert fixed(7, 0) == 2 * row + 7 * 16, "a padded step has more rows than were reserved"
    assert fixed(7, 1) == 2 * row + 2 * 7 * 16
    assert fixed(2, 0) == 2 * row + 3 * 7 * 16, "each further size takes as much"
    # Graphs may read what a larger step has outgrown.
    assert fixed(8, 0) == (7 + 8 - 5) * row + (3 * 7 + 8) * 16


def test_it_is_a_backend_whose_decodes_the_device_can_keep() -> None:
    assert isinstance(standin.attention(HEADS), DecodeAttention)


# -- the choice at start


KINDS = (
    frozenset({PLAIN, LayerKind(0.2, softcap=5.0)}),
    frozenset({LayerKind(1 / 16, window=7, sinks=True)}),
)
LAYERS = TorchOperations()


@pytest.fixture
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU without flashinfer, whose tensors are on the CPU."""

    def missing() -> Any:
        raise NotAvailableError("flashinfer-python is not installed")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(flashinfer_package, "load", missing)
    monkeypatch.setattr(backend, "gpu_operations", lambda *_: (LAYERS, "layers in Triton"))
    monkeypatch.setattr(
        backend,
        "prove_attention",
        lambda a, h, k, _device, size: prove_attention(a, h, k, CPU, size),
    )
    monkeypatch.setattr(triton_attention, "load", lambda heads, _device: standin.attention(heads))


SERVED = (
    (HEADS, "flashinfer computes in bfloat16 and float16, the model in float32"),
    (replace(HEADS, dim=80, value_dim=80, dtype=torch.float16), "the model has 80"),
    (Heads(4, 2, 64, 64, torch.bfloat16), "flashinfer-python is not installed"),
)


@pytest.mark.usefixtures("_on_a_gpu")
@pytest.mark.parametrize(("heads", "reason"), SERVED)
def test_auto_takes_triton_for_what_flashinfer_lacks_and_says_why(
    heads: Heads, reason: str
) -> None:
    choice = pick(heads, KINDS, CUDA)
    assert (choice.attention.name, choice.operations) == ("triton", LAYERS)
    said = "triton (attention in Triton, layers in Triton; no flashinfer: "
    assert str(choice).startswith(said)
    assert str(choice).endswith(f"{reason})")
    with pytest.raises(NotAvailableError, match=reason):
        pick(heads, KINDS, CUDA, "flashinfer")
    assert pick(heads, KINDS, CUDA, "torch").attention.name == "torch"


@pytest.mark.usefixtures("_on_a_gpu")
def test_where_neither_runs_auto_takes_plain_torch_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(_name: str) -> Any:
        raise NotAvailableError("Triton is not installed")

    monkeypatch.undo()
    monkeypatch.setattr(triton_package, "load", missing)
    monkeypatch.setattr(backend, "gpu_operations", lambda *_: (LAYERS, "layers in torch"))
    assert str(pick(HEADS, KINDS, CUDA)) == (
        "torch (plain torch on cuda, portable kernels, layers in torch; no flashinfer: flashinfer "
        "computes in bfloat16 and float16, the model in float32; no Triton attention: Triton is "
        "not installed)"
    )


@pytest.mark.usefixtures("_on_a_gpu")
def test_auto_takes_plain_torch_where_tritons_attention_computes_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = TritonAttention.run
    monkeypatch.setattr(TritonAttention, "run", lambda self, *given: run(self, *given) + 0.1)
    choice = pick(HEADS, KINDS, CUDA)
    assert choice.attention.name == "torch"
    assert re.search("no Triton attention: triton's kernel for .* differs from", str(choice))


def test_the_block_size_that_is_served_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is compiled for each."""
    sizes: list[int] = []
    run = TritonAttention.run

    def seen(self: TritonAttention, plan: Any, *given: Any) -> torch.Tensor:
        sizes.append(plan.block_size)
        return run(self, plan, *given)

    monkeypatch.setattr(TritonAttention, "run", seen)
    prove_attention(standin.attention(HEADS), HEADS, KINDS, CPU, 48)
    assert set(sizes) == {48}


def test_a_kernel_that_loses_a_part_of_a_long_row_is_found_at_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = TritonAttention.run

    def lossy(self: TritonAttention, *given: Any) -> torch.Tensor:
        out = run(self, *given)
        if len(out) == 3:  # decodes alone, the last of which has its keys split
            out[2] += 0.1
        return out

    monkeypatch.setattr(TritonAttention, "run", lossy)
    with pytest.raises(NotAvailableError, match=r"differs from the reference by 0\.1"):
        prove_attention(standin.attention(HEADS), HEADS, KINDS, CPU)


def test_queries_whose_elements_are_no_neighbours_are_attended() -> None:
    """The kernel, which runs in Triton's interpreter here, takes their stride for 1."""
    case = make_case([(4, 1), (9, 3)], heads=HEADS)
    ours = standin.attention(HEADS, interpreted=True)
    plan = ours.plan(case.ragged)
    caches = case.key_cache, case.value_cache, LayerSpec(0.3)
    strided = case.query.transpose(1, 2).contiguous().transpose(1, 2)
    assert strided.stride(-1) != 1
    assert torch.equal(ours.run(plan, strided, *caches), ours.run(plan, case.query, *caches))


@both
def test_kernels_that_compute_what_the_reference_does_are_proven(*, interpreted: bool) -> None:
    dtypes = (torch.float32,) if interpreted else (torch.float32, torch.float16, torch.bfloat16)
    for dtype in dtypes:
        for fp8_cache in (False, True):
            heads = Heads(6, 2, 24, 24, dtype, fp8_cache)
            ours = standin.attention(heads, interpreted=interpreted, least_keys=256)
            prove_attention(ours, heads, KINDS, CPU)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda out: out + 0.001, "differs from the reference by 0.001"),
        (lambda out: out * torch.nan, "differs from the reference by nan"),
        (lambda _out: 1 / 0, "does not run here: ZeroDivisionError: division by zero"),
    ],
)
def test_a_kernel_that_fails_or_computes_something_else_is_found_at_start(
    monkeypatch: pytest.MonkeyPatch, change: Any, reason: str
) -> None:
    """Also one that multiplies float32 on tensor cores, which round it."""
    run = TritonAttention.run
    monkeypatch.setattr(
        TritonAttention, "run", lambda self, *arguments: change(run(self, *arguments))
    )
    with pytest.raises(NotAvailableError, match=f"triton's kernel for LayerKind.* {reason}"):
        prove_attention(standin.attention(HEADS), HEADS, KINDS, CPU)
