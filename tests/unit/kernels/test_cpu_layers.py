"""All layers in one C++ call against the reference's operations, one after the other."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fairlead_kernels.cpu import cpu_operations
from fairlead_kernels.cpu.cpu_attention import sizes_of
from fairlead_kernels.cpu.cpu_layers import slab_ends
from fairlead_kernels.formats.quantize import quantize
from fairlead_kernels.interface import reference
from fairlead_kernels.interface.attention import Heads, LayerSpec, RaggedRows
from fairlead_kernels.interface.layer import Activation, Layer, LayerOperations, Norm, Packed
from support.allocated import Allocated
from support.attention_cases import Case, in_places, make_case
from support.full import LONG_FORM
from support.kernel_sets import every_product_set, every_set


def random_layer(
    heads: Heads,
    width: int,
    inner: int,
    activation: Activation,
    extras: bool,
    operations: LayerOperations,
    *,
    gated: bool = True,
    parallel: bool = False,
    centered: bool = False,
    stored: torch.dtype = torch.float32,
) -> Layer:
    """The same for the same random state, whoever packs it."""

    def pack(*weights: Tensor, factor: float = 1.0) -> Packed:
        if stored is torch.int8:
            return operations.pack([quantize(weight) for weight in weights], factor=factor)
        return operations.pack(weights, dtype=stored, factor=factor)

    sizes = [heads.query * heads.dim, heads.kv * heads.dim, heads.kv * heads.dim]
    matrices = [torch.randn(n, width) / width**0.5 for n in sizes]
    out = torch.randn(width, sizes[0]) / sizes[0] ** 0.5
    gates = [torch.randn(inner, width) / width**0.5 for _ in range(1 + gated)]
    down = torch.randn(width, inner) / inner**0.5
    vectors = [torch.randn(n) for n in (sum(sizes), width, len(gates) * inner, width)]
    norms = [
        Norm(
            1 + torch.randn(width) / 9,
            1e-5,
            bias=torch.randn(width) if centered else None,
            centered=centered,
        )
        for _ in range(4)
    ]
    head_norms = [Norm(torch.randn(heads.dim) / 9, 1e-5, 1.0) for _ in range(2)]
    return Layer(
        input_norm=norms[0],
        qkv=pack(*matrices),
        qkv_bias=vectors[0] if extras else None,
        q_norm=head_norms[0] if extras else None,
        k_norm=head_norms[1] if extras else None,
        out=pack(out, factor=0.4 if extras else 1.0),
        out_bias=vectors[1] if extras else None,
        after_attention=norms[1] if extras and not parallel else None,
        mlp_norm=norms[2],
        gate_up=pack(*gates),
        gate_up_bias=vectors[2] if extras else None,
        activation=activation,
        down=pack(down),
        down_bias=vectors[3] if extras else None,
        after_mlp=norms[3] if extras else None,
        parallel=parallel,
    )


def slots_of(ragged: RaggedRows) -> Tensor:
    starts, lens = ragged.query_starts.tolist(), ragged.kv_lens.tolist()
    places = [
        int(ragged.tables[row, p // ragged.block_size]) * ragged.block_size + p % ragged.block_size
        for row, length in enumerate(lens)
        for p in range(length - (starts[row + 1] - starts[row]), length)
    ]
    return torch.tensor(places)


def by_reference(
    layer: Layer,
    x: Tensor,
    case: Case,
    keys: Tensor,
    values: Tensor,
    spec: LayerSpec,
    rope: tuple[Tensor, Tensor],
) -> Tensor:
    """One layer as ``Layer`` defines it."""
    normed, _ = reference.norm(x, layer.input_norm)
    qkv = reference.linear(normed, layer.qkv, layer.qkv_bias)
    query = reference.rope_write(
        qkv, *rope, slots_of(case.ragged), keys, values, layer.q_norm, layer.k_norm
    )
    attended = reference.attend(case.ragged, query, keys, values, spec)
    change = reference.linear(attended.flatten(1), layer.out, layer.out_bias)
    if layer.after_attention is not None:
        change, _ = reference.norm(change, layer.after_attention)
    normed, total = reference.norm(change, layer.mlp_norm, x)
    if layer.parallel:
        normed, _ = reference.norm(x, layer.mlp_norm)
    x = total
    up = reference.linear(normed, layer.gate_up, layer.gate_up_bias)
    mix = reference.gated if layer.gated else reference.activate
    gated = mix(up, layer.activation)
    change = reference.linear(gated, layer.down, layer.down_bias)
    if layer.after_mlp is not None:
        change, _ = reference.norm(change, layer.after_mlp)
    return x + change


def by_chain(
    operations: cpu_operations.CpuOperations,
    layers: Sequence[Layer],
    x: Tensor,
    cases: Sequence[Case],
    places: Sequence[int],
    specs: Sequence[LayerSpec],
    ropes: Sequence[tuple[Tensor, Tensor]],
    slab: int,
    keep: Tensor | None = None,
    *,
    apart: int = 0,
) -> list[Tensor]:
    """What the last layer returns, of these tokens, and each layer's cache. ``places``: by layer
    its case. ``apart``: so many elements lie between the slots of a layer.
    """
    caches = [(cases[g].key_cache.clone(), cases[g].value_cache.clone()) for g in places]
    if apart:
        caches = [in_places(*pair, at, apart, at % 2 == 0) for at, pair in enumerate(caches)]
    chain = operations.chain(cases[0].heads, layers, specs)
    backend = operations.attention(cases[0].heads)
    chain.bind(caches, places)
    out = chain.run(
        x.clone(),
        [backend.plan(case.ragged) for case in cases],
        [slots_of(case.ragged) for case in cases],
        [ropes[g] for g in places],
        slab,
        keep,
    )
    return [out, *itertools.chain.from_iterable(caches)]


MANY: dict[str, Any] = {
    "rows": [(0, 150), (3, 120)],
    "group": 1,
    "kv": 1,
    "dim": 4,
    "width": 20,
    "inner": 64,
    "extras": False,
    "activation": "gelu",
    "parallel": True,
    "centered": True,
    "window": None,
    "dtype": torch.float32,
    "stored": torch.float32,
    "slab": 1024,
    "seed": 0,
    "prefix": 0,
    "apart": 0,
    "kept": None,
}
# Decodes that are cut into parts, the last in a slab of its own kind, among prompts of which some
# end where a slab does. A block of queries has 8 tokens here.
SLABS: dict[str, Any] = MANY | {
    "rows": [(700, 1), (0, 20), (600, 1), (3, 24), (9, 1), (0, 16)],
    "group": 16,
    "slab": 16,
    "parallel": False,
}


# Decodes that share 128 tokens, more than a slab has tokens, and in one layer group only: a window
# has passed some of the other's.
SHARED: dict[str, Any] = SLABS | {
    "rows": [(0, 5), *[(140, 1)] * 9, (0, 20), *[(130, 1)] * 4],
    "slab": 6,
    "prefix": 32,
}


@every_product_set
@settings(max_examples=120 if LONG_FORM else 15, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 40))),
        min_size=1,
        max_size=4,
    ),
    group=st.sampled_from([1, 2, 3, 32]),
    kv=st.integers(1, 2),
    dim=st.sampled_from([4, 16, 24]),
    width=st.sampled_from([20, 64]),
    inner=st.sampled_from([30, 64, 96]),
    extras=st.booleans(),
    activation=st.sampled_from(get_args(Activation)),
    gated=st.booleans(),
    parallel=st.booleans(),
    centered=st.booleans(),
    window=st.sampled_from([None, 7]),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16]),
    stored=st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
    slab=st.integers(1, 60),
    seed=st.integers(0, 2**31),
    prefix=st.just(0),
    apart=st.sampled_from([0, 0, 3, 64]),
    kept=st.sampled_from([None, "ends", "some", "none"]),
)
# More tokens than a tile of a product holds.
@example(**MANY, gated=True)
@example(**MANY, gated=False)
@example(**SLABS | {"kept": "ends"}, gated=True)
@example(**SLABS | {"kept": "ends", "extras": True, "parallel": True}, gated=False)
@example(**SLABS | {"kept": "some", "stored": torch.int8, "inner": 700}, gated=True)
@example(**SHARED | {"apart": 24}, gated=True)
@example(**SHARED | {"window": 135, "extras": True}, gated=True)
@example(**MANY | {"stored": torch.int8, "inner": 700}, gated=True)
@example(**MANY | {"stored": torch.int8, "inner": 700}, gated=False)
@example(**SLABS, gated=True)
@example(**SLABS | {"parallel": True, "inner": 30, "window": 7}, gated=True)
@example(**SLABS | {"extras": True, "window": 300, "dtype": torch.bfloat16}, gated=False)
@example(**SLABS | {"stored": torch.int8, "extras": True, "inner": 700}, gated=True)
def test_a_chain_of_layers_is_the_references_operations_in_turn(
    instruction_set: str,
    rows: list[tuple[int, int]],
    group: int,
    kv: int,
    dim: int,
    width: int,
    inner: int,
    extras: bool,
    activation: Activation,
    gated: bool,
    parallel: bool,
    centered: bool,
    window: int | None,
    dtype: torch.dtype,
    stored: torch.dtype,
    slab: int,
    seed: int,
    prefix: int,
    apart: int,
    kept: str | None,
) -> None:
    """``prefix``: blocks that all decodes begin with. ``apart``: elements between slots. ``kept``:
    the tokens that the last layer returns, all of them for None.
    """
    heads = Heads(group * kv, kv, dim, dim, dtype)
    singles = [row for row, (_, count) in enumerate(rows) if count == 1]
    shared = {row: (first, prefix) for first in singles[:1] for row in singles[1:]}
    # Two layer groups: full attention, and the window, each with its own blocks and rotation.
    cases = [
        make_case(rows, block_size=4, window=w, heads=heads, seed=seed + i, shared=shared)
        for i, w in enumerate((None, window))
    ]
    places, tokens = (0, 1, 0), cases[0].query.shape[0]
    specs = [
        LayerSpec(
            0.25,
            cases[g].ragged.window,
            5.0 if extras else None,
            torch.randn(heads.query) if extras else None,
        )
        for g in places
    ]
    ropes = [(torch.randn(tokens, r), torch.randn(tokens, r)) for r in (dim, dim // 2)]
    x = torch.randn(tokens, width)
    ends = cases[0].ragged.query_starts[1:].long() - 1
    some = torch.randperm(tokens)[: tokens // 3].sort().values
    keep = None if kept is None else {"ends": ends, "some": some, "none": ends[:0]}[kept]
    state = torch.get_rng_state()
    results = []
    for operations in (reference, cpu_operations.load(instruction_set)):
        torch.set_rng_state(state)
        layers = [
            random_layer(
                heads,
                width,
                inner,
                activation,
                extras,
                operations,
                gated=gated,
                parallel=parallel,
                centered=centered,
                stored=stored,
            )
            for _ in places
        ]
        if isinstance(operations, cpu_operations.CpuOperations):
            step = operations, layers, x, cases, places, specs, ropes, slab
            results.append(by_chain(*step, keep, apart=apart))
            continue
        out, caches = x, list[Tensor]()
        for layer, g, spec in zip(layers, places, specs, strict=True):
            keys, values = cases[g].key_cache.clone(), cases[g].value_cache.clone()
            out = by_reference(layer, out, cases[g], keys, values, spec, ropes[g])
            caches += [keys, values]
        results.append([out if keep is None else out[keep], *caches])
    rounds = stored is torch.int8 and "+" in instruction_set
    scale = 1000 if dtype is torch.bfloat16 else 30 if rounds else 1
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(
            ours.float(), theirs.float(), atol=3e-5 * scale, rtol=1e-4 * scale, equal_nan=True
        )


@every_product_set
@settings(max_examples=100 if LONG_FORM else 10, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 90), st.one_of(st.just(1), st.integers(1, 150))),
        min_size=1,
        max_size=4,
    ),
    slab=st.integers(1, 200),
    group=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, 50]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    stored=st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
)
def test_no_bit_depends_on_the_slabs_that_a_step_is_cut_into(
    instruction_set: str,
    rows: list[tuple[int, int]],
    slab: int,
    group: int,
    window: int | None,
    dtype: torch.dtype,
    stored: torch.dtype,
) -> None:
    operations, heads = cpu_operations.load(instruction_set), Heads(group, 1, 8, 8, dtype)
    cases = [make_case(rows, window=w, heads=heads) for w in (None, window)]
    tokens = cases[0].query.shape[0]
    layers = [
        random_layer(heads, 40, 64, "silu", False, operations, stored=stored) for _ in range(2)
    ]
    specs = [LayerSpec(0.3, window=w) for w in (None, window)]
    rope = torch.randn(tokens, 8), torch.randn(tokens, 8)
    step = torch.randn(tokens, 40), cases, (0, 1), specs, (rope, rope)
    whole, cut = (by_chain(operations, layers, *step, n) for n in (tokens, slab))
    for one, other in zip(whole, cut, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@every_set
@settings(max_examples=300 if LONG_FORM else 50, deadline=None)
@given(
    counts=st.lists(st.one_of(st.just(1), st.integers(1, 300)), min_size=1, max_size=9),
    group=st.sampled_from([1, 3, 16, 128, 200]),
    most=st.integers(1, 500),
)
def test_slabs_end_between_tasks_of_attention_and_are_no_larger_than_they_must_be(
    instruction_set: str, counts: list[int], group: int, most: int
) -> None:
    heads = Heads(group, 1, 8, 8, torch.float32)
    backend = cpu_operations.load(instruction_set).attention(heads)
    plan = backend.plan(make_case([(0, count) for count in counts], heads=heads).ragged)
    found = slab_ends(backend.library, [plan.cut(sizes_of(heads))], sum(counts), most)
    block = max(1, 192 // group)
    # A row's queries are cut into blocks of about the same size.
    blocks = list(
        itertools.accumulate(
            (count + i) // number
            for count in counts
            for number in (-(-count // block),)
            for i in reversed(range(number))
        )
    )
    if sum(counts) <= most:
        assert found == [sum(counts)]
        return
    assert set(found) <= set(blocks)
    assert found[-1] == blocks[-1]
    sizes = [end - begin for begin, end in itertools.pairwise([0, *found])]
    assert all(0 < size <= max(most, block) for size in sizes)
    if most >= 2 * block:
        assert len(found) <= -(-blocks[-1] // (most - block))


@every_set
def test_slabs_cut_no_shared_decodes_of_any_layer_group(instruction_set: str) -> None:
    """In the first group a window has passed what those of the second share."""
    heads = Heads(2, 1, 8, 8, torch.float32)
    rows = [(0, 3), *[(150, 1)] * 7, (0, 2), *[(150, 1)] * 5]
    shared = dict.fromkeys(range(2, 8), (1, 32)) | dict.fromkeys(range(10, 14), (9, 32))
    backend = cpu_operations.load(instruction_set).attention(heads)
    plans = [
        backend.plan(make_case(rows, window=window, heads=heads, shared=shared).ragged)
        for window in (20, None)
    ]
    tasks = [plan.cut(sizes_of(heads)) for plan in plans]
    assert slab_ends(backend.library, tasks, 17, 4) == [3, 10, 12, 17]
    assert slab_ends(backend.library, tasks[:1], 17, 4) == [4, 8, 12, 16, 17]


@every_set
@pytest.mark.parametrize(
    "keep",
    [
        pytest.param(torch.tensor([3, 3]), id="twice"),
        pytest.param(torch.tensor([5, 2]), id="not in order"),
        pytest.param(torch.tensor([6]), id="behind the last"),
        pytest.param(torch.tensor([-1]), id="before the first"),
        pytest.param(torch.tensor([1], dtype=torch.int32), id="of 32 bits"),
    ],
)
def test_tokens_to_keep_that_are_none_in_order_are_refused(
    instruction_set: str, keep: Tensor
) -> None:
    operations, heads = cpu_operations.load(instruction_set), Heads(2, 1, 8, 8, torch.float32)
    case = make_case([(0, 6)], heads=heads)
    layer = random_layer(heads, 40, 64, "silu", False, operations)
    rope = torch.randn(6, 8), torch.randn(6, 8)
    x = torch.randn(6, 40)
    with pytest.raises(ValueError, match=r"^keep: not places among 6 tokens"):
        by_chain(operations, [layer], x, [case], [0], [LayerSpec(0.3)], [rope], 6, keep)


@every_set
def test_a_chain_allocates_the_memory_of_its_largest_slab(instruction_set: str) -> None:
    operations, heads = cpu_operations.load(instruction_set), Heads(16, 1, 8, 8, torch.float32)
    case = make_case([(0, 100)], heads=heads)
    layer = random_layer(heads, 40, 200, "silu", False, operations)
    chain, rope = operations.chain(heads, [layer], [LayerSpec(0.3)]), torch.randn(100, 8)
    chain.bind([(case.key_cache, case.value_cache)], [0])
    plan, slots = operations.attention(heads).plan(case.ragged), slots_of(case.ragged)
    for slab, largest in ((100, 100), (60, 56), (8, 12), (1, 12)):
        x = torch.randn(100, 40)
        with Allocated() as allocated:
            chain.run(x, [plan], [slots], [(rope, rope)], slab)
        assert allocated.nbytes == 4 * largest * (40 + 3 * 200)


@every_set
def test_what_a_chain_cannot_read_is_refused_by_name(instruction_set: str) -> None:
    operations = cpu_operations.load(instruction_set)
    heads = Heads(2, 1, 8, 8, torch.float32)
    layer = random_layer(heads, 16, 32, "silu", False, operations)
    bad = replace(layer, gate_up=operations.pack([torch.randn(62, 16)]))
    with pytest.raises(ValueError, match=r"^gate_up: 62 x 16, not 32 x 16"):
        operations.chain(heads, [bad], [LayerSpec(0.3)])
    bad = replace(layer, input_norm=Norm(torch.ones(16).double(), 1e-5))
    with pytest.raises(ValueError, match=r"^input_norm.weight: .*float64"):
        operations.chain(heads, [bad], [LayerSpec(0.3)])
    bad = replace(layer, parallel=True, after_attention=layer.input_norm)
    with pytest.raises(ValueError, match=r"^after_attention: a parallel layer has none"):
        operations.chain(heads, [bad], [LayerSpec(0.3)])
    case = make_case([(3, 2)], heads=heads)
    chain = operations.chain(heads, [layer], [LayerSpec(0.3)])
    plan = operations.attention(heads).plan(case.ragged)
    rope = torch.ones(2, 8), torch.zeros(2, 8)
    slots = slots_of(case.ragged)
    half = case.key_cache[..., :4].contiguous(), case.value_cache
    with pytest.raises(ValueError, match=r"^keys: heads of \(1, 4\)"):
        chain.bind([half], [0])
    with pytest.raises(RuntimeError, match=r"^run: bind"):
        chain.run(torch.randn(2, 16), [plan], [slots], [rope])
    cache = case.key_cache, case.value_cache
    chain.bind([cache], [0])
    with pytest.raises(ValueError, match=r"^ropes and slots: not for the 3 tokens"):
        chain.run(torch.randn(3, 16), [plan], [slots], [rope])
    windowed = operations.chain(heads, [layer], [LayerSpec(0.3, window=4)])
    windowed.bind([cache], [0])
    with pytest.raises(ValueError, match=r"^window: the layer has 4, its plan None"):
        windowed.run(torch.randn(2, 16), [plan], [slots], [rope])
    others = operations.chain(heads, [layer] * 2, [LayerSpec(0.3, window=n) for n in (4, 5)])
    with pytest.raises(ValueError, match=r"^window: the layers of group 0 differ"):
        others.bind([cache] * 2, [0, 0])
