"""Blocks, hashes, groups and tables by example, and the pool against a model of dictionaries."""

import dataclasses
import gc
import hashlib
import random
import sys
import tracemalloc
from collections import Counter
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fairlead_runtime.cache import prefix
from fairlead_runtime.cache.blocks import BlockPool, PoolError
from fairlead_runtime.cache.offload import HostPool
from fairlead_runtime.cache.paged import PagedCache
from fairlead_runtime.cache.prefix import (
    DIGEST,
    digests,
    extend_chain,
    leading_units,
    longest_hit,
    root,
)
from fairlead_runtime.request.sequence import Request, SamplingParams, Sequence
from fairlead_runtime.sizing.groups import NO_KEYS, NULL, LayerGroup, group_layers, unit_width
from support.full import LONG_FORM


def block(i: int) -> bytes:
    return bytes([i])


# -- groups


@pytest.mark.parametrize(
    ("windows", "sizes"),
    [
        ([None] * 12, [12]),
        ([64] * 5, [5]),
        ([None, 64] * 6, [6, 6]),
        ([64] * 5 + [None], [1] * 6),
        (([64] * 5 + [None]) * 4, [5, 5, 5, 5, 4]),  # gemma3's pattern: 25 slots for 24 layers
        (([64] * 5 + [None]) * 10 + [64] * 2, [13, 13, 13, 13, 10]),  # 65 slots for 62 layers
        ([None, 64, 128], [1, 1, 1]),
    ],
)
def test_layers_become_few_groups_of_equal_size_with_little_waste(
    windows: list[int | None], sizes: list[int]
) -> None:
    groups = group_layers(windows)
    assert [len(g.layers) for g in groups] == sizes
    assert sorted(layer for g in groups for layer in g.layers) == list(range(len(windows)))
    assert all(windows[layer] == g.window for g in groups for layer in g.layers)
    assert [g.index for g in groups] == list(range(len(groups)))
    assert 8 * unit_width(groups) * len(groups) <= 9 * len(windows)


# Ten times a full layer of width 1 and five of a window, of width 2; MiMo-V2-Flash; widths of which
# none is a multiple of another; one full layer that is wider than all others together; one width of
# two sizes of windows.
@pytest.mark.parametrize(
    ("layers", "sizes", "unit"),
    [
        ([(None, 1)] * 10 + [(8, 2)] * 5, [10, 5], 10),
        ([(None, 5), *[(8, 10)] * 5] * 8, [8] * 6, 80),
        ([(None, 3), (8, 2), (8, 2)], [1, 2], 4),
        ([(None, 7), (8, 5), (8, 5), (8, 5), (8, 5)], [1, 2, 2], 10),
        ([(None, 100), *[(8, 1)] * 9], [1, 9], 100),
        ([(8, 4), (16, 4)] * 3, [3, 3], 12),
    ],
)
def test_layers_of_several_widths_become_groups_that_take_equal_units(
    layers: list[tuple[int | None, int]], sizes: list[int], unit: int
) -> None:
    groups = group_layers(*zip(*layers, strict=True))
    assert [len(g.layers) for g in groups] == sizes
    assert unit_width(groups) == unit
    assert sorted(layer for g in groups for layer in g.layers) == list(range(len(layers)))
    assert all(layers[i] == (g.window, g.width) for g in groups for i in g.layers)


WINDOWS, WIDTHS = st.sampled_from([None, 8, 64]), st.sampled_from([2, 3, 5, 64])


@given(st.lists(st.tuples(WINDOWS, WIDTHS), min_size=1))
def test_groups_waste_an_eighth_or_as_little_as_any_unit_does(
    layers: list[tuple[int | None, int]],
) -> None:
    groups = group_layers(*zip(*layers, strict=True))
    unit, kept = unit_width(groups), sum(width for _, width in layers)
    taken = unit * len(groups)
    assert all(len(g.layers) * g.width <= unit for g in groups)
    if 8 * taken > 9 * kept:
        counts = Counter(layers)
        widest = max(width for _, width in counts)
        for other in range(widest, kept + 1):
            assert taken <= other * sum(-(-n // (other // w)) for (_, w), n in counts.items())


def test_layers_without_keys_have_no_slot_and_read_that_of_their_source() -> None:
    # Gemma 3n E4B: of 35 layers, every fifth full, the last 15 read layers 18 and 19.
    windows = ([512] * 4 + [None]) * 7
    sources = [*range(20), *(19 if window is None else 18 for window in windows[20:])]
    groups = group_layers(windows, sources=sources)
    assert [len(g.layers) for g in groups] == [4] * 5
    assert sorted(layer for g in groups for layer in g.layers) == list(range(20))
    read: dict[int, list[int]] = {g.layers[slot]: [] for g in groups for _, slot in g.readers}
    for group in groups:
        for reader, slot in group.readers:
            assert windows[reader] == group.window
            read[group.layers[slot]].append(reader)
    assert read == {18: [n for n in range(20, 35) if n % 5 != 4], 19: [24, 29, 34]}


@pytest.mark.parametrize(
    ("windows", "sources", "problem"),
    [
        ([None, None], [0, 2], "keeps none"),
        ([None, None], [1, 1], "keeps none"),
        ([None, None, None], [0, 0, 1], "keeps none"),
        ([None, None], [0, -2], "keeps none"),
        ([8, None], [0, 0], "with window None, reads the keys of layer 0, with window 8"),
        ([None, 8], [0, 0], "with window 8"),
    ],
)
def test_keys_that_are_not_there_cannot_be_read(
    windows: list[int | None], sources: list[int], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        group_layers(windows, sources=sources)


def test_a_layer_without_attention_is_in_no_group() -> None:
    """Layers that keep a state, or nothing, beside layers with keys, or alone."""
    groups = group_layers([None, None, 8, None], [0, 6, 6, 0], [NO_KEYS, 1, 2, NO_KEYS])
    assert [(g.window, g.layers, g.readers) for g in groups] == [(None, (1,), ()), (8, (2,), ())]
    assert group_layers([None, None], [0, 0], [NO_KEYS, NO_KEYS]) == ()


@pytest.mark.parametrize("windows", [[], [0], [None, -3]])
def test_no_layers_and_windows_below_one_are_refused(windows: list[int | None]) -> None:
    with pytest.raises(ValueError, match="windows"):
        group_layers(windows)


@pytest.mark.parametrize(
    ("window", "position", "first"),
    [(None, 99, 0), (1, 8, 2), (4, 8, 1), (5, 8, 1), (6, 8, 0), (9, 8, 0), (1, 7, 1)],
)
def test_the_first_block_a_query_sees_follows_its_window(
    window: int | None, position: int, first: int
) -> None:
    group = LayerGroup(0, window, (0,))
    assert group.first_block(position, 4) == first
    if window is not None:
        assert first == max(0, position - window + 1) // 4


# -- the pool


def test_free_blocks_are_taken_before_cached_ones_and_those_least_recently_used_first() -> None:
    pool = BlockPool(4, 1)
    a, b, c, d = pool.take(4)
    for i, unit in enumerate((a, b, c)):
        pool.register(unit, 0, block(i))
    pool.release((c, b, a, d))
    assert pool.available == 4
    pool.share((c,))
    pool.release((c,))  # used again: evicted last
    assert pool.take(1) == [d]
    assert pool.take(2) == [b, a]
    assert [pool.find(0, block(i)) for i in range(3)] == [None, None, c]


def test_the_pool_raises_and_takes_nothing_when_it_has_too_few_units() -> None:
    pool = BlockPool(3, 1)
    pool.take(1)
    with pytest.raises(PoolError, match="3 units requested, 2 available"):
        pool.take(3)
    assert pool.available == 2
    with pytest.raises(PoolError, match="free: it has no content"):
        pool.share((2,))
    with pytest.raises(PoolError, match="released twice"):
        pool.release((0, 0))
    host = HostPool(1)
    with pytest.raises(PoolError, match="2 host units requested, 1 free"):
        host.take(2)


def test_equal_digests_of_two_groups_are_two_contents() -> None:
    pool = BlockPool(2, 2)
    a, b = pool.take(2)
    pool.register(a, 0, block(1))
    pool.register(b, 1, block(1))
    assert (pool.find(0, block(1)), pool.find(1, block(1))) == (a, b)


class PoolMachine(RuleBasedStateMachine):
    """Every operation in any order, compared with free dictionaries."""

    @initialize(units=st.integers(1, 6))
    def start(self, units: int) -> None:
        self.pool = BlockPool(units, 1)
        self.refs: dict[int, int] = {}
        self.content: dict[int, int] = {}  # unit → name of its content
        self.idle: list[int] = []  # cached and unreferenced, oldest first
        self.names = 0

    @precondition(lambda self: self.pool.available)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.pool.available))
        free = self.pool.units - len(self.refs) - len(self.idle)
        evicted = self.idle[: max(0, count - free)]
        taken = self.pool.take(count)
        assert len(set(taken)) == count
        assert not set(taken) & set(self.refs)
        assert [unit for unit in taken if unit in self.idle] == evicted
        for unit in evicted:
            self.idle.remove(unit)
            del self.content[unit]
        self.refs |= dict.fromkeys(taken, 1)

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        unit = data.draw(st.sampled_from(sorted(self.refs)))
        self.pool.release((unit,))
        self.refs[unit] -= 1
        if not self.refs[unit]:
            del self.refs[unit]
            if unit in self.content:
                self.idle.append(unit)

    @precondition(lambda self: self.refs or self.idle)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        unit = data.draw(st.sampled_from(sorted([*self.refs, *self.idle])))
        self.pool.share((unit,))
        self.refs[unit] = self.refs.get(unit, 0) + 1
        if unit in self.idle:
            self.idle.remove(unit)

    @precondition(lambda self: self.refs)
    @rule(data=st.data(), again=st.booleans())
    def register(self, data: st.DataObject, again: bool) -> None:
        unit = data.draw(st.sampled_from(sorted(self.refs)))
        names = sorted(self.content.values())
        name = data.draw(st.sampled_from(names)) if again and names else self.names
        self.names += 1
        self.pool.register(unit, 0, str(name).encode())
        if unit not in self.content and name not in names:
            self.content[unit] = name

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        unit = data.draw(st.sampled_from(sorted(self.content)))
        self.pool.forget(unit)
        del self.content[unit]
        if unit in self.idle:
            self.idle.remove(unit)

    @rule()
    def forget_cached(self) -> None:
        assert self.pool.forget_cached() == len(self.idle)
        for unit in self.idle:
            del self.content[unit]
        self.idle = []
        assert len(self.pool.free) == self.pool.available

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert self.pool.available == self.pool.units - len(self.refs)
        assert list(self.pool.cached) == self.idle
        for unit, name in self.content.items():
            assert self.pool.find(0, str(name).encode()) == unit


PoolMachine.TestCase.settings = settings(
    max_examples=300 if LONG_FORM else 60, stateful_step_count=30, deadline=None
)
TestPool = PoolMachine.TestCase


# -- hashes


def chain(
    tokens: list[int], salt: bytes = b"", identity: bytes = b"m", size: int = 4
) -> list[bytes]:
    hashes = bytearray()
    extend_chain(hashes, tokens, root(identity, salt), size, len(tokens))
    return digests(hashes, 0, len(tokens) // size)


def test_a_digest_stands_for_all_tokens_so_far_the_salt_and_the_model() -> None:
    base = chain([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert len(base) == 2
    assert chain([1, 2, 3, 4, 5, 6, 7, 8]) == base
    assert chain([1, 2, 3, 4, 5, 6, 7, 0])[0] == base[0]
    others = [
        chain([1, 2, 3, 4, 5, 6, 7, 0])[1],
        chain([0, 2, 3, 4, 5, 6, 7, 8])[1],
        chain([1, 2, 3, 4, 5, 6, 7, 8], salt=b"s")[1],
        chain([1, 2, 3, 4, 5, 6, 7, 8], identity=b"n")[1],
    ]
    assert len({base[1], *others}) == 5
    assert root(b"ab", b"c") != root(b"a", b"bc")


def test_a_digest_is_that_of_its_parent_and_of_its_tokens_in_eight_bytes_each() -> None:
    tokens = [0, 1, 2**31 - 1, 300, 5, 6, 7, 8]
    parent, expected = root(b"m", b"salt"), []
    for at in (0, 4):
        packed = b"".join(token.to_bytes(8, sys.byteorder) for token in tokens[at : at + 4])
        parent = hashlib.sha256(parent + packed).digest()
        expected.append(parent)
    assert chain(tokens, salt=b"salt") == expected
    request = Request("r", tokens, SamplingParams(), 1, salt=b"salt")
    assert make_cache().prompt_hashes(request) == b"".join(expected)


def test_a_unit_with_content_has_nothing_that_the_garbage_collector_walks_over() -> None:
    cache = make_cache(blocks=2000)
    gc.collect()
    before = len(gc.get_objects())
    cache.release(compute(cache, make_sequence(6000), 5999))
    gc.collect()
    assert len(cache.pool.cached) == 1499
    assert len(gc.get_objects()) - before < 100


def test_a_chain_grows_by_the_full_blocks_it_lacks() -> None:
    hashes = bytearray()
    tokens = list(range(12))
    for until, blocks in ((3, 0), (4, 1), (7, 1), (12, 3), (12, 3)):
        extend_chain(hashes, tokens, root(b"m", b""), 4, until)
        assert len(hashes) == blocks * DIGEST
    assert digests(hashes, 1, 3) == chain(tokens)[1:]


def test_hashing_a_long_prompt_lets_other_threads_go_on() -> None:
    for blocks, count in ((prefix.YIELD_BLOCKS - 1, 0), (5 * prefix.YIELD_BLOCKS, 5)):
        pauses: list[None] = []
        pause = partial(pauses.append, None)
        extend_chain(bytearray(), range(4 * blocks), root(b"m", b""), 4, 4 * blocks, pause)
        assert len(pauses) == count


def add_cached_blocks(pool: BlockPool, group: int, hashes: list[bytes], present: list[int]) -> None:
    for i in present:
        unit = pool.take(1)[0]
        pool.register(unit, group, hashes[i])
        pool.release((unit,))


@pytest.mark.parametrize(
    ("full", "window", "length"),
    [
        ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], 5),
        ([0, 1, 3, 4], [0, 1, 2, 3, 4], 2),  # the full group ends at its first gap
        ([0, 1, 2, 3, 4], [3, 4], 5),  # position 20 sees 15..20: blocks 3 and 4
        ([0, 1, 2, 3, 4], [4], 0),  # block 3 is missing, and nothing shorter is there
        ([0, 1, 2, 3, 4], [0, 1, 4], 2),
        ([0, 1, 2], [1, 3, 4], 0),  # the window's own hit at 5 is beyond the full group's
        ([0, 1, 2], [1, 2, 3, 4], 3),
        ([], [0, 1, 2, 3, 4], 0),
    ],
)
@pytest.mark.parametrize("window_first", [False, True])
def test_the_longest_hit_is_one_that_every_group_can_continue_from(
    full: list[int], window: list[int], length: int, window_first: bool
) -> None:
    hashes = chain(list(range(20)))
    kinds = ((6, window), (None, full)) if window_first else ((None, full), (6, window))
    groups = [LayerGroup(i, kind, (i,)) for i, (kind, _) in enumerate(kinds)]
    pool = BlockPool(10, 2)
    for i, (_, present) in enumerate(kinds):
        add_cached_blocks(pool, i, hashes, present)
    packed = b"".join(hashes)
    known: list[list[int]] = [[] for _ in groups]
    leading = leading_units(pool, groups, packed, len(hashes), known)
    _, tables, _ = longest_hit(pool, groups, 4, packed, len(hashes), leading)
    for group, table in zip(groups, tables, strict=True):
        first = group.first_block(4 * length, 4)
        assert table == [NULL] * first + [
            pool.find(group.index, digest) for digest in hashes[first:length]
        ]
        assert NULL not in table[first:]


# -- tables


def make_cache(
    windows: tuple[int | None, ...] = (None,), blocks: int = 8, host: int = 0
) -> PagedCache:
    return PagedCache(
        group_layers(windows),
        num_blocks=blocks,
        block_size=4,
        max_batch_tokens=16,
        sharing=True,
        host_units=host,
        identity=b"m",
    )


def make_sequence(prompt: int, i: int = 0, output: int = 8) -> Sequence:
    request = Request(str(i), tuple(range(prompt)), SamplingParams(), output)
    return Sequence(i, request, 0, list(range(prompt)), limit=prompt + output)


def compute(cache: PagedCache, sequence: Sequence, tokens: int) -> Sequence:
    cache.adopt(sequence, cache.hit(sequence))
    cache.grow(sequence, tokens)
    sequence.computed = tokens
    cache.finish_forward(sequence)
    return sequence


def test_tail_blocks_are_evicted_before_their_prefix() -> None:
    cache = make_cache()
    a = compute(cache, make_sequence(17), 16)
    first = list(a.tables[0])
    cache.release(a)
    assert list(cache.pool.cached) == first[::-1]
    cache.pool.take(6)  # four free ones, then the two tail blocks
    assert cache.hit(make_sequence(17)).tables == [first[:2]]


def test_a_hit_always_leaves_a_token_to_compute() -> None:
    cache = make_cache()
    cache.release(compute(cache, make_sequence(17), 16))
    for prompt, tokens in ((17, 16), (16, 12), (5, 4), (4, 0)):
        assert cache.hit(make_sequence(prompt)).tokens == tokens


def test_growth_is_the_whole_prefill_and_one_block_but_never_beyond_the_end() -> None:
    cache = make_cache()
    assert cache.growth(make_sequence(10, output=20), 0) == 3 + 1
    assert cache.growth(make_sequence(10, output=20), 8) == 1 + 1
    assert cache.growth(make_sequence(10, output=2), 0) == 3
    # window 5 and chunks of 16 tokens touch at most 20 positions in a row: 6 blocks
    assert make_cache((None, 5)).growth(make_sequence(60, output=20), 0) == 16 + 6


def test_a_window_group_frees_exactly_what_the_next_query_cannot_see() -> None:
    cache = make_cache((5,))
    sequence = compute(cache, make_sequence(20), 11)
    assert [unit == NULL for unit in sequence.tables[0]] == [True, False, False]  # 11 sees 7..11
    cache.grow(sequence, 13)
    sequence.computed = 13
    cache.finish_forward(sequence)
    # 13 sees 9..13
    assert [unit == NULL for unit in sequence.tables[0]] == [True, True, False, False]
    assert cache.units_held(sequence) == 2


def test_offload_and_restore_keep_order_and_windows() -> None:
    cache = make_cache((None, 5), host=10)
    sequence = compute(cache, make_sequence(14), 13)
    before = [list(t) for t in sequence.tables]
    out = dict(cache.offload(sequence))
    assert sequence.tables == []
    assert [[out.get(u, NULL) for u in t] for t in before] == sequence.host
    assert cache.pool.available == cache.pool.units
    cache.pool.take(3)  # others take units meanwhile
    host_tables = [list(t) for t in sequence.host]
    back = dict(cache.restore(sequence))
    assert [[back.get(u, NULL) for u in t] for t in host_tables] == sequence.tables
    assert sequence.host == []
    assert len(cache.host.free) == 10
    assert sequence.computed == 13


def test_releasing_siblings_frees_what_they_share_once() -> None:
    cache = make_cache()
    a = compute(cache, make_sequence(10), 9)
    b = make_sequence(10, 1)
    cache.fork(b, a, 9)
    copies = cache.copy_tail(b, a)
    assert a.tables[0][:2] == b.tables[0][:2]
    assert copies == [(a.tables[0][2], b.tables[0][2])]
    dropped: dict[int, int] = {}
    assert cache.units_freed(a, dropped) == 1  # its own tail
    assert cache.units_freed(b, dropped) == 3  # then the shared ones too


def test_a_fork_is_refused_when_the_window_of_the_sibling_freed_the_prompt() -> None:
    cache = make_cache((4,))
    a = make_sequence(9)
    a.tokens += range(8)
    compute(cache, a, 16)
    assert not cache.can_fork(a, 8)
    with pytest.raises(PoolError, match="no longer holds"):
        cache.fork(make_sequence(9, 1), a, 8)


def test_content_of_a_failed_sequence_is_not_found() -> None:
    cache = make_cache()
    a = compute(cache, make_sequence(9), 8)
    cache.release(a, forget=True)
    assert cache.hit(make_sequence(9)).tokens == 0
    assert len(cache.pool.free) == cache.pool.units
    cache = make_cache((4,))  # nor what its window released before
    cache.release(compute(cache, make_sequence(17), 16), forget=True)
    assert len(cache.pool.free) == cache.pool.units


def test_without_sharing_nothing_is_hashed_or_kept() -> None:
    cache = make_cache()
    cache.sharing = False
    cache.release(compute(cache, make_sequence(9), 8))
    assert not cache.pool.cached
    assert not dataclasses.replace(make_sequence(9)).hashes


@pytest.mark.parametrize("windows", [(None,), (None, 6), (6, None), (6,)])
@pytest.mark.parametrize("losses", [0, 4096])
def test_a_look_that_starts_from_the_last_finds_what_a_new_one_finds(
    windows: tuple[int | None, ...], losses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefixes of one prompt are computed, and blocks evicted in any order."""
    monkeypatch.setattr("fairlead_runtime.cache.blocks.LOSSES", losses)
    rng, cache, found = random.Random(1), make_cache(windows, blocks=12), set()
    waiting = make_sequence(30, i=100)
    for i in range(60):
        length = rng.randrange(6, 34)
        cache.release(compute(cache, make_sequence(length, i=i), length - 1))
        for unit in rng.sample(list(cache.pool.cached), k=len(cache.pool.cached) // 4):
            cache.pool.forget(unit)
        hit = cache.hit(waiting)
        assert hit.tables == cache.hit(make_sequence(30, i=200)).tables
        cache.remember(waiting, hit)
        found.add(hit.tokens)
        assert cache.hit(waiting).walked == 0 or not hit.tokens
    assert len(found) > 3


def test_a_prompt_of_which_nothing_is_cached_is_not_unpacked() -> None:
    cache, sequence = make_cache(), make_sequence(40_000)
    cache.hit(sequence)  # makes its hashes
    tracemalloc.start()
    try:
        cache.hit(sequence)
        assert tracemalloc.get_traced_memory()[1] < 10_000
    finally:
        tracemalloc.stop()
