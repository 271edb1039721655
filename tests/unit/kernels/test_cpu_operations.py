"""A decoder layer's operations in C++ against their reference, on each instruction set."""

import itertools
import mmap
from typing import get_args

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fairlead_kernels.cpu import cpu_operations
from fairlead_kernels.formats import row_chunks
from fairlead_kernels.formats.quantize import quantize
from fairlead_kernels.interface import reference
from fairlead_kernels.interface.layer import Activation, LayerOperations, Norm, Packed
from support.attention_cases import in_places
from support.full import LONG_FORM
from support.kernel_sets import every_product_set, every_set

NAN = float("nan")
sizes = st.integers(1, 70)
seeds = st.integers(0, 2**31)
activations = st.sampled_from(get_args(Activation))
STORED = (torch.float32, torch.bfloat16, torch.int8)
examples = settings(max_examples=400 if LONG_FORM else 50, deadline=None)
any_activation = given(
    tokens=sizes,
    width=sizes,
    activation=activations,
    spread=st.sampled_from([0.1, 3.0, 40.0]),
    seed=seeds,
)


def operations(instruction_set: str) -> cpu_operations.CpuOperations:
    made = cpu_operations.load(instruction_set)
    checked: LayerOperations = made  # mypy checks every signature here
    assert checked.name == instruction_set
    return made


def packed_by(
    operations: LayerOperations, weights: list[Tensor], dtype: torch.dtype, factor: float = 1.0
) -> Packed:
    """The weights packed in this type, for int8 quantized before."""
    if dtype is torch.int8:
        return operations.pack([quantize(weight) for weight in weights], factor=factor)
    return operations.pack(weights, dtype=dtype, factor=factor)


def error_of_sums(terms: int, largest: float) -> float:
    """What rounding explains in a sum of float32 terms that was computed in any order."""
    return 1e-7 * terms * largest + 1e-6


def moved_by_rounding(x: Tensor, weights: list[Tensor], packed: Packed) -> Tensor:
    """The most that a result [T, N] may move by where the product rounds x."""
    rows = packed_by(reference, weights, packed.data.dtype)
    assert rows.scales is not None or not packed.rounding
    sums = rows.data.double().abs().sum(1) * (1 if packed.scales is None else packed.scales)
    return 1.0001 * packed.rounding * x.double().abs().amax(1)[:, None] * sums


@every_product_set
@examples
@example(  # whose pieces are as large as they get
    tokens=512, rows=[40], columns=60, biased=True, dtype=torch.float32, factor=1.0, seed=0
)
@example(  # in three pieces
    tokens=253, rows=[40], columns=1100, biased=True, dtype=torch.float32, factor=1.0, seed=0
)
@given(
    tokens=st.one_of(sizes, st.integers(250, 270)),
    rows=st.lists(sizes, min_size=1, max_size=3),
    columns=st.one_of(sizes, st.sampled_from([511, 512, 513, 1025, 1100])),
    biased=st.booleans(),
    dtype=st.sampled_from(STORED),
    factor=st.sampled_from([1.0, 1.0, 0.3]),
    seed=seeds,
)
def test_a_product_of_any_size_is_the_references(
    instruction_set: str,
    tokens: int,
    rows: list[int],
    columns: int,
    biased: bool,
    dtype: torch.dtype,
    factor: float,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    ours = operations(instruction_set)
    x = torch.randn(tokens, columns)
    weights = [torch.randn(n, columns) for n in rows]
    bias = torch.randn(sum(rows)) if biased else None
    packed = packed_by(ours, weights, dtype, factor)
    assert (packed.rows, packed.columns, packed.data.dtype) == (sum(rows), columns, dtype)
    assert (packed.rounding > 0) == ("+" in instruction_set and dtype is torch.int8)
    got = ours.linear(x, packed, bias)
    packed_by_rows = packed_by(reference, weights, dtype, factor)
    want = reference.linear(x.double(), packed_by_rows, None)
    want = want if bias is None else want + bias
    allowed = error_of_sums(columns, float(want.abs().max()))
    assert ((got - want).abs() <= allowed + moved_by_rounding(x, weights, packed)).all()


@pytest.mark.parametrize("dtype", STORED)
@every_product_set
def test_a_product_of_no_tokens_is_empty(instruction_set: str, dtype: torch.dtype) -> None:
    ours = operations(instruction_set)
    packed = packed_by(ours, [torch.randn(40, 70)], dtype)
    assert ours.linear(torch.empty(0, 70), packed, None).shape == (0, 40)
    values, places = ours.likeliest(torch.empty(0, 70), packed, None)
    assert (values.shape, places.shape) == ((0,), (0,))


@pytest.mark.parametrize("dtype", STORED)
@every_product_set
def test_a_weight_is_packed_in_parts_and_unpacked_to_the_same_values(
    instruction_set: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = operations(instruction_set)
    weights = [torch.randn(n, 70) for n in (3, 130, 97)]
    transposed = [weight.T.contiguous().T for weight in weights]
    whole = packed_by(ours, weights, dtype)
    monkeypatch.setattr(row_chunks, "ELEMENTS", 70 * 40)
    for given_weights in (weights, transposed):
        assert torch.equal(packed_by(ours, given_weights, dtype).data, whole.data)
    stored = torch.cat(weights)
    if dtype is torch.int8:
        stored = torch.cat([quantize(weight).numbers for weight in weights]).float()
    assert torch.equal(ours.unpack(whole, 0, 230), stored.to(dtype).float())
    assert torch.equal(ours.unpack(whole, 50, 7), stored[50:57].to(dtype).float())


@every_set
def test_what_is_packed_is_given_back_and_its_neighbours_stay(instruction_set: str) -> None:
    ours = operations(instruction_set)
    memory = torch.ones(3000, 1000)
    weight = memory[1000:2000]
    first, last = weight[0].clone(), weight[-1].clone()
    packed = ours.pack([weight], releases=True)
    assert memory[:1000].eq(1).all()
    assert memory[2000:].eq(1).all()
    assert weight.count_nonzero() < 3 * mmap.PAGESIZE, "whole pages are zeros"
    assert torch.equal(ours.unpack(packed, 0, 1), first[None])
    assert torch.equal(ours.unpack(packed, 999, 1), last[None])
    ours.give_back(memory[:, :500])
    assert memory[:1000].eq(1).all(), "of other columns"


@every_product_set
@examples
@given(
    tokens=st.one_of(sizes, st.integers(250, 270)),
    rows=st.integers(1, 300),
    columns=sizes,
    biased=st.booleans(),
    dtype=st.sampled_from(STORED),
    seed=seeds,
)
def test_the_likeliest_of_a_product_of_any_size_is_the_references(
    instruction_set: str,
    tokens: int,
    rows: int,
    columns: int,
    biased: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    ours = operations(instruction_set)
    # Whole numbers: products are exact, and many are equal.
    x = torch.randint(-2, 3, (tokens, columns)).float()
    weights = [torch.randint(-3, 4, (rows, columns)).float()]
    bias = torch.randint(-3, 4, (rows,)).float() if biased else None
    packed = packed_by(ours, weights, dtype)
    values, places = ours.likeliest(x, packed, bias)
    want, first = reference.likeliest(x.double(), packed_by(reference, weights, dtype), bias)
    allowed = 1e-5 + 1e-5 * want.abs() + moved_by_rounding(x, weights, packed).amax(1)
    assert ((values - want).abs() <= allowed).all()
    if dtype is not torch.int8:  # whose scales make equal products differ by rounding
        assert torch.equal(places, first)
    product = ours.linear(x, packed_by(ours, weights, dtype), bias)
    assert torch.equal(values, product.amax(1))
    assert torch.equal(places, product.argmax(1))


@every_product_set
@pytest.mark.parametrize("tokens", [1, 5, 300])
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("centered", [False, True])
def test_the_likeliest_of_a_norm_is_that_of_the_normed(
    instruction_set: str, tokens: int, dtype: torch.dtype, centered: bool
) -> None:
    torch.manual_seed(tokens)
    ours, weights = operations(instruction_set), [torch.randn(90, 70)]
    norm = Norm(torch.randn(70), 1e-5, 1.0, torch.randn(70) if centered else None, centered)
    x = 3 * torch.randn(tokens, 70)
    packed, bias = packed_by(ours, weights, dtype), torch.randn(90)
    normed, _ = ours.norm(x, norm)
    values, places = ours.likeliest(normed, packed, bias)
    written = x.clone()
    got, found = ours.likeliest(written, packed, bias, norm)
    assert torch.equal(got, values)
    assert torch.equal(found, places)
    assert torch.equal(written, normed)
    want, _ = reference.likeliest(x, packed_by(reference, weights, dtype), bias, norm)
    allowed = 1e-4 + 1e-5 * want.abs() + moved_by_rounding(normed, weights, packed).amax(1)
    assert ((got - want).abs() <= allowed).all()


@every_product_set
def test_the_likeliest_is_nan_where_a_product_is_and_minus_infinity_where_all_are(
    instruction_set: str,
) -> None:
    ours = operations(instruction_set)
    weight = ours.pack([torch.eye(70)])
    x = torch.zeros(4, 70)
    x[0, 69], x[1, 3], x[2] = NAN, float("inf"), -1.0
    bias = torch.zeros(70)
    values, places = ours.likeliest(x, weight, bias)
    assert values[0].isnan()
    assert values[1].isnan()  # of 0 times infinity
    assert (values[2:].tolist(), places[2:].tolist()) == ([-1.0, 0.0], [0, 0])
    values, places = ours.likeliest(x[3:], weight, torch.full((70,), -float("inf")))
    assert (values.tolist(), places.tolist()) == ([-float("inf")], [0])


@every_product_set
@examples
@given(
    tokens=sizes,
    rows=sizes,
    columns=sizes,
    dtype=st.sampled_from(STORED),
    factor=st.sampled_from([1.0, 0.3]),
    table=st.booleans(),
    seed=seeds,
)
def test_embeddings_are_rows_of_the_packed_weight(
    instruction_set: str,
    tokens: int,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    factor: float,
    table: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    ours = operations(instruction_set)
    ids, weights = torch.randint(rows, (tokens,)), [torch.randn(rows, columns)]
    positions = (torch.randn(9, columns), torch.randint(9, (tokens,))) if table else None
    got = ours.embed(ids, packed_by(ours, weights, dtype, 0.5), factor, positions)
    want = reference.embed(ids, packed_by(reference, weights, dtype, 0.5), factor, positions)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@every_set
@examples
@given(
    positions=st.lists(st.integers(0, 200_000), max_size=40),
    half=st.integers(1, 40),
    scale=st.sampled_from([1.0, 1.19]),
    seed=seeds,
)
def test_cosines_and_sines_are_the_references(
    instruction_set: str, positions: list[int], half: int, scale: float, seed: int
) -> None:
    torch.manual_seed(seed)
    at, frequencies = torch.tensor(positions, dtype=torch.int64), torch.rand(half)
    got = operations(instruction_set).angles(at, frequencies, scale)
    for ours, want in zip(got, reference.angles(at, frequencies, scale), strict=True):
        assert ours.shape == (len(positions), 2 * half)
        torch.testing.assert_close(ours, want, rtol=0, atol=3e-7)


@every_product_set
def test_a_row_that_is_not_there_has_no_embedding(instruction_set: str) -> None:
    ours = operations(instruction_set)
    weight, table = ours.pack([torch.randn(40, 8)]), torch.randn(5, 8)
    for ids, places in ((40, 0), (-1, 0), (0, 5), (0, -1)):
        with pytest.raises(IndexError, match="not all below 40"):
            ours.embed(torch.tensor([3, ids]), weight, 1.0, (table, torch.tensor([0, places])))


@every_product_set
@pytest.mark.parametrize("dtype", STORED)
def test_a_packed_weight_of_strided_rows_holds_at_most_one_panel_more(
    instruction_set: str, dtype: torch.dtype
) -> None:
    ours = operations(instruction_set)
    whole = torch.randn(40, 60)
    weights = [whole[:33, ::2], whole[:35, :30], whole.t()[:30, :30].t()]
    packed = packed_by(ours, weights, dtype)
    panel, rows = ours.library.panel_width(), 33 + 35 + 30
    size, scales = dtype.itemsize, 4 * rows if dtype is torch.int8 else 0
    columns = 32 if packed.rounding else 30  # four at a time
    assert packed.data.nbytes == packed.nbytes - scales
    assert 0 <= packed.data.nbytes - rows * columns * size < panel * columns * size
    x = torch.randn(3, 30)
    want = reference.linear(x, packed_by(reference, weights, dtype))
    allowed = 2e-5 + 1e-5 * want.abs() + moved_by_rounding(x, weights, packed)
    assert ((ours.linear(x, packed) - want).abs() <= allowed).all()


@every_set
@examples
@given(
    tokens=sizes,
    width=st.one_of(sizes, st.integers(500, 530)),
    offset=st.sampled_from([0.0, 1.0]),
    biased=st.booleans(),
    centered=st.booleans(),
    with_residual=st.booleans(),
    seed=seeds,
)
def test_a_norm_is_the_references(
    instruction_set: str,
    tokens: int,
    width: int,
    offset: float,
    biased: bool,
    centered: bool,
    with_residual: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    x, bias = torch.randn(tokens, width), torch.randn(width) if biased else None
    norm = Norm(torch.randn(width), 1e-5, offset, bias, centered)
    residual = torch.randn(tokens, width) if with_residual else None
    want, total = reference.norm(x, norm, residual)
    got, kept = operations(instruction_set).norm(
        x.clone(), norm, None if residual is None else residual.clone()
    )
    assert torch.equal(kept, total)
    # What rounding leaves of the mean is divided by the deviation.
    deviation = float(total.var(1, correction=0).add(1e-5).min()) ** 0.5
    atol = 2e-6 + (1e-6 * float(total.abs().max()) / deviation if centered else 0.0)
    torch.testing.assert_close(got, want, atol=atol, rtol=3e-6)


@every_set
@pytest.mark.parametrize("width", [7, 64, 101])
def test_a_layer_norm_far_from_zero_is_that_of_the_deviations(
    instruction_set: str, width: int
) -> None:
    deviations = torch.randint(-8, 9, (3, width)).float()
    norm = Norm(torch.ones(width), 1e-5, centered=True)
    got, _ = operations(instruction_set).norm(deviations + 1000, norm)
    want, _ = reference.norm(deviations, norm)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@every_set
@examples
@given(
    tokens=sizes,
    query=st.integers(1, 9),
    kv=st.integers(1, 3),
    dim=st.integers(1, 40).map(lambda half: 2 * half),
    rotated=st.integers(0, 40),
    normed=st.tuples(st.booleans(), st.booleans()),
    biased=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    places=st.one_of(st.none(), st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans())),
    seed=seeds,
)
def test_rotation_and_the_cache_write_are_the_references(
    instruction_set: str,
    tokens: int,
    query: int,
    kv: int,
    dim: int,
    rotated: int,
    normed: tuple[bool, bool],
    biased: bool,
    dtype: torch.dtype,
    places: tuple[int, int, bool] | None,
    seed: int,
) -> None:
    """``places``: of a token, in which keys and values lie and no other byte changes."""
    torch.manual_seed(seed)
    rotated = min(2 * rotated, dim)
    qkv = torch.randn(tokens, (query + 2 * kv) * dim)
    cos, sin = torch.randn(tokens, rotated), torch.randn(tokens, rotated)
    slots = torch.randperm(tokens + 9)[:tokens]
    bias = torch.randn(dim) if biased else None
    norms = [Norm(torch.randn(dim), 1e-6, 0.0, bias) if wanted else None for wanted in normed]
    shape = (-(-(tokens + 9) // 4), 4, kv, dim)
    results = []
    for made in (reference, operations(instruction_set)):
        keys, values = (torch.full(shape, NAN, dtype=dtype) for _ in range(2))
        if places is not None and made is not reference:
            keys, values = in_places(keys, values, *places)
        out = made.rope_write(qkv.clone(), cos, sin, slots, keys, values, *norms)
        if places is not None and made is not reference:
            whole = torch.empty(0, dtype=dtype).set_(keys.untyped_storage())
            count = tokens * kv * dim
            assert int((~whole.isnan()).sum()) == (2 * count if places[2] else count)
        results.append((out, keys, values))
    (want, want_keys, want_values), (got, keys, values) = results
    torch.testing.assert_close(got.contiguous(), want, atol=3e-6, rtol=3e-6)
    torch.testing.assert_close(values, want_values, atol=0, rtol=0, equal_nan=True)
    # A rounding error in float32 may move a bfloat16 to its neighbour.
    atol, rtol = (3e-6, 3e-6) if dtype is torch.float32 else (1e-5, 8e-3)
    torch.testing.assert_close(keys, want_keys, atol=atol, rtol=rtol, equal_nan=True)


@every_set
@examples
@any_activation
def test_a_gate_is_the_references(
    instruction_set: str, tokens: int, width: int, activation: Activation, spread: float, seed: int
) -> None:
    torch.manual_seed(seed)
    x = torch.randn(tokens, 2 * width) * spread
    got = operations(instruction_set).gated(x, activation)
    scale = float(x.abs().max()) ** 2
    want = reference.gated(x, activation)
    torch.testing.assert_close(got, want, atol=2e-7 * scale + 1e-7, rtol=3e-6)


@every_set
@examples
@any_activation
def test_an_activation_without_a_gate_is_the_references(
    instruction_set: str, tokens: int, width: int, activation: Activation, spread: float, seed: int
) -> None:
    torch.manual_seed(seed)
    x = torch.randn(tokens, width) * spread
    got, want = (made.activate(x, activation) for made in (operations(instruction_set), reference))
    torch.testing.assert_close(got, want, atol=3e-7 * spread + 1e-7, rtol=3e-6)


@every_set
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_a_gate_far_from_zero_is_its_limit_and_a_nan_stays(
    instruction_set: str, activation: Activation
) -> None:
    gate = torch.tensor([[1e4, -1e4, 88.0, -88.0, torch.inf, 0.0, NAN]])
    got = operations(instruction_set).gated(torch.cat([gate, torch.ones(1, 7)], 1), activation)[0]
    assert got[:6].tolist() == pytest.approx([1e4, 0.0, 88.0, 0.0, torch.inf, 0.0], abs=1e-30)
    assert got[6].isnan()


@every_set
def test_a_bfloat16_is_rounded_as_torch_rounds_it(instruction_set: str) -> None:
    special = [0.0, -0.0, torch.inf, -torch.inf, NAN, 1e-40, 3.4e38, 1 + 2**-8, 1 + 3 * 2**-8]
    values = torch.tensor(special + torch.randn(103).tolist())
    width = values.numel()
    keys, cache = (torch.zeros(1, 1, 1, width, dtype=torch.bfloat16) for _ in range(2))
    qkv = torch.cat([torch.zeros(2 * width), values])[None]
    none = torch.zeros(1, 0)
    operations(instruction_set).rope_write(
        qkv, none, none, torch.zeros(1, dtype=torch.int64), keys, cache
    )
    torch.testing.assert_close(
        cache.flatten(), values.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True
    )


@every_product_set
@pytest.mark.parametrize("dtype", STORED)
def test_a_product_does_not_depend_on_the_number_of_threads(
    instruction_set: str, dtype: torch.dtype
) -> None:
    ours = operations(instruction_set)
    x, packed = torch.randn(20, 96), packed_by(ours, [torch.randn(400, 96)], dtype)
    before = torch.get_num_threads()
    results: list[Tensor] = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(ours.linear(x, packed))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*pair) for pair in itertools.pairwise(results))


@every_set
def test_a_tensor_that_c_cannot_read_is_refused_by_name(instruction_set: str) -> None:
    ours = operations(instruction_set)
    packed = ours.pack([torch.randn(4, 8)])
    with pytest.raises(ValueError, match=r"^x: \(3, 7\)"):
        ours.linear(torch.randn(3, 7), packed)
    with pytest.raises(ValueError, match=r"^x: .*float16"):
        ours.linear(torch.randn(3, 8).half(), packed)
    with pytest.raises(ValueError, match=r"^bias: \(5,\)"):
        ours.linear(torch.randn(3, 8), packed, torch.randn(5))
    with pytest.raises(ValueError, match=r"^weights: .*float64"):
        ours.pack([torch.randn(4, 8).double()])
    cache = torch.zeros(1, 4, 1, 8, dtype=torch.float16)
    ones, slot = torch.ones(1, 8), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^key_cache: .*float16"):
        ours.rope_write(torch.randn(1, 24), ones, ones, slot, cache, cache)
