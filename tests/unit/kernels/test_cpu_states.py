"""Operations on states in C++ against their reference and transformers' functions.

Units of other sequences, and what lies around a tensor in its own, are full of NaN and must stay as
they are.
"""

from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5

from fairlead_kernels.cpu import library
from fairlead_kernels.cpu.cpu_states import CpuStates
from fairlead_kernels.interface import reference
from fairlead_kernels.interface.states import StateOperations, StatePlace, StateRows
from support.full import LONG_FORM
from support.kernel_sets import every_set

examples = settings(max_examples=200 if LONG_FORM else 30, deadline=None)
counts = st.lists(st.integers(1, 12), max_size=5)
seeds = st.integers(0, 2**31)
types = st.sampled_from([torch.float32, torch.bfloat16])
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def operations(instruction_set: str) -> StateOperations:
    return CpuStates(library.load(instruction_set))


class Pool(NamedTuple):
    """Units with states of ``nbytes`` from ``place`` on, and rows that read and write some."""

    place: StatePlace
    rows: StateRows
    nbytes: int

    def copy(self) -> "Pool":
        place = StatePlace(self.place.pool.clone(), self.place.offset)
        return self._replace(place=place)

    def states(self, units: Tensor, dtype: torch.dtype) -> Tensor:
        """Those [S, elements] that lie in these units [S, n]."""
        run = self.place.pool[units].flatten(1)
        offset = self.place.offset
        return run[:, offset : offset + self.nbytes].contiguous().view(dtype)

    def others(self) -> Tensor:
        """A copy of all bytes but those that the rows write."""
        pool = self.place.pool.clone()
        for units in self.rows.target:
            run = pool[units]
            run.view(-1)[self.place.offset : self.place.offset + self.nbytes] = 0
            pool[units] = run
        return pool


def pool_of(
    lengths: list[int], state: Tensor, generator: torch.Generator, begins: list[bool] | None = None
) -> Pool:
    """A pool of NaN in which each sequence but those that begin has such a state, changed at
    random, in units of which each has a third, drawn in a random order.
    """
    nbytes, offset = state.nbytes, 64
    unit = -(-(offset + nbytes) // (3 * 64)) * 64
    count = -(-(offset + nbytes) // unit)
    rows = len(lengths)
    pool = torch.full((2 * rows * count + 2, unit), 0xFF, dtype=torch.uint8)
    drawn = torch.randperm(len(pool), generator=generator)[: 2 * rows * count]
    units = drawn.view(2, rows, count)
    if begins is None:
        begins = (torch.rand(rows, generator=generator) < 0.3).tolist()
    for row in range(rows):
        if begins[row]:
            continue
        value = torch.randn(state.shape, generator=generator).to(state.dtype)
        run = pool[units[0, row]]
        run.view(-1)[offset : offset + nbytes] = value.view(-1).view(torch.uint8)
        pool[units[0, row]] = run
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return Pool(
        StatePlace(pool, offset),
        StateRows(
            starts,
            torch.zeros(rows, dtype=torch.int64),
            torch.tensor(begins, dtype=torch.bool),
            units[0].contiguous(),
            units[1].contiguous(),
        ),
        nbytes,
    )


def compare(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype is want.dtype
    torch.testing.assert_close(got.float(), want.float(), rtol=CLOSE[dtype], atol=CLOSE[dtype])


class Convolved(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    activation: Literal["silu"] | None

    def run(self, on: Any, pool: Pool, tokens: slice | None = None) -> Tensor:
        x = self.x if tokens is None else self.x[tokens]
        out: Tensor = on.causal_convolution(
            x, self.weight, self.bias, self.activation, pool.rows, pool.place
        )
        return out


def convolution(
    tokens: int, channels: int, taps: int, dtype: torch.dtype, generator: torch.Generator
) -> Convolved:
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((tokens, channels), (channels, taps), (channels,))
    )
    biased, activated = (torch.rand(2, generator=generator) < 0.5).tolist()
    return Convolved(x, weight, bias if biased else None, "silu" if activated else None)


@every_set
@given(
    lengths=counts, channels=st.integers(1, 140), taps=st.integers(2, 8), dtype=types, seed=seeds
)
@example(lengths=[], channels=64, taps=4, dtype=torch.float32, seed=0)
@example(lengths=[1, 1, 1], channels=100, taps=7, dtype=torch.bfloat16, seed=1)
@example(lengths=[300], channels=192, taps=4, dtype=torch.float32, seed=2)
@examples
def test_a_convolution_is_its_reference(
    instruction_set: str,
    lengths: list[int],
    channels: int,
    taps: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    case = convolution(sum(lengths), channels, taps, dtype, generator)
    pool = pool_of(lengths, torch.empty(channels, taps - 1, dtype=dtype), generator)
    expected, before = pool.copy(), pool.others()
    want = case.run(reference, expected)
    compare(case.run(operations(instruction_set), pool), want, dtype)
    # The inputs are copied: to the bit.
    assert torch.equal(pool.place.pool, expected.place.pool)
    assert torch.equal(pool.others(), before)


class Ruled(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    normalizes: bool

    def run(self, on: Any, pool: Pool, tokens: slice = slice(None)) -> Tensor:
        q, k, v, g, beta = (x[tokens] for x in self[:5])
        out: Tensor = on.gated_delta_rule(
            q, k, v, g, beta, 0.3, pool.rows, pool.place, normalizes=self.normalizes
        )
        return out


def delta_rule(
    tokens: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Ruled:
    """Random inputs, of which q, k and v lie side by side, as a convolution gives them."""
    (key_heads, value_heads), (key_dim, value_dim) = heads, dims
    widths = [key_heads * key_dim, key_heads * key_dim, value_heads * value_dim]
    mixed = torch.randn(tokens, sum(widths), generator=generator).to(dtype)
    q, k, v = torch.split(mixed, widths, dim=-1)
    g, beta = torch.randn(2, tokens, value_heads, generator=generator)
    return Ruled(
        q.view(tokens, key_heads, key_dim),
        k.view(tokens, key_heads, key_dim),
        v.view(tokens, value_heads, value_dim),
        -F.softplus(g),
        beta.sigmoid(),
        # Without, keys whose length is more than 1 let a state grow without bound.
        normalizes=True,
    )


shapes = st.tuples(
    st.sampled_from([(1, 1), (1, 3), (2, 4), (3, 3)]),
    st.tuples(st.integers(1, 40), st.integers(1, 150)),
)


@every_set
@given(lengths=counts, shape=shapes, dtype=types, seed=seeds)
@example(lengths=[], shape=((1, 1), (8, 8)), dtype=torch.float32, seed=0)
@example(lengths=[1, 1, 1], shape=((2, 4), (33, 65)), dtype=torch.bfloat16, seed=1)
@example(lengths=[70], shape=((2, 4), (16, 128)), dtype=torch.float32, seed=2)
# Single tokens whose states are whole vectors, of which units cut some.
@example(lengths=[1, 2, 1, 1, 1], shape=((2, 4), (33, 160)), dtype=torch.float32, seed=3)
@example(lengths=[1, 1, 1, 1], shape=((2, 4), (20, 32)), dtype=torch.bfloat16, seed=4)
@examples
def test_the_gated_delta_rule_is_its_reference(
    instruction_set: str,
    lengths: list[int],
    shape: tuple[tuple[int, int], tuple[int, int]],
    dtype: torch.dtype,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    heads, dims = shape
    case = delta_rule(sum(lengths), heads, dims, dtype, generator)
    pool = pool_of(lengths, torch.empty(heads[1], *dims), generator)
    expected, before = pool.copy(), pool.others()
    want = case.run(reference, expected)
    compare(case.run(operations(instruction_set), pool), want, dtype)
    got, kept = (x.states(x.rows.target, torch.float32) for x in (pool, expected))
    compare(got, kept, torch.float32)
    assert torch.equal(pool.others(), before)


@every_set
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_keys_that_are_not_normalized_are_taken_as_they_are(
    instruction_set: str, scale: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    case = delta_rule(9, (2, 4), (20, 30), torch.float32, generator)
    case = case._replace(k=F.normalize(case.k, dim=-1) * scale, normalizes=False)
    pool = pool_of([9], torch.empty(4, 20, 30), generator)
    want = case.run(reference, pool.copy())
    compare(case.run(operations(instruction_set), pool), want, torch.float32)


@every_set
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_are_transformers_functions(instruction_set: str, dtype: torch.dtype) -> None:
    """Of one sequence in one call, and from the state that it leaves."""
    generator = torch.Generator().manual_seed(0)
    on = operations(instruction_set)
    tokens, channels, taps = 90, 96, 4
    case = convolution(tokens, channels, taps, dtype, generator)
    pool = pool_of([tokens], torch.empty(channels, taps - 1, dtype=dtype), generator, [True])
    want = modeling_qwen3_5.causal_conv1d_fn(
        case.x.T[None], case.weight, case.bias, case.activation
    )[0].T
    compare(case.run(on, pool), want, dtype)
    rule = delta_rule(tokens, (2, 4), (24, 40), dtype, generator)
    pool = pool_of([tokens], torch.empty(4, 24, 40), generator, [True])
    want, state = modeling_qwen3_5.torch_chunk_gated_delta_rule(
        *(x[None] for x in rule[:5]), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    got = rule.run(on, pool) * (24**-0.5 / 0.3)
    compare(got, want[0], dtype)
    compare(pool.states(pool.rows.target, torch.float32), state.flatten(1), torch.float32)


@every_set
@pytest.mark.parametrize("kind", ["convolution", "delta rule"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_however_its_sequence_is_cut(
    instruction_set: str, kind: str, dtype: torch.dtype
) -> None:
    """In one step beside others on two threads, or token by token alone on one thread."""
    generator = torch.Generator().manual_seed(0)
    on = operations(instruction_set)
    lengths, tokens = [60, 37, 80], 37
    case: Convolved | Ruled
    if kind == "convolution":
        case, state = convolution(177, 300, 4, dtype, generator), torch.empty(300, 3, dtype=dtype)
    else:
        case = delta_rule(177, (2, 4), (30, 100), dtype, generator)
        state = torch.empty(4, 30, 100)
    pool = pool_of(lengths, state, generator, [False, False, True])
    alone = pool.copy()
    want = case.run(on, pool)[60:97]
    source, target = (x[1:2].contiguous() for x in (pool.rows.source, pool.rows.target))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        got = []
        for t in range(tokens):
            rows = StateRows(
                torch.tensor([0, 1]), torch.zeros(1, dtype=torch.int64), torch.tensor([False]),
                source, target,
            )  # fmt: skip
            got.append(case.run(on, alone._replace(rows=rows), slice(60 + t, 61 + t)))
            source, target = target, source
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.cat(got), want)
    left = alone.states(source, state.dtype)
    assert torch.equal(left, pool.states(pool.rows.target[1:2], state.dtype))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(4, 9)}, r"x: \(4, 9\)"),
        ({"x": torch.zeros(4, 8).double()}, "x: .*float64"),
        ({"weight": torch.zeros(8, 4).half(), "x": torch.zeros(4, 8).half()}, "weight: .*float16"),
        ({"weight": torch.zeros(8, 1)}, "weight: 1 taps"),
        ({"bias": torch.zeros(7)}, "bias: "),
        ({"starts": torch.tensor([0, 3])}, r"starts: \[0, 3\] of 4 tokens"),
        ({"begins": torch.tensor([1])}, "begins: "),
        ({"target": torch.zeros(1, 2, dtype=torch.int64)}, "target: "),
        ({"source": torch.zeros(1, 0, dtype=torch.int64)}, "target: "),
        ({"pool": torch.zeros(2, 60, dtype=torch.uint8)}, "offset: 0 in units of 60"),
        ({"offset": 32}, "offset: 32 in units"),
        ({"offset": 64}, "source: 1 units of 128 bytes; 96 bytes from 64"),
    ],
)
def test_what_the_kernels_cannot_read_is_refused_by_name(
    change: dict[str, Any], message: str
) -> None:
    rows: dict[str, Any] = {
        "starts": torch.tensor([0, 4]),
        "prompts": torch.tensor([4]),
        "begins": torch.tensor([True]),
        "source": torch.tensor([[0]]),
        "target": torch.tensor([[1]]),
    }
    place: dict[str, Any] = {"pool": torch.zeros(2, 128, dtype=torch.uint8), "offset": 0}
    tensors: dict[str, Any] = {"x": torch.zeros(4, 8), "weight": torch.zeros(8, 4), "bias": None}
    for values in (rows, place, tensors):
        values |= {name: x for name, x in change.items() if name in values}
    on = operations("baseline")
    with pytest.raises(ValueError, match=message):
        on.causal_convolution(
            tensors["x"],
            tensors["weight"],
            tensors["bias"],
            None,
            StateRows(**rows),
            StatePlace(**place),
        )
