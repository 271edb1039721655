"""States of sequences, step by step: which versions steps read and write, where chunks end, and
what a snapshot, a preemption and a start take of the pool.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest

from fairlead_runtime.request.sequence import Request, SamplingParams, Sequence
from fairlead_runtime.scheduling.admission import most_needed
from fairlead_runtime.scheduling.invariants import InvariantViolation
from fairlead_runtime.scheduling.plan import Limits, Result, Work
from fairlead_runtime.scheduling.scheduler import Scheduler
from fairlead_runtime.sizing.groups import NO_KEYS, group_layers

LIMITS = Limits("fifo", 64, 8, 0.0, 4, 100, 400, state_units=3, cache_tokens=400)
KEYS = group_layers([None, None], sources=[0, NO_KEYS])


def scheduler(keys: bool = True, **limits: Any) -> Scheduler:
    return Scheduler(dataclasses.replace(LIMITS, **limits), KEYS if keys else ())


def request(name: str, prompt: Iterable[int], output: int, n: int = 1) -> Request:
    params = SamplingParams(max_tokens=output, n=n, ignore_eos=True)
    return Request(name, tuple(prompt), params, output)


def step(s: Scheduler, token: int = 7) -> Work:
    work = s.commit(s.plan())
    s.update(work, {row.sequence.id: Result(token) for row in work.rows if row.samples})
    s.check()
    return work


def finish(s: Scheduler) -> None:
    while s.has_work:
        step(s)


def rows(work: Work) -> list[tuple[int, int]]:
    return [(row.start, row.start + row.count) for row in work.rows]


@pytest.mark.parametrize("keys", [True, False])
def test_a_step_reads_what_the_last_one_wrote_and_writes_elsewhere(keys: bool) -> None:
    s = scheduler(keys, allow_block_sharing=False)
    (sequence,) = s.add(request("a", range(6), 9))
    written: list[int] = []
    while s.has_work:
        work = s.commit(s.plan())
        source, target = sequence.state_source(), sequence.state_target()
        assert len({*source, *target}) == 6
        assert not written or source == written
        written = target
        s.update(work, {sequence.id: Result(1)})
        s.check()
    assert s.stats().used == 0


@pytest.mark.parametrize(
    ("length", "budget", "ends"),
    [
        (4, 64, [4]),
        (5, 64, [4, 5]),
        (8, 64, [4, 8]),
        (30, 64, [28, 30]),
        (30, 13, [12, 24, 28, 30]),
        (11, 3, [3, 6, 8, 11]),
        (3, 64, [3]),
        (40, 7, [7, 14, 20, 27, 34, 36, 40]),
        (40, 9, [8, 16, 24, 32, 36, 40]),
    ],
)
def test_chunks_of_a_prompt_end_where_others_find_its_state(
    length: int, budget: int, ends: list[int]
) -> None:
    s = scheduler(max_batch_tokens=budget)
    s.add(request("a", range(length), 1))
    found = []
    while s.has_work:
        found += [end for _, end in rows(step(s))]
    assert found == ends
    s = scheduler(max_batch_tokens=budget, allow_block_sharing=False)
    s.add(request("a", range(length), 1))
    assert rows(step(s)) == [(0, min(length, budget))], "nobody looks for one"


@pytest.mark.parametrize("keys", [True, False])
def test_a_prompt_that_comes_again_goes_on_from_the_last_snapshot(keys: bool) -> None:
    s = scheduler(keys)
    s.add(request("a", range(10), 2))
    while s.has_work:
        step(s)
    s.add(request("b", [*range(10), 50, 51], 2))
    assert rows(step(s)) == [(8, 12)]
    s.add(request("c", [*range(9), 60], 2))
    assert (8, 10) in rows(step(s))
    s.add(request("d", [*range(5), 70], 2))
    assert (0, 4) in rows(step(s)), "its blocks are there, and no state at their end"


@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize("chunk", [64, 5])
def test_where_answers_have_another_state_than_prompts_only_prompts_are_found(
    keys: bool, chunk: int
) -> None:
    """By a prompt that goes on from an answer, and by an answer that a prompt contains."""
    s = scheduler(keys, shares_answers=False, max_batch_tokens=chunk)
    s.add(request("a", range(10), 12))
    finish(s)
    s.add(request("b", [*range(10), *[7] * 11], 1))
    assert rows(step(s))[0][0] == 8
    finish(s)
    # The whole prompt of "b" is found; of "c", which has generated its last tokens, what it shares.
    (sequence,) = s.add(request("c", range(10), 14))
    while len(sequence.tokens) < 22:
        step(s)
    s.state.cache.release(sequence)
    assert s.state.cache.hit(sequence).tokens == 8
    assert s.state.cache.next_block(sequence, 8) is None
    (whole,) = s.add(request("d", [*range(10), *[7] * 11], 1))
    assert s.state.cache.hit(whole).tokens == 20


def test_a_prefix_of_many_prompts_gets_a_snapshot_with_the_second_of_them() -> None:
    """The first leaves none where the others part: only then it is known that they do."""
    s = scheduler()
    for name, starts in (("a", [(0, 28), (28, 30)]), ("b", [(0, 20), (20, 28), (28, 30)])):
        s.add(request(name, [*range(20), *[ord(name)] * 10], 1))
        found = []
        while s.has_work:
            found += rows(step(s))
        assert found == starts
    s.add(request("c", [*range(20), *[90] * 10], 1))
    s.add(request("d", [*range(20), *[91] * 10], 1))
    assert rows(step(s)) == [(20, 28), (20, 28)]


def test_those_that_wait_for_a_prefix_have_it_computed_once_more_at_most() -> None:
    s = scheduler(max_batch_tokens=32)
    for name in "abcde":
        s.add(request(name, [*range(20), *[ord(name)] * 10], 1))
    computed = 0
    while s.has_work:
        computed += sum(end - start for start, end in rows(step(s)))
    assert computed == 30 + 30 + 3 * 10


def test_a_text_that_goes_on_is_found_and_older_snapshots_of_it_are_not() -> None:
    s = scheduler()
    s.add(request("a", range(10), 12))
    cached = []
    while s.has_work:
        step(s)
        cached.append(s.stats().cached)
    # Of 20 whole blocks' ends 8 and 20 are kept: 3 units each, beside the keys of 5 blocks.
    assert s.stats().cached == 2 * 3 + 5
    (sequence,) = s.add(request("b", [*range(10), *[7] * 11], 2))
    assert s.state.cache.hit(sequence).tokens == 20
    assert s.state.cache.hit(sequence).state


@pytest.mark.parametrize("keys", [True, False])
def test_a_prompt_that_ends_with_a_block_is_found_whole(keys: bool) -> None:
    s = scheduler(keys)
    s.add(request("a", range(8), 12))
    while s.has_work:
        step(s)
    s.add(request("b", [*range(8), 50, 51], 2))
    assert rows(step(s)) == [(8, 10)]


def run(s: Scheduler, name: str, prompt: Iterable[int], output: int = 1) -> None:
    s.add(request(name, prompt, output))
    while s.has_work:
        step(s)


def snapshots(s: Scheduler) -> list[int]:
    """The ends of those that the cache has, in tokens."""
    pool = s.state.cache.pool
    kept = [u for u in range(pool.units) if pool.content[u] and pool.group_of(u) == 1]
    return sorted((pool.block_of(unit) + 1) * s.state.cache.block_size for unit in kept)


def hit(s: Scheduler, name: str, prompt: Iterable[int]) -> int:
    """The tokens that a new request finds."""
    (sequence,) = s.add(request(name, prompt, 1))
    found = s.state.cache.hit(sequence).tokens
    s.abort(name)
    return found


@pytest.mark.parametrize("budget", [8, 64])
def test_a_long_prompt_leaves_one_snapshot_and_evicts_no_others(budget: int) -> None:
    s = scheduler(num_blocks=120, max_batch_tokens=budget)
    run(s, "hot", range(21))
    s.add(request("long", range(200, 399), 1))
    while s.has_work:
        step(s)
        assert len([end for end in snapshots(s) if end != 20]) <= 2, "while it runs: two"
    assert snapshots(s) == [20, 196]
    assert hit(s, "again", range(21)) == 20


def test_those_that_wait_for_a_long_prompt_go_on_from_its_last_state_before_they_part() -> None:
    s = scheduler(max_batch_tokens=8)
    s.add(request("a", range(60), 1))
    step(s)
    s.add(request("b", [*range(20), *range(80, 90)], 1))
    starts = [start for _ in range(9) for start, _ in rows(step(s))]
    assert starts.count(16) == 2
    assert starts.count(0) == 0


def test_a_preempted_prompt_goes_on_from_the_last_state_that_it_left() -> None:
    s = scheduler(max_batch_tokens=8)
    (sequence,) = s.add(request("a", range(60), 1))
    for _ in range(3):
        step(s)
    s.state.cache.release(sequence)
    assert snapshots(s) == [24]
    assert s.state.cache.hit(sequence).tokens == 24


def test_a_text_like_a_shared_prompt_leaves_the_snapshot_of_that() -> None:
    s = scheduler()
    run(s, "a", [*range(16), 50])
    (writer,) = s.add(request("w", range(9), 14))
    while s.has_work:
        step(s, len(writer.tokens))
    assert [*writer.tokens] == [*range(23)]
    assert hit(s, "b", [*range(16), 70]) == 16


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_of_a_text_one_snapshot_is_left_whatever_a_block_has(block_size: int) -> None:
    s = scheduler(block_size=block_size)
    run(s, "a", range(10), 40)
    # The same prompt again finds the first, one that goes on the second where that is a block's.
    of_prompt = {9 // block_size * block_size, 10 // block_size * block_size}
    assert {*snapshots(s)} >= of_prompt
    assert len(snapshots(s)) == len(of_prompt) + 1


def test_snapshots_are_evicted_with_the_blocks_that_they_end() -> None:
    s = scheduler()
    run(s, "a", range(10), 12)
    pool = s.state.cache.pool
    pool.take(len(pool.free))
    found = []
    for i in range(len(pool.cached)):
        found.append(hit(s, f"b{i}", [*range(10), *[7] * 11]))
        pool.take(1)
    # The text's snapshot and its blocks, then those of the prompt.
    assert found == [20, *[8] * 6, *[0] * 4]


def test_choices_wait_for_the_firsts_snapshot_and_share_no_state() -> None:
    s = scheduler()
    sequences = s.add(request("a", range(10), 5, n=3))
    assert rows(step(s)) == [(0, 8)]
    assert rows(step(s)) == [(8, 10)] * 3
    assert not any(work.copies for work in (step(s), step(s)))
    targets = [unit for q in sequences for unit in q.state_target()]
    assert len({*targets}) == 9


def test_a_state_that_another_holds_is_not_written_once_its_content_is_forgotten() -> None:
    """As when a third sequence with the same tokens fails."""
    s = scheduler(max_batch_tokens=8)
    (a,) = s.add(request("a", range(10), 9))
    step(s)
    (b,) = s.add(request("b", [*range(8), 90, 91], 9))
    step(s)
    shared = [units for units in a.states if units in b.states]
    assert len(shared) == 1
    s.state.cache.states.drop(bytes(a.hashes[32:64]))  # type: ignore[union-attr]
    assert s.state.cache.pool.content[shared[0][0]] is None
    for _ in range(3):
        work = s.commit(s.plan())
        for row in work.rows:
            target = row.sequence.state_target()
            assert not [q for q in (a, b) if q is not row.sequence and target in q.states]
        s.update(work, {row.sequence.id: Result(1) for row in work.rows if row.samples})
        s.check()


def preempted(**limits: Any) -> tuple[Scheduler, Sequence, Work]:
    """Two that fill the pool, and the step that takes the younger's units."""
    s = scheduler(num_blocks=20, cache_tokens=56, allow_block_sharing=False, **limits)
    s.add(request("old", range(8), 20))
    (young,) = s.add(request("young", range(8), 20))
    while not young.preemptions:
        work = step(s)
    return s, young, work


def test_an_offload_moves_keys_and_the_current_state_alone() -> None:
    s, young, work = preempted(offload_units=20)
    current = [len(units) for units in young.host]
    assert len(work.offload) == sum(current) == current[0] + 3
    assert young.states == []
    assert most_needed(s.state, young) >= current[0] + 6, "both versions come back"
    while not (work := step(s)).restore:
        pass
    filled = [device for _, device in work.restore]
    assert [*young.tables[0][: current[0]], *young.states[0]] == filled
    while s.has_work:
        step(s)
    assert s.stats().used == 0


def test_a_recompute_begins_from_zeros() -> None:
    s, young, work = preempted()
    assert not work.offload
    assert (young.computed, young.states) == (0, [])
    while not young.states:
        work = step(s)
    assert [row.start for row in work.rows if row.sequence is young] == [0]


def test_a_victim_gives_back_its_states() -> None:
    s = scheduler(allow_block_sharing=False)
    (sequence,) = s.add(request("a", range(6), 9))
    step(s)
    cache, before = s.state.cache, s.stats().free
    assert cache.units_freed(sequence, {}) == cache.units_held(sequence) == 2 + 6
    assert cache.units_offloaded(sequence) == 2 + 3
    cache.release(sequence)
    assert s.stats().free == before + 8


def test_no_step_is_planned_ahead_with_two_versions() -> None:
    for versions, ahead in ((2, False), (3, True)):
        s = scheduler(state_versions=versions, allow_block_sharing=False)
        s.add(request("a", range(6), 9))
        s.launch(s.commit(s.plan()))
        assert (s.plan_ahead() is not None) == ahead


def shift(s: Scheduler, q: Sequence) -> None:
    """The state that is found is that of another place."""
    q.states[q.turn % 2].reverse()


def lose(s: Scheduler, q: Sequence) -> None:
    s.state.cache.pool.content[q.states[q.turn % 2][0]] = None


def miscount(s: Scheduler, q: Sequence) -> None:
    """A version has less units than the others, and nobody has the rest."""
    s.state.cache.pool.release([q.states[(q.turn + 1) % 2].pop()])


def twist(s: Scheduler, q: Sequence) -> None:
    """Its state is found as that of a block that it has not computed."""
    q.hashes[:32] = bytes(32)


@pytest.mark.parametrize(
    ("damage", "name"), [(shift, "I10"), (lose, "I10"), (miscount, "I5"), (twist, "I10")]
)
def test_states_that_must_not_be_are_found(damage: Any, name: str) -> None:
    s = scheduler(False)
    (sequence,) = s.add(request("a", range(6), 9))
    step(s)
    damage(s, sequence)
    with pytest.raises(InvariantViolation, match=name):
        s.check()


def test_a_state_in_flight_is_written_by_one_alone() -> None:
    s = scheduler(False, state_versions=3)
    (sequence,) = s.add(request("a", range(6), 9))
    s.launch(s.commit(s.plan()))
    s.check()
    s.state.cache.pool.share(sequence.states[1][:1])
    with pytest.raises(InvariantViolation, match=r"I[24]"):
        s.check()
