"""The block map shows every unit once, in the state that it has, and copies what it shows."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fairlead_runtime.engine import cache_map
from fairlead_runtime.engine.cache_map import HOLDERS, CacheCopy
from fairlead_runtime.engine.engine import Engine
from fairlead_runtime.outputs import WHOLE_CACHE, BlockState, CacheView
from fairlead_runtime.request.sequence import Request
from fairlead_runtime.sizing.groups import LayerGroup
from support.fake_engine import FULL, MIXED, request, rig, run


def copy(engine: Engine, start: int = 0) -> CacheCopy:
    copies: list[CacheCopy | None] = []
    engine.copy_cache(start, copies.append)
    engine.step()
    assert copies[0] is not None
    return copies[0]


def states(view: CacheView) -> list[tuple[str, int, frozenset[str]]]:
    """State, references and requests of each unit of the map."""
    units: list[tuple[str, int, frozenset[str]]] = []
    for run_ in view.blocks:
        assert run_.first == view.start + len(units), "the runs follow each other without a gap"
        named = frozenset(view.requests[number] for number in run_.requests)
        units += [(run_.state, run_.references, named)] * run_.count
    assert view.start + len(units) == view.end
    return units


def same_prompt(name: str, **params: Any) -> Request:
    return replace(request("same", prompt=20, max_tokens=40, **params), id=name)


@pytest.mark.parametrize("groups", [FULL, MIXED])
def test_every_unit_is_in_one_state_and_the_counts_agree(groups: Sequence[LayerGroup]) -> None:
    engine = rig(groups=groups)
    engine.submit(request("done", prompt=9, max_tokens=2))
    run(engine)
    engine.submit(request("a", max_tokens=50))
    engine.submit(request("b", n=2, max_tokens=50))
    for _ in range(9):
        engine.step()
    view = CacheCopy.of(engine._scheduler, 0).view()
    stats = engine.snapshot().scheduler
    assert (view.units, view.groups, view.end) == (64 * len(groups), len(groups), view.units)
    assert (view.free, view.cached) == (stats.free, stats.cached)
    counted = Counter(state for state, _, _ in states(view))
    assert counted == {"free": stats.free, "cached": stats.cached, "held": stats.used}
    assert stats.cached
    for name in "ab":
        held = {
            unit
            for sequence in engine._scheduler.live()
            if sequence.request.id == name
            for table in sequence.tables
            for unit in table
            if unit >= 0
        }
        assert held == {unit for unit, (_, _, named) in enumerate(states(view)) if name in named}


def test_a_shared_block_names_its_requests_and_counts_all_who_hold_it() -> None:
    engine = rig(max_requests=16, max_batch_tokens=256, num_blocks=256)
    engine.submit(same_prompt("first"))
    engine.step()
    for number in range(HOLDERS):
        engine.submit(same_prompt(f"later{number}", n=2))
    for _ in range(6):
        engine.step()
    view = copy(engine).view()
    shared = [unit for unit in states(view) if unit[1] > 2]
    assert {references for _, references, _ in shared} == {1 + 2 * HOLDERS}
    assert all(len(named) == HOLDERS and "first" in named for _, _, named in shared)
    assert len(shared) == 4, "the full blocks of the prompt, whose last token is always computed"


def test_a_cell_names_requests_of_every_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = rig(max_requests=16, max_batch_tokens=256, num_blocks=256)
    names = [f"theirs{number}" for number in range(HOLDERS + 2)]
    for name in names:
        engine.submit(replace(request(name), tenant="theirs"))
    engine.submit(replace(request("ours"), tenant="ours"))
    for _ in range(3):
        engine.step()
    monkeypatch.setattr(cache_map, "WINDOW", 1)
    (run_,) = (view := copy(engine, WHOLE_CACHE).view()).blocks
    named = {view.requests[number] for number in run_.requests}
    assert "ours" in named
    assert len(named & {*names}) == HOLDERS


def test_what_nobody_holds_any_more_is_cached_until_it_is_evicted() -> None:
    engine = rig()
    engine.submit(request("a", prompt=16, max_tokens=1))
    run(engine)
    assert states(copy(engine).view()) == [
        *[(BlockState.CACHED, 0, frozenset())] * 4,
        *[(BlockState.FREE, 0, frozenset())] * 60,
    ]


def test_a_map_has_a_bounded_part_of_the_units(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = rig()
    engine.submit(request("a", prompt=40, max_tokens=50))
    for _ in range(3):
        engine.step()
    whole = states(copy(engine).view())
    monkeypatch.setattr(cache_map, "WINDOW", 24)
    parts = [copy(engine, start).view() for start in (0, 24, 48, 64)]
    assert [(part.start, part.end) for part in parts] == [(0, 24), (24, 48), (48, 64), (64, 64)]
    assert [unit for part in parts for unit in states(part)] == whole
    assert {part.units for part in parts} == {64}


@pytest.mark.parametrize("window", [64, 63, 20, 3])
def test_the_map_of_the_whole_cache_has_bounded_cells_that_hide_nothing(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = rig()
    engine.submit(request("done", prompt=30, max_tokens=1))
    run(engine)
    engine.submit(same_prompt("a", n=2))
    engine.submit(same_prompt("b"))
    for _ in range(4):
        engine.step()
    units = states(copy(engine).view())
    assert {state for state, _, _ in units} == {"free", "cached", "held"}
    monkeypatch.setattr(cache_map, "WINDOW", window)
    whole = copy(engine, WHOLE_CACHE).view()
    assert (whole.start, whole.end, whole.per_cell) == (0, 64, -(-64 // window))
    shown = states(whole)
    for at in range(0, 64, whole.per_cell):
        of = units[at : at + whole.per_cell]
        found = {state for state, _, _ in of}
        state = next(state for state in ("held", "cached", "free") if state in found)
        names = frozenset(name for _, _, named in of for name in named)
        assert shown[at] == (state, max(references for _, references, _ in of), names)
        assert set(shown[at : at + whole.per_cell]) == {shown[at]}


def test_a_copy_is_not_changed_by_later_steps() -> None:
    engine = rig()
    engine.submit(request("a", prompt=16, max_tokens=30))
    engine.step()
    engine.step()
    copied = copy(engine)
    before = copied.view()
    run(engine)
    assert copied.view() == before
    assert copy(engine).view() != before


def test_blocks_in_host_memory_are_counted() -> None:
    engine = rig(num_blocks=12, max_model_len=48, safety_margin=0.0, offload_units=40)
    for name in "abc":
        engine.submit(request(name, prompt=8, max_tokens=24))
    taken: set[int] = set()
    while not engine.idle or not taken:
        engine.step()
        view = CacheCopy.of(engine._scheduler, 0).view()
        assert view.host_units == 40
        taken.add(view.host_units - view.host_free)
    assert min(taken) == 0 < max(taken)
