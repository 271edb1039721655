"""Paged attention in C++ against its definition, on each instruction set."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fairlead_kernels.cpu import library
from fairlead_kernels.cpu.cpu_attention import CpuAttention, sizes_of
from fairlead_kernels.interface import reference
from fairlead_kernels.interface.attention import AttentionBackend, Heads, LayerSpec
from support.attention_cases import Case, in_places, make_case
from support.full import LONG_FORM
from support.kernel_sets import every_set


def attend(
    instruction_set: str, case: Case, spec: LayerSpec, *, fixed: bool = False
) -> torch.Tensor:
    backend = CpuAttention(case.heads, library.load(instruction_set), fixed=fixed)
    checked: AttentionBackend = backend  # mypy checks the interface here
    plan = checked.plan(case.ragged)
    return checked.run(plan, case.query, case.key_cache, case.value_cache, spec)


def check(instruction_set: str, case: Case, spec: LayerSpec, *, fixed: bool = False) -> None:
    got = attend(instruction_set, case, spec, fixed=fixed)
    want = reference.attend(case.ragged, case.query, case.key_cache, case.value_cache, spec)
    assert got.dtype is case.query.dtype
    half = case.heads.dtype is torch.bfloat16
    atol, rtol = (2e-2, 2e-2) if half else (4e-6, 1e-5)
    torch.testing.assert_close(got, want, atol=atol, rtol=rtol)


@dataclass(frozen=True)
class Task:
    """As in csrc/attention.h."""

    row: int
    kv_head: int
    first: int
    count: int
    part: int
    parts: int
    rows: int


def tasks_of(
    instruction_set: str, case: Case, *, fixed: bool = False
) -> tuple[list[Task], list[Task]]:
    """The tasks and merges of a step on these heads."""
    plan = CpuAttention(case.heads, library.load(instruction_set), fixed=fixed).plan(case.ragged)
    cut = plan.cut(sizes_of(case.heads))
    listed = [Task(*numbers) for numbers in cut.tasks.tolist()]
    return listed[: cut.rows.task_count], listed[cut.rows.task_count :]


def sharers(tasks: list[Task]) -> list[tuple[int, int, int]]:
    """(first row, rows, keys) of the rows that share keys."""
    keys: Counter[tuple[int, int]] = Counter()
    for task in tasks:
        if task.rows and task.kv_head == 0:
            keys[task.row, task.rows] += task.count
    return [(row, rows, count) for (row, rows), count in keys.items()]


# A decode whose keys and values fill no whole vectors.
ODD: dict[str, Any] = {
    "rows": [(70, 1), (0, 3)],
    "block_size": 4,
    "window": None,
    "group": 3,
    "kv": 2,
    "dim": 23,
    "value_dim": 9,
    "dtype": torch.float32,
    "softcap": None,
    "sinks": False,
    "fixed": False,
    "seed": 0,
}

row = st.one_of(
    st.tuples(st.integers(0, 200), st.just(1)), st.tuples(st.integers(0, 90), st.integers(1, 90))
)


@every_set
@settings(max_examples=300 if LONG_FORM else 30, deadline=None)
@given(
    rows=st.lists(row, min_size=1, max_size=5),
    block_size=st.sampled_from([1, 4, 16, 20]),
    window=st.one_of(st.none(), st.integers(1, 150)),
    group=st.integers(1, 10),
    kv=st.integers(1, 3),
    dim=st.one_of(st.sampled_from([8, 16, 48, 64, 80]), st.integers(1, 70)),
    value_dim=st.one_of(st.none(), st.integers(1, 70)),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16]),
    softcap=st.sampled_from([None, None, 2.0, 30.0]),
    sinks=st.booleans(),
    fixed=st.booleans(),
    seed=st.integers(0, 2**31),
)
@example(**ODD)
def test_any_step_is_attended_as_defined(
    instruction_set: str,
    rows: list[tuple[int, int]],
    block_size: int,
    window: int | None,
    group: int,
    kv: int,
    dim: int,
    value_dim: int | None,
    dtype: torch.dtype,
    softcap: float | None,
    sinks: bool,
    fixed: bool,
    seed: int,
) -> None:
    heads = Heads(group * kv, kv, dim, value_dim or dim, dtype)
    case = make_case(rows, block_size=block_size, window=window, heads=heads, seed=seed)
    learned = 2 * torch.randn(heads.query) if sinks else None
    check(instruction_set, case, LayerSpec(0.3, window, softcap, learned), fixed=fixed)


@every_set
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1500])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_decode_over_many_keys_is_cut_into_parts_and_merged(
    instruction_set: str,
    dtype: torch.dtype,
    window: int | None,
    sinks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    heads = Heads(6, 2, 24, 24, dtype)
    case = make_case([(2100, 1), (5, 1), (700, 1)], block_size=16, window=window, heads=heads)
    tasks, merges = tasks_of(instruction_set, case)
    parts = [3, 1, 1] if window is None else [4, 1, 2]
    assert Counter(task.row for task in tasks) == dict(enumerate(parts))
    assert [merge.parts for merge in merges] == [count for count in parts if count > 1]
    cover_each_key_once(case, tasks, merges)
    check(instruction_set, case, LayerSpec(0.3, window, None, torch.ones(6) if sinks else None))


LARGE = Heads(12, 12, 64, 64, torch.float32)
SMALL = Heads(6, 2, 32, 32, torch.float32)


@pytest.mark.parametrize(
    ("threads", "heads", "keys", "parts"),
    [
        pytest.param(2, LARGE, [250], [2], id="one decode"),
        pytest.param(2, LARGE, [200] * 3, [2, 2, 2], id="three decodes on two threads"),
        pytest.param(2, LARGE, [300, 200, 100], [1, 1, 1], id="decodes that are even"),
        pytest.param(2, LARGE, [900, 100, 100], [2, 1, 1], id="a long one"),
        pytest.param(2, LARGE, [600] * 4, [1] * 4, id="as many as threads need"),
        pytest.param(8, LARGE, [1000] * 3, [8, 8, 8], id="fewer than threads"),
        pytest.param(2, SMALL, [120], [1], id="too few keys to merge"),
        pytest.param(2, SMALL, [400], [2], id="enough keys to merge"),
        pytest.param(1, LARGE, [2000] * 2, [1, 1], id="one thread"),
        pytest.param(2, LARGE, [150] * 64, [1] * 64, id="many decodes"),
        pytest.param(2, LARGE, [6000, *[150] * 64], [4, *[1] * 64], id="many and a long one"),
    ],
)
def test_decodes_are_cut_where_threads_are_done_sooner(
    threads: int,
    heads: Heads,
    keys: list[int],
    parts: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    case = make_case([(count - 1, 1) for count in keys], block_size=16, heads=heads)
    tasks, merges = tasks_of("baseline", case)
    found = Counter(task.row for task in tasks)
    assert [found[row] for row in range(len(keys))] == parts
    cover_each_key_once(case, tasks, merges)


@every_set
@settings(max_examples=300 if LONG_FORM else 30, deadline=None)
@given(
    families=st.lists(
        st.tuples(
            st.integers(1, 9),
            st.integers(0, 400),
            st.one_of(st.integers(0, 120), st.just(700)),
        ),
        min_size=1,
        max_size=3,
    ),
    prefill=st.sampled_from([0, 0, 5]),
    block_size=st.sampled_from([1, 16, 20]),
    window=st.sampled_from([None, None, 200, 450]),
    group=st.sampled_from([1, 3, 8, 24, 100]),
    kv=st.integers(1, 3),
    dim=st.sampled_from([8, 20, 64]),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16]),
    extras=st.booleans(),
    fixed=st.sampled_from([False, False, False, True]),
    seed=st.integers(0, 2**31),
)
def test_decodes_whose_keys_begin_with_the_same_blocks_are_attended_as_defined(
    instruction_set: str,
    families: list[tuple[int, int, int]],
    prefill: int,
    block_size: int,
    window: int | None,
    group: int,
    kv: int,
    dim: int,
    dtype: torch.dtype,
    extras: bool,
    fixed: bool,
    seed: int,
) -> None:
    """Families of rows that share tokens: (rows, shared tokens, tokens of the last row's own)."""
    rows: list[tuple[int, int]] = []
    shared: dict[int, tuple[int, int]] = {}
    for number, tokens, own in families:
        first = len(rows)
        rows += [(tokens + own * (i + 1) // number, 1) for i in range(number)]
        shared |= dict.fromkeys(range(first + 1, len(rows)), (first, tokens // block_size))
        if prefill:
            rows.append((3, prefill))
    heads = Heads(group * kv, kv, dim, dim + 4, dtype)
    case = make_case(
        rows, block_size=block_size, window=window, heads=heads, seed=seed, shared=shared
    )
    extra = (5.0, torch.randn(heads.query)) if extras else (None, None)
    check(instruction_set, case, LayerSpec(0.3, window, *extra), fixed=fixed)
    tasks, merges = tasks_of(instruction_set, case, fixed=fixed)
    cover_each_key_once(case, tasks, merges)


def cover_each_key_once(case: Case, tasks: list[Task], merges: list[Task]) -> None:
    """Decodes' tasks read each key of each row and head once, no part is written twice, and a merge
    takes all parts of its row.
    """
    read: Counter[tuple[int, int, int]] = Counter()
    written: dict[int, set[tuple[int, int]]] = {}  # (row, head) by part
    decodes = [task for task in tasks if task.rows or task.kv_head < 0]
    for task in decodes:
        for i in range(max(task.rows, 1)):
            heads = [task.kv_head] if task.rows else range(case.heads.kv)
            for head in heads:
                read.update(
                    (task.row + i, head, k) for k in range(task.first, task.first + task.count)
                )
                if task.part >= 0:
                    places = written.setdefault(task.part + i * task.parts, set())
                    assert (task.row + i, head) not in places
                    places.add((task.row + i, head))
    starts, window = case.ragged.query_starts.tolist(), case.ragged.window
    single = {row for row, _, _ in read}
    assert single <= {row for row in range(len(starts) - 1) if starts[row + 1] - starts[row] == 1}
    for row, length in enumerate(case.ragged.kv_lens.tolist()):
        if row in single:
            begin = 0 if window is None else max(0, length - window)
            for head in range(case.heads.kv):
                assert all(read.pop((row, head, key)) == 1 for key in range(begin, length))
    assert not read
    for merge in merges:
        for part in range(merge.part, merge.part + merge.parts):
            assert written.pop(part) == {(merge.row, head) for head in range(case.heads.kv)}
    assert not written


@every_set
def test_decodes_share_what_reads_the_fewest_keys(instruction_set: str) -> None:
    """Two families side by side, with a row between them that has little in common with either."""
    rows = [(330, 1)] * 4 + [(130, 1)] + [(520, 1)] * 5
    shared = dict.fromkeys(range(1, 4), (0, 20)) | dict.fromkeys(range(6, 10), (5, 32))
    case = make_case(rows, block_size=16, shared=shared)
    tasks, _ = tasks_of(instruction_set, case)
    assert sharers(tasks) == [(0, 4, 320), (5, 5, 512)]
    shared[4] = (0, 8)  # 128 of its keys: it would leave 192 to each of the four
    case = make_case(rows, block_size=16, shared=shared)
    tasks, _ = tasks_of(instruction_set, case)
    assert sharers(tasks) == [(0, 4, 320), (5, 5, 512)]
    check(instruction_set, case, LayerSpec(scale=0.3))


@every_set
@pytest.mark.parametrize(
    ("rows", "blocks", "found"),
    [
        pytest.param(3, 8, [(0, 3, 128)], id="the fewest rows and keys"),
        pytest.param(2, 8, [], id="two rows"),
        pytest.param(3, 7, [], id="fewer keys"),
        # A task has at most 192 queries of a head: 96 rows of a group of two.
        pytest.param(100, 8, [(0, 96, 128), (96, 4, 128)], id="more rows than a task takes"),
    ],
)
def test_rows_share_where_it_helps(
    instruction_set: str, rows: int, blocks: int, found: list[tuple[int, int, int]]
) -> None:
    shared = dict.fromkeys(range(1, rows), (0, blocks))
    case = make_case([(159, 1)] * rows, block_size=16, shared=shared)
    tasks, _ = tasks_of(instruction_set, case)
    assert sharers(tasks) == found
    check(instruction_set, case, LayerSpec(scale=0.3))


@every_set
def test_keys_that_a_row_has_not_yet_are_none_that_it_shares(instruction_set: str) -> None:
    """Behind its row's last block a table holds anything: here the blocks of the others."""
    case = make_case([(249, 1), (249, 1), (159, 1), (159, 1)], block_size=16)
    case.ragged.tables[:] = case.ragged.tables[0]
    tasks, _ = tasks_of(instruction_set, case)
    assert sharers(tasks) == [(0, 4, 144)]
    check(instruction_set, case, LayerSpec(scale=0.3))


@every_set
def test_rows_that_share_have_different_numbers_of_parts(
    instruction_set: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one has the most, of which the last one's would leave no room for all."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    shared = dict.fromkeys((1, 2), (0, 12))
    rows = [(900, 1), (200, 1), (200, 1)]
    case = make_case(rows, block_size=16, heads=LARGE, shared=shared)
    tasks, merges = tasks_of(instruction_set, case)
    assert [merge.parts for merge in merges] == [3, 2, 2]
    cover_each_key_once(case, tasks, merges)
    check(instruction_set, case, LayerSpec(scale=0.3))


@every_set
def test_rows_whose_window_has_passed_a_block_share_none(instruction_set: str) -> None:
    rows = [(199, 1)] * 12 + [(260, 1)] + [(199, 1)] * 2
    shared = dict.fromkeys(range(1, 15), (0, 12))
    case = make_case(rows, block_size=16, window=200, shared=shared)
    tasks, _ = tasks_of(instruction_set, case)
    assert sharers(tasks) == [(0, 12, 192)]
    check(instruction_set, case, LayerSpec(0.3, 200))


@every_set
def test_with_one_order_of_sums_no_rows_share(instruction_set: str) -> None:
    case = make_case([(200, 1)] * 4, block_size=16, shared=dict.fromkeys((1, 2, 3), (0, 12)))
    tasks, merges = tasks_of(instruction_set, case, fixed=True)
    assert not sharers(tasks)
    assert not merges


@every_set
def test_a_prefill_is_cut_so_that_its_tasks_cover_each_query_of_each_head_once(
    instruction_set: str,
) -> None:
    heads = Heads(6, 2, 8, 8, torch.float32)
    case = make_case([(3, 130), (0, 1), (7, 43)], heads=heads)
    tasks, _ = tasks_of(instruction_set, case)
    covered = [
        (task.row, task.kv_head, query)
        for task in tasks
        if task.kv_head >= 0
        for query in range(task.first, task.first + task.count)
    ]
    assert sorted(covered) == [
        (row, head, query)
        for row, count in ((0, 130), (2, 43))
        for head in range(2)
        for query in range(count)
    ]
    check(instruction_set, case, LayerSpec(0.3))


@every_set
def test_tiles_before_a_querys_window_count_nothing_for_it(instruction_set: str) -> None:
    case = make_case([(40, 180)], window=8, heads=Heads(1, 1, 16, 16, torch.float32))
    assert len(tasks_of(instruction_set, case)[0]) == 1
    check(instruction_set, case, LayerSpec(0.3, 8))


@every_set
@pytest.mark.parametrize("rows", [[(90, 1)], [(30, 61)]])
def test_scores_beyond_the_exponentials_range_are_attended_as_defined(
    instruction_set: str, rows: list[tuple[int, int]]
) -> None:
    case = make_case(rows, heads=Heads(4, 2, 16, 16, torch.float32))
    case.query.mul_(300)
    spec = LayerSpec(scale=1.0)
    got = attend(instruction_set, case, spec)
    want = reference.attend(case.ragged, case.query, case.key_cache, case.value_cache, spec)
    # The scores are some thousands, and rounded.
    torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3)


@every_set
def test_queries_inside_a_packed_product_are_read_in_place(instruction_set: str) -> None:
    case = make_case([(0, 7), (12, 1), (3, 1)], heads=Heads(4, 2, 8, 8, torch.float32))
    wide = torch.randn(case.query.shape[0], 8, 8)
    wide[:, :4] = case.query
    want = attend(instruction_set, case, LayerSpec(scale=0.3))
    case.query = wide[:, :4]
    assert torch.equal(attend(instruction_set, case, LayerSpec(scale=0.3)), want)


@every_set
@settings(max_examples=200 if LONG_FORM else 25, deadline=None)
@given(
    rows=st.lists(row, min_size=1, max_size=4),
    block_size=st.sampled_from([1, 4, 16, 20]),
    window=st.one_of(st.none(), st.integers(1, 150)),
    group=st.sampled_from([1, 3, 8]),
    kv=st.integers(1, 3),
    dim=st.sampled_from([1, 8, 20, 64]),
    value_dim=st.sampled_from([5, 8, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
    fixed=st.booleans(),
    places=st.tuples(st.integers(0, 40), st.integers(0, 40), st.booleans()),
    seed=st.integers(0, 2**31),
)
def test_keys_in_places_of_a_token_are_attended_as_those_in_tensors_of_their_own(
    instruction_set: str,
    rows: list[tuple[int, int]],
    block_size: int,
    window: int | None,
    group: int,
    kv: int,
    dim: int,
    value_dim: int,
    dtype: torch.dtype,
    softcap: float | None,
    sinks: bool,
    fixed: bool,
    places: tuple[int, int, bool],
    seed: int,
) -> None:
    """As the definition has it, and to the bit as in other places; what lies between is NaN."""
    heads = Heads(group * kv, kv, dim, value_dim, dtype)
    case = make_case(rows, block_size=block_size, window=window, heads=heads, seed=seed)
    spec = LayerSpec(0.3, window, softcap, torch.randn(heads.query) if sinks else None)
    alone = attend(instruction_set, case, spec, fixed=fixed)
    case.key_cache, case.value_cache = in_places(case.key_cache, case.value_cache, *places)
    check(instruction_set, case, spec, fixed=fixed)
    assert torch.equal(attend(instruction_set, case, spec, fixed=fixed), alone)


@every_set
def test_layers_with_heads_of_several_sizes_attend_by_one_plan(instruction_set: str) -> None:
    """As queries, keys and values come, whatever heads the backend was made with."""
    functions = library.load(instruction_set)
    shapes = [(6, 2, 24, 24), (6, 1, 40, 24), (2, 2, 8, 16), (6, 2, 24, 24), (3, 1, 24, 24)]
    rows, shared = [(200, 1)] * 4 + [(2100, 1), (0, 70)], dict.fromkeys((1, 2, 3), (0, 12))
    backend, plan = CpuAttention(Heads(6, 2, 24, 24, torch.float32), functions), None
    for query, kv, dim, value_dim in shapes:
        heads = Heads(query, kv, dim, value_dim, torch.float32)
        case = make_case(rows, block_size=16, heads=heads, shared=shared)
        plan = plan or backend.plan(case.ragged)
        spec = LayerSpec(0.3)
        got = backend.run(plan, case.query, case.key_cache, case.value_cache, spec)
        want = reference.attend(case.ragged, case.query, case.key_cache, case.value_cache, spec)
        torch.testing.assert_close(got, want, atol=4e-6, rtol=1e-5)


@every_set
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(lambda x: x[..., ::2], id="elements apart"),
        pytest.param(lambda x: x[:, :, ::2], id="heads apart"),
        pytest.param(lambda x: x[:, :2], id="other distances between blocks"),
        pytest.param(lambda x: x.transpose(1, 2), id="by head"),
    ],
)
def test_slots_that_are_not_equally_far_apart_are_refused(
    instruction_set: str, layout: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    case = make_case([(5, 1)], heads=Heads(4, 4, 8, 8, torch.float32))
    case.value_cache = layout(case.value_cache)
    with pytest.raises(ValueError, match=r"^value_cache: strides .* equally far apart"):
        attend(instruction_set, case, LayerSpec(scale=0.3))


@every_set
def test_a_plan_for_another_window_is_refused(instruction_set: str) -> None:
    case = make_case([(5, 1)], window=3)
    with pytest.raises(ValueError, match=r"^window: the layer has None"):
        attend(instruction_set, case, LayerSpec(scale=0.3))
