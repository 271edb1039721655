"""Attention by flashinfer's wrappers against its definition, on the stand-in of the package, and
what is refused. tests/gpu runs the package itself.
"""

import importlib
import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead_kernels.choice import backend
from fairlead_kernels.choice.backend import flashinfer_for, pick
from fairlead_kernels.gpu import triton_attention
from fairlead_kernels.interface import reference
from fairlead_kernels.interface.attention import (
    AttentionBackend,
    DecodeRows,
    Heads,
    LayerKind,
    LayerSpec,
)
from fairlead_kernels.interface.not_available import NotAvailableError
from fairlead_kernels.packages import flashinfer_package
from fairlead_kernels.packages.flashinfer_attention import (
    MOST_PLANS,
    SUPPORTED,
    FlashinferAttention,
)
from fairlead_kernels.packages.flashinfer_memory import PLAN_BYTES, split_bytes
from fairlead_kernels.packages.flashinfer_plan import paged_rows
from fairlead_kernels.plain.torch_operations import TorchOperations
from fairlead_kernels.proofs.attention_proof import prove_attention
from support import flashinfer_standin as standin
from support.attention_cases import Case, make_case
from support.full import LONG_FORM

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HEADS = Heads(4, 2, 8, 8, torch.float32)
SERVED = Heads(32, 8, 128, 128, torch.bfloat16)
PLAIN = LayerKind(0.3)
MIXED = [(0, 7), (12, 1), (3, 1), (9, 5), (30, 1), (0, 1), (31, 1), (16, 8)]


def attend(case: Case, spec: LayerSpec) -> torch.Tensor:
    attention: AttentionBackend = standin.attention(case.heads, (frozenset({spec.kind}),))
    plan = attention.plan(case.ragged)
    return attention.run(plan, case.query, case.key_cache, case.value_cache, spec)


def check(case: Case, spec: LayerSpec) -> None:
    got = attend(case, spec)
    want = reference.attend(case.ragged, case.query, case.key_cache, case.value_cache, spec)
    assert got.dtype is case.query.dtype
    half = case.heads.dtype is not torch.float32
    atol, rtol = (2e-2, 2e-2) if half else (4e-6, 1e-5)
    torch.testing.assert_close(got, want, atol=atol, rtol=rtol)


decode = st.tuples(st.integers(0, 50), st.just(1))
row = st.one_of(decode, st.tuples(st.integers(0, 40), st.integers(1, 30)))


@settings(max_examples=300 if LONG_FORM else 20, deadline=None)
@given(
    rows=st.one_of(st.lists(decode, min_size=1, max_size=5), st.lists(row, min_size=1, max_size=5)),
    block_size=st.sampled_from([1, 4, 16, 20]),
    window=st.one_of(st.none(), st.integers(1, 50)),
    group=st.integers(1, 5),
    kv=st.integers(1, 3),
    dim=st.sampled_from([8, 16, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    extra=st.sampled_from(["", "softcap", "sinks"]),
    fp8_cache=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_step_is_attended_as_defined(
    rows: list[tuple[int, int]],
    block_size: int,
    window: int | None,
    group: int,
    kv: int,
    dim: int,
    dtype: torch.dtype,
    extra: str,
    fp8_cache: bool,
    seed: int,
) -> None:
    fp8_cache = fp8_cache and extra != "sinks"
    heads = Heads(group * kv, kv, dim, dim, dtype, fp8_cache)
    case = make_case(rows, block_size=block_size, window=window, heads=heads, seed=seed)
    softcap = 2.0 if extra == "softcap" else None
    sinks = torch.randn(heads.query).to(dtype) if extra == "sinks" else None
    check(case, LayerSpec(dim**-0.5, window, softcap, sinks))


def test_a_windows_rows_begin_with_the_first_block_that_they_see() -> None:
    """Rows at positions 12, 0 to 6 and 29: with a window of 5 they see keys from 8, 0 and 25 on."""
    case = make_case([(12, 1), (0, 7), (29, 1)], window=5)
    tables = case.ragged.tables
    rows = paged_rows(case.ragged)
    assert rows.query_starts.tolist() == [0, 1, 8, 9]
    assert rows.starts.tolist() == [0, 2, 4, 6]
    assert rows.last_lens.tolist() == [1, 3, 2]
    seen = [*tables[0, 2:4], *tables[1, :2], *tables[2, 6:8]]
    assert rows.indices.tolist() == [int(block) for block in seen]
    assert not rows.single
    vectors = (rows.query_starts, rows.starts, rows.indices, rows.last_lens)
    assert all(x.dtype is torch.int32 and x.is_contiguous() for x in vectors)


@pytest.mark.parametrize("window", [None, 5])
def test_rows_whose_tables_are_on_the_device_are_the_same(window: int | None) -> None:
    case = make_case([(12, 1), (0, 7), (29, 1), (3, 5)], window=window)
    order = torch.tensor([5, 0, 3, 2])
    tables = torch.full((6, case.ragged.tables.shape[1] + 2), 10**6, dtype=torch.int32)
    tables[order, :-2] = case.ragged.tables
    want, got = map(paged_rows, (case.ragged, replace(case.ragged, tables=tables, rows=order)))
    for name in ("query_starts", "starts", "indices", "last_lens"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name


def test_a_row_that_fills_its_last_block_has_all_of_it() -> None:
    rows = paged_rows(make_case([(7, 1), (3, 1), (4, 1)]).ragged)
    assert (rows.last_lens.tolist(), rows.starts.tolist()) == ([4, 4, 1], [0, 2, 3, 5])
    assert rows.single


def test_a_plan_shares_no_memory_with_the_steps_rows() -> None:
    """The batch builder writes the next step into the same memory."""
    case = make_case(MIXED)
    attention = standin.attention(HEADS, (frozenset({PLAIN}),))
    plan = attention.plan(case.ragged)
    want = reference.attend(
        case.ragged, case.query, case.key_cache, case.value_cache, LayerSpec(0.3)
    )
    for x in (case.ragged.query_starts, case.ragged.kv_lens, case.ragged.tables):
        x.fill_(-7)
    got = attention.run(plan, case.query, case.key_cache, case.value_cache, LayerSpec(0.3))
    torch.testing.assert_close(got, want, atol=4e-6, rtol=1e-5)


@pytest.mark.parametrize("pdl", [None, False])
def test_decodes_alone_run_on_the_decode_wrapper_and_any_other_step_on_the_prefill_wrapper(
    pdl: bool | None,
) -> None:
    """Each told whether it may begin before the kernel ahead of it has ended."""
    used: list[tuple[str, bool | None]] = []

    def counted(name: str, make: Any) -> Any:
        def made(*args: Any, **options: Any) -> Any:
            wrapper = make(*args, **options)
            run = wrapper.run

            def counted_run(*args: Any, **options: Any) -> Any:
                used.append((name, options["enable_pdl"]))
                return run(*args, **options)

            wrapper.run = counted_run
            return wrapper

        return made

    package = replace(
        standin.PACKAGE,
        prefill=counted("prefill", standin.PACKAGE.prefill),
        decode=counted("decode", standin.PACKAGE.decode),
        sinks=counted("sinks", standin.PACKAGE.sinks),
    )
    sinks = torch.zeros(4)
    kinds = frozenset({PLAIN, LayerSpec(0.3, sinks=sinks).kind})
    attention = FlashinferAttention(
        HEADS,
        (kinds,),
        CPU,
        package,
        supported=standin.SUPPORTED,
        workspace_bytes=1024,
        enable_pdl=pdl,
    )
    for rows in ([(4, 1), (9, 1)], [(4, 1), (9, 2)]):
        case = make_case(rows)
        plan = attention.plan(case.ragged)
        for spec in (LayerSpec(0.3), LayerSpec(0.3, sinks=sinks)):
            attention.run(plan, case.query, case.key_cache, case.value_cache, spec)
    assert used == [(name, pdl) for name in ("decode", "sinks", "prefill", "sinks")]


def test_layer_groups_of_one_step_keep_their_own_plans() -> None:
    """Two groups with one window and a third without, each with blocks of its own."""
    near, far = LayerKind(0.3, window=6), LayerKind(0.3)
    attention = standin.attention(HEADS, tuple(frozenset({k}) for k in (near, near, far)))
    cases = [make_case(MIXED, window=k.window, seed=i) for i, k in enumerate((near, near, far))]
    plans = [attention.plan(replace(case.ragged, group=i)) for i, case in enumerate(cases)]
    for case, plan in zip(cases, plans, strict=True):
        spec = LayerSpec(0.3, case.ragged.window)
        got = attention.run(plan, case.query, case.key_cache, case.value_cache, spec)
        want = reference.attend(case.ragged, case.query, case.key_cache, case.value_cache, spec)
        torch.testing.assert_close(got, want, atol=4e-6, rtol=1e-5)


def test_the_layers_of_a_group_may_differ_in_scale_cap_and_sinks() -> None:
    sinks = torch.randn(4)
    specs = [LayerSpec(0.3), LayerSpec(0.2), LayerSpec(0.3, None, 2.0), LayerSpec(0.3, sinks=sinks)]
    attention = standin.attention(HEADS, (frozenset(spec.kind for spec in specs),))
    case = make_case(MIXED)
    plan = attention.plan(case.ragged)
    for spec in specs:
        got = attention.run(plan, case.query, case.key_cache, case.value_cache, spec)
        want = reference.attend(case.ragged, case.query, case.key_cache, case.value_cache, spec)
        torch.testing.assert_close(got, want, atol=4e-6, rtol=1e-5)


def test_a_query_of_another_type_or_layout_is_attended_and_comes_back_in_its_type() -> None:
    heads = replace(HEADS, dtype=torch.bfloat16)
    case = make_case(MIXED, heads=heads)
    spec = LayerSpec(0.3)
    want = attend(case, spec)
    wide = case.query.transpose(1, 2).contiguous().transpose(1, 2).float()
    assert wide.stride(-1) != 1
    got = attend(replace(case, query=wide), spec)
    assert got.dtype is torch.float32
    assert torch.equal(got, want.float())


def test_a_plan_waits_for_the_copy_of_the_last_one() -> None:
    """An event that does not wait lets the stand-in see the pinned workspace overwritten."""

    class NoWait(standin.Event):
        def synchronize(self) -> None:
            pass

    case = make_case([(4, 1)])
    for event, waits in ((standin.Event, True), (NoWait, False)):
        attention = FlashinferAttention(
            HEADS,
            (frozenset({PLAIN}),),
            CPU,
            replace(standin.PACKAGE, event=event),
            supported=standin.SUPPORTED,
            workspace_bytes=1024,
        )
        attention.plan(case.ragged)
        if waits:
            attention.plan(case.ragged)
        else:
            with pytest.raises(RuntimeError, match="pinned workspace is overwritten"):
                attention.plan(case.ragged)


def test_a_plan_of_an_earlier_step_is_refused() -> None:
    attention = standin.attention(HEADS, (frozenset({PLAIN}),))
    case = make_case([(4, 1)])
    old = attention.plan(case.ragged)
    attention.plan(case.ragged)
    with pytest.raises(ValueError, match="planned again since"):
        attention.run(old, case.query, case.key_cache, case.value_cache, LayerSpec(0.3))


def test_a_plan_is_refused_once_a_later_one_was_half_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrapper of the first kind has the later one already."""
    kinds = (frozenset({PLAIN, LayerKind(0.2)}),)
    attention = standin.attention(HEADS, kinds)
    case = make_case([(4, 1), (7, 2)])
    old = attention.plan(case.ragged)
    plan, plans = FlashinferAttention._plan, itertools.count()

    def fail_second(self: FlashinferAttention, *given: Any) -> None:
        if next(plans):
            raise RuntimeError("no memory")
        plan(self, *given)

    monkeypatch.setattr(FlashinferAttention, "_plan", fail_second)
    with pytest.raises(RuntimeError, match="no memory"):
        attention.plan(make_case([(5, 1), (8, 2)]).ragged)
    for kind in kinds[0]:
        with pytest.raises(ValueError, match="planned again since"):
            attention.run(old, case.query, case.key_cache, case.value_cache, LayerSpec(kind.scale))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (LayerSpec(0.3, window=4), "window: the layer has 4, the plan was made for None"),
        (LayerSpec(0.31), "spec: no plan of layer group 0 is for LayerKind"),
        (LayerSpec(0.3, softcap=2.0), "spec: no plan of layer group 0"),
        (LayerSpec(0.3, sinks=torch.zeros(4)), "spec: no plan of layer group 0"),
    ],
)
def test_a_layer_that_was_not_planned_is_refused(spec: LayerSpec, message: str) -> None:
    attention = standin.attention(HEADS, (frozenset({PLAIN}),))
    case = make_case([(4, 1)])
    plan = attention.plan(case.ragged)
    with pytest.raises(ValueError, match=message):
        attention.run(plan, case.query, case.key_cache, case.value_cache, spec)


def test_rows_of_another_window_than_their_groups_are_refused() -> None:
    attention = standin.attention(HEADS, (frozenset({PLAIN}),))
    with pytest.raises(ValueError, match="window: the rows have 4, their layer group has None"):
        attention.plan(make_case([(4, 1)], window=4).ragged)


@pytest.mark.parametrize(
    ("heads", "kinds", "reason"),
    [
        (
            replace(SERVED, dtype=torch.float32),
            (frozenset({PLAIN}),),
            "flashinfer computes in bfloat16 and float16, the model in float32",
        ),
        (
            replace(SERVED, dim=80, value_dim=80),
            (frozenset({PLAIN}),),
            "flashinfer has kernels for 64, 128, 256 elements a head, the model has 80",
        ),
        (
            replace(SERVED, value_dim=64),
            (frozenset({PLAIN}),),
            "its keys have 128 elements a head, its values 64",
        ),
        (
            replace(SERVED, dim=64, value_dim=64),
            (frozenset({LayerKind(0.3, softcap=50.0, sinks=True)}),),
            "no kernel with both sinks and a softcap",
        ),
        (
            SERVED,
            (frozenset({PLAIN}), frozenset({LayerKind(0.3, window=8, sinks=True)})),
            "kernels with sinks are for 64 elements a head, the model has 128",
        ),
        (
            SERVED,
            (frozenset(LayerKind(1 / layer) for layer in range(1, MOST_PLANS + 2)),),
            f"each step would make {MOST_PLANS + 1} plans",
        ),
    ],
)
def test_what_the_kernels_lack_is_refused_with_its_reason(
    heads: Heads, kinds: Any, reason: str
) -> None:
    with pytest.raises(NotAvailableError, match=reason):
        FlashinferAttention(heads, kinds, CPU, standin.PACKAGE)


def test_sinks_with_an_fp8_cache_are_refused_with_the_reason() -> None:
    heads = replace(SERVED, fp8_cache=True)
    kinds = frozenset({PLAIN, LayerKind(0.3, sinks=True)})
    with pytest.raises(NotAvailableError, match="kernels with sinks do not read an fp8 cache"):
        FlashinferAttention(heads, (kinds,), CPU, standin.PACKAGE)
    standin.attention(heads, (frozenset({PLAIN}),))


@pytest.mark.parametrize("group", [1, 3, 5, 7, 8, 12, 71])
def test_any_number_of_query_heads_may_share_a_key_value_head(group: int) -> None:
    SUPPORTED.check_heads(Heads(group, 1, 64, 64, torch.float16))
    case = make_case([(4, 1), (9, 1)], heads=Heads(2 * group, 2, 8, 8, torch.float32))
    check(case, LayerSpec(0.3))


@pytest.mark.parametrize("wrapper", ["prefill", "decode", "sinks"])
def test_a_wrapper_that_cannot_be_made_is_a_reason(wrapper: str) -> None:
    """Without a compiler the module of sinks is missing before anything is planned."""

    def missing(*_: Any, **__: Any) -> None:
        raise RuntimeError("JIT compilation is disabled\n  and the module is missing")

    change: dict[str, Any] = {wrapper: missing}
    package = replace(standin.PACKAGE, **change)
    reason = "cannot be made here: RuntimeError: JIT compilation is disabled and the module"
    with pytest.raises(NotAvailableError, match=reason):
        FlashinferAttention(
            HEADS, KINDS, CPU, package, supported=standin.SUPPORTED, workspace_bytes=1024
        )


def test_the_workspaces_are_counted() -> None:
    sinks = LayerKind(0.3, sinks=True)
    attention = standin.attention(HEADS, (frozenset({PLAIN}), frozenset({PLAIN, sinks})))
    assert attention.nbytes == 1024 + 5 * PLAN_BYTES


PROCESSORS = 132  # of an H100


@pytest.mark.parametrize(
    ("heads", "rows", "needed"),
    [
        (Heads(32, 8, 128, 128, torch.bfloat16), 256, (319 * 16 // 4) * 32 * 129 * 4),
        (Heads(40, 40, 128, 128, torch.bfloat16), 384, (407 * 16) * 40 * 129 * 4),
        (Heads(32, 8, 128, 128, torch.bfloat16), 1, 33 * 4 * 32 * 129 * 4),
        (Heads(71, 1, 64, 64, torch.bfloat16), 8, -(-264 * 128 // 71) * 71 * 65 * 4),
    ],
)
def test_graphs_need_the_workspace_of_any_step_that_they_may_serve(
    heads: Heads, rows: int, needed: int
) -> None:
    """Llama 3 8B, Llama 2 13B whose heads share nothing, one row, Falcon 7B."""
    sizes = heads.query, heads.kv, heads.dim, rows
    assert split_bytes(*sizes, PROCESSORS) == needed
    assert split_bytes(*sizes, PROCESSORS, older=True) >= needed


def decodes_of(rows: int) -> DecodeRows:
    """Each of one token, in the block of its number."""
    lens, places = torch.ones(rows, dtype=torch.int32), torch.arange(rows)
    return DecodeRows(lens, lens.long(), places.int()[:, None], places, 4, None)


def test_plans_of_many_rows_at_fixed_addresses_get_a_workspace_that_holds_them() -> None:
    attention = standin.attention(HEADS, (frozenset({PLAIN}),))
    taken = [attention.fixed_nbytes]
    for rows in (40, 8, 64):
        attention.plan_decodes(decodes_of(rows), room=64)
        taken.append(attention.fixed_nbytes)
    largest, larger = (split_bytes(4, 2, 8, rows, 6) for rows in (64, 40))
    assert larger > 1024
    assert taken == [
        0,
        64 * 4 + larger + PLAN_BYTES,
        64 * 4 + larger + 2 * PLAN_BYTES,
        64 * 4 + larger + largest + 3 * PLAN_BYTES,
    ]


def test_plans_at_fixed_addresses_have_the_room_of_the_first() -> None:
    attention = standin.attention(HEADS, (frozenset({PLAIN}),))
    attention.plan_decodes(decodes_of(4), room=4)
    with pytest.raises(ValueError, match="room: layer group 0 has fixed plans for 4"):
        attention.plan_decodes(decodes_of(4), room=8)


# -- the choice at start


LAYERS = TorchOperations()


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, package: Any, capability: tuple[int, int]) -> None:
    """The choice as a GPU of this capability without Triton would see it, with the model on the
    CPU.
    """

    def missing(_heads: Heads, _device: torch.device) -> Any:
        raise NotAvailableError("Triton is not installed")

    monkeypatch.setattr(triton_attention, "load", missing)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(flashinfer_package, "load", package)
    monkeypatch.setattr(backend, "gpu_operations", lambda *_: (LAYERS, "layers in Triton"))


def test_the_package_is_not_looked_for_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(flashinfer_package, "load")
    with pytest.raises(NotAvailableError, match="the model runs on cpu"):
        pick(SERVED, (frozenset({PLAIN}),), CPU, "flashinfer")
    assert pick(SERVED, (frozenset({PLAIN}),), CPU).attention.name != "flashinfer"


@pytest.mark.parametrize(
    ("dtype", "capability", "reason"),
    [
        (torch.bfloat16, (8, 0), ""),
        (torch.bfloat16, (7, 5), "in bfloat16 flashinfer needs a GPU of compute capability 8.0"),
        (torch.float16, (7, 5), ""),
        (torch.float16, (7, 0), "needs a GPU of compute capability 7.5, this one has 7.0"),
        (torch.float32, (9, 0), "flashinfer computes in bfloat16 and float16"),
    ],
)
def test_the_gpu_must_have_the_models_type(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, capability: tuple[int, int], reason: str
) -> None:
    on_a_gpu(monkeypatch, lambda: standin.PACKAGE, capability)
    heads = replace(SERVED, dtype=dtype)
    if reason:
        with pytest.raises(NotAvailableError, match=reason):
            flashinfer_for(heads, CUDA)
    else:
        assert flashinfer_for(heads, CUDA) is standin.PACKAGE


def test_auto_falls_back_to_plain_torch_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise NotAvailableError("flashinfer-python is not installed")

    on_a_gpu(monkeypatch, missing, (9, 0))
    kinds = (frozenset({PLAIN}),)
    choice = pick(SERVED, kinds, CUDA)
    assert str(choice) == (
        "torch (plain torch on cuda, portable kernels, layers in Triton; no flashinfer: "
        "flashinfer-python is not installed; no Triton attention: Triton is not installed)"
    )
    assert choice.operations is LAYERS
    with pytest.raises(NotAvailableError, match="is not installed"):
        pick(SERVED, kinds, CUDA, "flashinfer")
    plain = pick(SERVED, kinds, CUDA, "torch")
    assert plain.operations is None
    assert str(plain) == "torch (plain torch on cuda, portable kernels)"


def test_auto_takes_flashinfer_on_a_gpu_once_it_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch, lambda: standin.PACKAGE, (9, 0))
    heads, kinds = Heads(4, 2, 64, 64, torch.bfloat16), (frozenset({PLAIN}),)
    attention = standin.attention(heads, kinds)
    monkeypatch.setattr(backend, "FlashinferAttention", lambda *_: attention)
    choice = pick(heads, kinds, CUDA)  # the proof runs on a GPU that this machine lacks
    assert choice.attention.name == "torch"
    assert "no flashinfer: flashinfer's kernel for LayerKind" in str(choice)
    with pytest.raises(NotAvailableError, match="does not run here"):
        pick(heads, kinds, CUDA, "flashinfer")
    monkeypatch.setattr(backend, "prove_attention", lambda *_: None)
    for kernels in ("auto", "flashinfer"):
        choice = pick(heads, kinds, CUDA, kernels)
        assert (choice.attention, choice.operations) == (attention, LAYERS)
        assert str(choice) == "flashinfer (attention by flashinfer stand-in, layers in Triton)"


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (ModuleNotFoundError("no", name="flashinfer"), "flashinfer-python is not installed"),
        (
            ModuleNotFoundError("No module named 'tvm_ffi'", name="tvm_ffi"),
            "cannot be imported: No module named 'tvm_ffi'",
        ),
        (OSError("libcuda.so.1: not found"), "imported: OSError: libcuda.so.1: not found"),
    ],
)
def test_a_package_that_cannot_be_imported_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, message: str
) -> None:
    def import_module(name: str) -> Any:
        assert name == "flashinfer"
        raise raised

    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(NotAvailableError, match=message):
        flashinfer_package.load()


def test_the_packages_own_names_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    package = SimpleNamespace(
        __version__="0.7.2",
        BatchPrefillWithPagedKVCacheWrapper=1,
        BatchDecodeWithPagedKVCacheWrapper=2,
        BatchAttentionWithAttentionSinkWrapper=3,
    )
    monkeypatch.setattr(importlib, "import_module", lambda _name: package)
    loaded = flashinfer_package.load()
    names: tuple[Any, ...] = (loaded.version, loaded.prefill, loaded.decode, loaded.sinks)
    assert names == ("0.7.2", 1, 2, 3)
    assert loaded.event is torch.cuda.Event


KINDS = (
    frozenset({PLAIN, LayerKind(0.2, softcap=5.0)}),
    frozenset({LayerKind(1 / 16, window=7, sinks=True)}),
)


def test_kernels_that_compute_what_the_reference_does_are_proven() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        heads = Heads(6, 2, 64, 64, dtype)
        prove_attention(standin.attention(heads, KINDS), heads, KINDS, CPU)
        heads = replace(heads, fp8_cache=True)
        prove_attention(standin.attention(heads, KINDS[:1]), heads, KINDS[:1], CPU)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda out: out + 0.1, "differs from the reference by 0.1"),
        (lambda out: out * torch.nan, "differs from the reference by nan"),
        (lambda _out: 1 / 0, "does not run here: ZeroDivisionError: division by zero"),
    ],
)
@pytest.mark.parametrize("wrapper", ["prefill", "decode", "sinks"])
def test_a_kernel_that_fails_or_computes_something_else_is_found_at_start(
    monkeypatch: pytest.MonkeyPatch, change: Any, reason: str, wrapper: str
) -> None:
    compute = standin._Wrapper._compute
    chosen = getattr(standin.PACKAGE, wrapper)

    def broken(self: Any, q: Any, cache: Any, out: Any, sink: Any = None) -> torch.Tensor:
        computed: torch.Tensor = compute(self, q, cache, out, sink)
        if type(self) is chosen:
            computed.copy_(change(computed))
        return computed

    monkeypatch.setattr(standin._Wrapper, "_compute", broken)
    heads = Heads(6, 2, 64, 64, torch.bfloat16)
    attention = standin.attention(heads, KINDS)
    with pytest.raises(NotAvailableError, match=reason):
        prove_attention(attention, heads, KINDS, CPU)
