"""All layers in one C++ call against the reference's operations, one after the other."""

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fairlead_kernels import cpu, reference
from fairlead_kernels.attention import Heads, LayerSpec, RaggedRows
from fairlead_kernels.layer import Activation, Layer, LayerOperations, Norm, Packed
from fairlead_kernels.quantize import quantize
from support.attention_cases import Case, make_case
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
    "seed": 0,
}


@every_product_set
@settings(max_examples=120 if LONG_FORM else 15, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 40))),
        min_size=1,
        max_size=4,
    ),
    group=st.integers(1, 3),
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
    seed=st.integers(0, 2**31),
)
# More tokens than a tile of a product holds.
@example(**MANY, gated=True)
@example(**MANY, gated=False)
@example(**MANY | {"stored": torch.int8, "inner": 700}, gated=True)
@example(**MANY | {"stored": torch.int8, "inner": 700}, gated=False)
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
    seed: int,
) -> None:
    heads = Heads(group * kv, kv, dim, dim, dtype)
    # Two layer groups: full attention, and the window, each with its own blocks and rotation.
    cases = [
        make_case(rows, block_size=4, window=w, heads=heads, seed=seed + i)
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
    state = torch.get_rng_state()
    results = []
    for operations in (reference, cpu.load(instruction_set)):
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
        caches = [(cases[g].key_cache.clone(), cases[g].value_cache.clone()) for g in places]
        if isinstance(operations, cpu.CpuOperations):
            chain = operations.chain(heads, layers, specs)
            backend = operations.attention(heads)
            chain.bind(caches, places)
            out = chain.run(
                x.clone(),
                [backend.plan(case.ragged) for case in cases],
                [slots_of(case.ragged) for case in cases],
                [ropes[g] for g in places],
            )
        else:
            out = x
            for layer, g, cache, spec in zip(layers, places, caches, specs, strict=True):
                out = by_reference(layer, out, cases[g], *cache, spec, ropes[g])
        results.append((out, *(tensor for cache in caches for tensor in cache)))
    rounds = stored is torch.int8 and "+" in instruction_set
    scale = 1000 if dtype is torch.bfloat16 else 30 if rounds else 1
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(
            ours.float(), theirs.float(), atol=3e-5 * scale, rtol=1e-4 * scale, equal_nan=True
        )


@every_set
def test_what_a_chain_cannot_read_is_refused_by_name(instruction_set: str) -> None:
    operations = cpu.load(instruction_set)
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
