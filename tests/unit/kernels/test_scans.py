"""The scans of Mamba 1 and 2 in C++ against their references and transformers' code, on each
instruction set: on rows of any lengths, with states anywhere in units that are full of NaN.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.jamba import modeling_jamba
from transformers.models.nemotron_h import modeling_nemotron_h

from fairlead_kernels.cpu import library
from fairlead_kernels.cpu.cpu_states import CpuStates
from fairlead_kernels.interface import reference
from fairlead_kernels.interface.states import StatePlace, StateRows
from support.full import LONG_FORM
from support.kernel_sets import every_set
from support.state_cases import Row, StateCase, put_tensor, state_case, tensor_in

examples = settings(max_examples=200 if LONG_FORM else 20, deadline=None)
types = st.sampled_from([torch.float32, torch.bfloat16])
rows_of = st.lists(
    st.builds(
        lambda count, prompt, begins: Row(count, min(prompt, count), begins),
        *(st.integers(0, 40), st.integers(0, 40), st.booleans()),
    ),
    max_size=4,
)
seeds = st.integers(0, 2**31)
# Some are below the softplus of most time steps, some above.
bounds_of = st.sampled_from([(-math.inf, math.inf), (0.4, math.inf), (0.3, 0.9)])


def draw(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def drawn_ssd(
    count: int,
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype = torch.float32,
    *,
    optional: bool = True,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments for heads, their dim, groups and size: rows of a projection, so with gaps."""
    heads, dim, groups, size = sizes
    g = torch.Generator().manual_seed(seed)
    widths = [heads * dim, groups * size, groups * size, heads]
    x, b, c, dt = torch.split(draw(g, count, sum(widths), dtype=dtype), widths, dim=1)
    more = {"d": draw(g, heads), "bias": draw(g, heads)} if optional else {}
    return {
        "x": x.view(count, heads, dim),
        "dt": dt * 3,
        "a": -draw(g, heads).exp() / 3,
        "b": b.view(count, groups, size),
        "c": c.view(count, groups, size),
        "softplus": optional,
        **more,
    }


def drawn_selective(
    count: int,
    sizes: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    *,
    optional: bool = True,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments for channels and size; time steps lie channel after channel."""
    channels, size = sizes
    g = torch.Generator().manual_seed(seed)
    widths = [channels, size, size, channels]
    x, b, c, z = torch.split(draw(g, count, sum(widths), dtype=dtype), widths, dim=1)
    more = {"d": draw(g, channels), "bias": draw(g, channels), "z": z} if optional else {}
    return {
        "x": x,
        "dt": draw(g, channels, count, dtype=dtype).T,
        "a": -draw(g, channels, size).exp() / 3,
        "b": b,
        "c": c,
        "softplus": optional,
        **more,
    }


Scan = Callable[..., Tensor]


def compare(ours: Scan, theirs: Scan, case: StateCase, arguments: dict[str, Any]) -> None:
    """Both give the same within rounding, and keep the same in the pool."""
    if not arguments["softplus"]:
        arguments["dt"] = arguments["dt"].abs()  # or states grow without end
    want_case = case.again()
    want = theirs(**arguments, rows=want_case.rows, place=want_case.place)
    got = ours(**arguments, rows=case.rows, place=case.place)
    assert got.dtype is torch.float32
    close(got, want)
    for sequence in range(len(case.states)):
        close(case.behind(sequence), want_case.behind(sequence))
    # Nothing else has changed.
    for sequence in range(len(case.states)):
        for one in (case, want_case):
            put_tensor(one.place, one.rows.target[sequence], torch.zeros_like(case.states[0]))
    assert torch.equal(case.place.pool, want_case.place.pool)


def close(got: Tensor, want: Tensor) -> None:
    bound = 2e-5 * max(1.0, float(want.abs().max())) if want.numel() else 1.0
    torch.testing.assert_close(got, want, rtol=2e-5, atol=bound)


@every_set
@examples
@given(
    rows=rows_of,
    per_group=st.integers(1, 3),
    groups=st.integers(1, 3),
    dim=st.sampled_from([1, 5, 16, 33, 64]),
    size=st.sampled_from([1, 12, 16, 37, 128]),
    dtype=types,
    optional=st.booleans(),
    shared=st.booleans(),
    bounds=bounds_of,
    unit_bytes=st.sampled_from([64, 320, 1 << 16]),
    seed=seeds,
)
@example(  # a head's state is more than a task computes
    rows=[Row(3, 2, begins=False), Row(1, 0, begins=True)],
    per_group=2,
    groups=2,
    dim=70,
    size=128,
    dtype=torch.float32,
    optional=True,
    shared=False,
    bounds=(0.3, 0.9),
    unit_bytes=320,
    seed=0,
)
def test_mamba2_is_its_reference(
    instruction_set: str,
    rows: list[Row],
    per_group: int,
    groups: int,
    dim: int,
    size: int,
    dtype: torch.dtype,
    optional: bool,
    shared: bool,
    bounds: tuple[float, float],
    unit_bytes: int,
    seed: int,
) -> None:
    sizes = (heads := per_group * groups, dim, groups, size)
    case = state_case(
        rows, (heads, dim, size), unit_bytes=unit_bytes, shared=shared and bool(rows), seed=seed
    )
    count = sum(row.count for row in rows)
    arguments = drawn_ssd(count, sizes, dtype, optional=optional, seed=seed) | {"bounds": bounds}
    compare(ssd_of(instruction_set), reference.ssd, case, arguments)


@every_set
@examples
@given(
    rows=rows_of,
    channels=st.sampled_from([1, 7, 16, 64, 150]),
    size=st.sampled_from([1, 8, 16, 20]),
    dtype=types,
    optional=st.booleans(),
    shared=st.booleans(),
    unit_bytes=st.sampled_from([64, 320, 1 << 16]),
    seed=seeds,
)
def test_mamba1_is_its_reference(
    instruction_set: str,
    rows: list[Row],
    channels: int,
    size: int,
    dtype: torch.dtype,
    optional: bool,
    shared: bool,
    unit_bytes: int,
    seed: int,
) -> None:
    case = state_case(
        rows, (channels, size), unit_bytes=unit_bytes, shared=shared and bool(rows), seed=seed
    )
    count = sum(row.count for row in rows)
    arguments = drawn_selective(count, (channels, size), dtype, optional=optional, seed=seed)
    compare(selective_of(instruction_set), reference.selective_scan, case, arguments)


def ssd_of(instruction_set: str | None = None) -> Scan:
    return CpuStates(library.load(instruction_set)).ssd


def selective_of(instruction_set: str | None = None) -> Scan:
    return CpuStates(library.load(instruction_set)).selective_scan


@every_set
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mamba2_is_transformers_in_chunks_and_alone(
    instruction_set: str, dtype: torch.dtype
) -> None:
    dim, size = 24, 40
    case = state_case([Row(23, 23, begins=False), Row(1, 0, begins=False)], (4, dim, size))
    bounds = (0.3, 1.5)
    arguments = drawn_ssd(24, (4, dim, 2, size), dtype)
    got = ssd_of(instruction_set)(**arguments, bounds=bounds, rows=case.rows, place=case.place)
    x, dt, b, c = (arguments[name] for name in ("x", "dt", "b", "c"))
    a, d, bias = (arguments[name] for name in ("a", "d", "bias"))
    chunk, state = modeling_nemotron_h.mamba2_chunk_scan(
        *(x[None, :23], dt[None, :23], a, b[None, :23], c[None, :23], 16),
        D=d,
        dt_bias=bias,
        initial_states=case.states[:1],
        dt_softplus=True,
        dt_limit=bounds,
        return_final_states=True,
    )
    alone = case.states[1:].clone()
    single = modeling_nemotron_h.mamba2_selective_state_update(
        *(alone, x[23:], dt[23:, :, None].expand(-1, -1, dim)),
        a[:, None, None].expand(-1, dim, size),
        *(b[23:], c[23:], d[:, None].expand(-1, dim)),
        dt_bias=bias[:, None].expand(-1, dim),
        dt_softplus=True,
    )
    # Transformers rounds time steps to the type, and what it computes of a single token.
    within = 1e-4 if dtype is torch.float32 else 3e-2
    for mine, theirs in (
        (got[:23], chunk[0]),
        (got[23:], single.float()),
        (case.behind(0), state[0]),
        (case.behind(1), alone[0]),
    ):
        assert float((mine - theirs).abs().max() / theirs.abs().max()) < within


@every_set
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mamba1_is_transformers_from_the_beginning_and_alone(
    instruction_set: str, dtype: torch.dtype
) -> None:
    channels, size = 40, 16
    case = state_case([Row(23, 23, begins=True), Row(1, 0, begins=False)], (channels, size))
    arguments = drawn_selective(24, (channels, size), dtype)
    got = selective_of(instruction_set)(**arguments, rows=case.rows, place=case.place)
    x, dt, b, c, z = (arguments[name].T[None] for name in ("x", "dt", "b", "c", "z"))
    a, d, bias = (arguments[name] for name in ("a", "d", "bias"))
    first = slice(None, 23)
    chunk, state = modeling_jamba.mamba_selective_scan(
        *(x[..., first], dt[..., first], a, b[..., first], c[..., first], d, z[..., first]),
        delta_bias=bias,
        delta_softplus=True,
        return_last_state=True,
    )
    alone = case.states[1:].clone()
    single = modeling_jamba.mamba_selective_state_update(
        *(alone, x[..., 23], dt[..., 23], a, b[..., 23], c[..., 23], d),
        z=z[..., 23],
        dt_bias=bias,
        dt_softplus=True,
    )
    within = 1e-4 if dtype is torch.float32 else 3e-2
    for mine, theirs in (
        (got[:23], chunk[0].T.float()),
        (got[23:], single.float()),
        (case.behind(0), state[0].float()),
        (case.behind(1), alone[0]),
    ):
        assert float((mine - theirs).abs().max() / theirs.abs().max()) < within


@every_set
@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
@settings(max_examples=60 if LONG_FORM else 10, deadline=None)
@given(
    chunks=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    others=st.lists(st.integers(0, 30), max_size=3),
    prompt=st.integers(0, 160),
    dtype=types,
    seed=seeds,
)
def test_results_depend_on_no_chunk_neighbour_or_thread(
    kind: str,
    instruction_set: str,
    chunks: list[int],
    others: list[int],
    prompt: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """To the bit: of a sequence at once, and in pieces beside others, whose inputs are NaN."""
    count = sum(chunks)
    settings_: dict[str, Any] = {}
    shape: tuple[int, ...] = (3, 33, 20)
    if kind == "mamba2":
        scan = ssd_of(instruction_set)
        arguments = drawn_ssd(count, (3, 33, 1, 20), dtype, seed=seed)
        settings_ = {"bounds": (0.3, 0.9)}
    else:
        shape, scan = (150, 10), selective_of(instruction_set)
        arguments = drawn_selective(count, (150, 10), dtype, seed=seed)
    whole = state_case([Row(count, min(prompt, count), begins=True)], shape)
    want = scan(**arguments, **settings_, rows=whole.rows, place=whole.place)
    packed = {"x", "dt", "b", "c", "z"} & arguments.keys()
    state = torch.zeros(shape)
    begin = 0
    for number, size in enumerate(chunks):
        before = others[: number % 2 + 1]
        beside = [Row(other, other // 2, begins=False) for other in others]
        mine = Row(size, max(0, min(prompt - begin, size)), begins=begin == 0)
        case = state_case([*beside[: len(before)], mine, *beside[len(before) :]], shape)
        at, first = len(before), sum(before)
        put_tensor(case.place, case.rows.source[at], state if begin else state + math.nan)
        inputs = dict(arguments)
        for name in packed:
            own = arguments[name][begin : begin + size]
            ends = [own.new_full((n, *own.shape[1:]), math.nan) for n in (first, sum(others))]
            inputs[name] = torch.cat([ends[0], own, ends[1][first:]])
        torch.set_num_threads(1 + number % 2)
        got = scan(**inputs, **settings_, rows=case.rows, place=case.place)
        same(got[first : first + size], want[begin : begin + size])
        state, begin = case.behind(at), begin + size
    torch.set_num_threads(2)
    same(state, whole.behind(0))


def same(one: Tensor, other: Tensor) -> None:
    assert torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


@every_set
def test_time_steps_of_any_size_are_those_of_torch(instruction_set: str) -> None:
    """With an x and b of 1 and no decay the state is the time step."""
    dt = torch.cat([torch.linspace(-100, 100, 401), torch.logspace(-6, 0, 40)])[:, None]
    ones = torch.ones(len(dt), 1)
    rows = [Row(1, 0, begins=True)] * len(dt)
    case = state_case(rows, (1, 1))
    got = selective_of(instruction_set)(
        x=ones,
        dt=dt,
        a=torch.zeros(1, 1),
        b=ones,
        c=ones,
        softplus=True,
        rows=case.rows,
        place=case.place,
    )
    want = torch.nn.functional.softplus(dt.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 4, 6, dtype=torch.float64)}, "x: torch.float64"),
        ({"x": torch.zeros(3, 6, 4).transpose(1, 2)}, "x: a token's elements"),
        ({"dt": torch.zeros(3, 3)}, r"dt: \(3, 3\) of"),
        ({"b": torch.zeros(3, 3, 5), "c": torch.zeros(3, 3, 5)}, "b: 4 heads cannot"),
        ({"c": torch.zeros(3, 2, 6)}, r"c: \(3, 2, 6\)"),
        ({"a": torch.zeros(5)}, "a: .* vector of 4"),
        ({"d": torch.zeros(4, dtype=torch.bfloat16)}, "d: .* vector of 4"),
    ],
)
def test_tensors_that_mamba2_cannot_take_are_refused(
    change: dict[str, Tensor], message: str
) -> None:
    case = state_case([Row(3, 0, begins=True)], (4, 6, 5))
    arguments = drawn_ssd(3, (4, 6, 2, 5)) | change
    with pytest.raises(ValueError, match=message):
        ssd_of()(**arguments, rows=case.rows, place=case.place)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"z": torch.zeros(3, 5)}, r"z: \(3, 5\)"),
        ({"dt": torch.zeros(3, 4, dtype=torch.bfloat16)}, "dt: .* of torch.bfloat16"),
        ({"b": torch.zeros(2, 5)}, r"b: \(2, 5\)"),
        ({"a": torch.zeros(5, 4)}, r"a: \(5, 4\) of"),
        ({"bias": torch.zeros(3)}, "bias: .* vector of 4"),
    ],
)
def test_tensors_that_mamba1_cannot_take_are_refused(
    change: dict[str, Tensor], message: str
) -> None:
    case = state_case([Row(3, 0, begins=True)], (4, 5))
    arguments = drawn_selective(3, (4, 5)) | change
    with pytest.raises(ValueError, match=message):
        selective_of()(**arguments, rows=case.rows, place=case.place)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda rows: replace(rows, starts=rows.starts.int()), "starts: .*int32"),
        (lambda rows: replace(rows, begins=rows.begins[:0]), "begins: "),
        (lambda rows: replace(rows, target=rows.target.T), "target: "),
        (lambda rows: replace(rows, starts=rows.starts + 1), "starts: .* of 3 tokens"),
    ],
)
def test_rows_that_are_not_as_they_should_be_are_refused(
    changed: Callable[[StateRows], StateRows], message: str
) -> None:
    case = state_case([Row(3, 0, begins=True)], (4, 5))
    rows = changed(case.rows)
    with pytest.raises(ValueError, match=message):
        selective_of()(**drawn_selective(3, (4, 5)), rows=rows, place=case.place)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda place: replace(place, offset=place.offset + 4), "offset: .* of 64"),
        (lambda place: replace(place, offset=1 << 20), "source: .* units of"),
        (lambda place: replace(place, pool=place.pool.view(torch.int64)), "pool: "),
    ],
)
def test_a_place_that_holds_no_such_state_is_refused(
    changed: Callable[[StatePlace], StatePlace], message: str
) -> None:
    case = state_case([Row(3, 0, begins=True)], (4, 5))
    place = changed(case.place)
    with pytest.raises(ValueError, match=message):
        selective_of()(**drawn_selective(3, (4, 5)), rows=case.rows, place=place)


def test_a_state_that_is_put_somewhere_is_read_from_there() -> None:
    """The cases' own reading, over the ends of units."""
    case = state_case([Row(1, 0, begins=False)], (7, 21), unit_bytes=64)
    assert torch.equal(tensor_in(case.place, case.rows.source[0], case.states[0]), case.states[0])
    assert not case.behind(0).isfinite().any()
