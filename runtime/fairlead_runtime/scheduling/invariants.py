"""The invariants that hold between any two steps, as checks: I1 to I14, as far as the scheduler's
state shows them. Between two steps one may be in flight: launched, and not collected.

Reads everything; changes only which units count as moved. The caller checks I8 and the events of
I9; I9's state is checked here.
"""

import itertools
from array import array
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Literal

from fairlead_runtime.cache.blocks import BlockPool
from fairlead_runtime.cache.paged import PagedCache
from fairlead_runtime.cache.prefix import DIGEST, digests, extend_chain, root
from fairlead_runtime.cache.states import StateUnits
from fairlead_runtime.request.sequence import FINAL, Sequence, Status
from fairlead_runtime.scheduling.planner import State, plan_step
from fairlead_runtime.sizing.groups import NULL

# Entries of tables and lists in one part: a millisecond or two. A digest takes as long as 32, as a
# table without an entry does.
ENTRIES_PER_PART = 16_384
ENTRIES_PER_DIGEST = ENTRIES_PER_TABLE = 32


class InvariantViolation(RuntimeError):  # noqa: N818 - it reports a state, not a failed call
    """The scheduler's state breaks an invariant: a bug in Fairlead, never a client error."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name


def checks(state: State, live: Mapping[int, Sequence]) -> Iterator[None]:
    """Raise InvariantViolation unless every invariant holds.

    Yields between parts that are short beside a step. Steps may run there: each part reads the
    state of its own moment, and the sequences are those that are live at the first part.
    """
    entries = 0
    for count in itertools.chain(_check_units(state, live), _check_sequences(state, live)):
        entries += count
        if entries >= ENTRIES_PER_PART:
            entries = 0
            yield
    in_flight = state.ended or any(sequence.steps_in_flight for sequence in live.values())
    if live and not in_flight and not plan_step(state).rows:
        raise InvariantViolation(
            "I12", f"{len(live)} sequences, but the next step would compute nothing"
        )


# -- units: each check yields how many entries it has looked at


def _check_units(state: State, live: Mapping[int, Sequence]) -> Iterator[int]:
    """Check that each unit is free, cached, or named by as many table entries as it has references.

    These are counted while steps run. Whatever holds a unit that is not moved meanwhile holds it
    all the time, so it is counted once; moved units are left to ``_check_moved``.
    """
    cache = state.cache
    pool, host = cache.pool, cache.host
    holders = (*live.values(), *state.ended.values())
    for moving in (pool, host):
        moving.moved = bytearray(moving.units)
    named, free = array("i", bytes(4 * pool.units)), array("i", bytes(4 * pool.units))
    on_host = array("i", bytes(4 * host.units))
    for sequence in holders:
        for group in range(len(cache.groups)):
            yield from _count(named, partial(_table, sequence, "tables", group))
            yield from _count(on_host, partial(_table, sequence, "host", group))
            yield ENTRIES_PER_TABLE
        if cache.states is not None:
            for version in range(cache.states.versions):
                yield from _count(named, partial(_table, sequence, "states", version))
            yield from _count(on_host, partial(_table, sequence, "host", len(cache.groups)))
            yield ENTRIES_PER_TABLE
    yield from _count(free, lambda: pool.free)
    yield from _count(on_host, lambda: host.free)
    for unit in range(pool.units):
        _check_content(cache, unit)
        if not pool.moved[unit]:
            _check_references(cache, unit, named[unit], free[unit])
        yield 4
    for unit in range(host.units):
        if on_host[unit] != 1 and not host.moved[unit]:
            raise InvariantViolation("I1", "a host unit is lost, or two sequences hold it")
        yield 1


def _table(sequence: Sequence, where: Literal["tables", "host", "states"], index: int) -> list[int]:
    tables: list[list[int]] = getattr(sequence, where)
    return tables[index] if index < len(tables) else []


def _count(counts: "array[int]", entries: Callable[[], list[int]]) -> Iterator[int]:
    """Count a list's entries by unit; it may change between two parts."""
    first = 0
    while part := entries()[first : first + ENTRIES_PER_PART]:
        for unit in part:
            if unit != NULL:
                counts[unit] += 1
        first += len(part)
        yield len(part)


def _check_references(cache: PagedCache, unit: int, named: int, free: int) -> None:
    references = cache.pool.refs[unit]
    _compare(cache.pool, unit, named)
    places = free + (unit in cache.pool.cached)
    if not places and not references:
        raise InvariantViolation("I1", f"unit {unit} is neither free, cached nor referenced")
    if places != (not references):
        raise InvariantViolation("I3", f"unit {unit} is free or cached twice, or in use as well")


def _compare(pool: BlockPool, unit: int, named: int) -> None:
    references = pool.refs[unit]
    if named != references:
        raise InvariantViolation(
            "I2", f"unit {unit} has {references} references, and tables name it {named} times"
        )


def _check_moved(state: State, live: Mapping[int, Sequence], sequence: Sequence) -> Iterator[int]:
    """Check the references of the moved units that a sequence shares, or seems to. Whoever shares a
    block has it at the same place, so one look at that place of all tables counts them.
    """
    pool, size = state.cache.pool, ENTRIES_PER_TABLE
    for group in range(len(state.cache.groups)):
        first = 0
        while part := _table(sequence, "tables", group)[first : first + size]:
            shared = [
                (place, unit)
                for place, unit in enumerate(part, first)
                if unit != NULL and pool.moved[unit] and pool.refs[unit] > 1
            ]
            holders = (*live.values(), *state.ended.values()) if shared else ()
            tables = [_table(holder, "tables", group) for holder in holders]
            for place, unit in shared:
                _compare(pool, unit, sum(table[place : place + 1] == [unit] for table in tables))
                pool.moved[unit] = 0  # the other sequences that share it need no look
            yield len(part) + 4 * len(shared) * len(tables)
            first += size
    for version in sequence.states:
        shared = [
            (place, unit)
            for place, unit in enumerate(version)
            if pool.moved[unit] and pool.refs[unit] > 1
        ]
        holders = (*live.values(), *state.ended.values()) if shared else ()
        versions = [version for holder in holders for version in holder.states]
        for place, unit in shared:
            _compare(pool, unit, sum(version[place] == unit for version in versions))
            pool.moved[unit] = 0
        yield len(version) + 4 * len(shared) * len(versions)


def _check_content(cache: PagedCache, unit: int) -> None:
    pool = cache.pool
    if pool.content[unit] is None:
        if unit in pool.cached:
            raise InvariantViolation("I3", f"unit {unit} is cached without content")
    elif not pool.is_indexed(unit) or (pool.refs[unit] == 0 and unit not in pool.cached):
        raise InvariantViolation(
            "I10", f"unit {unit} has content that is not in the index or cannot be evicted"
        )


# -- sequences


def _check_sequences(state: State, live: Mapping[int, Sequence]) -> Iterator[int]:
    _check_queues(state, live)
    yield ENTRIES_PER_PART
    for ended in state.ended.values():
        if not ended.steps_in_flight or ended.status not in FINAL:
            raise InvariantViolation(
                "I14", f"sequence {ended.id} holds blocks after its end, with no step in flight"
            )
    for number in list(live):
        if (sequence := live.get(number)) is not None:
            yield _check_sequence(state, sequence)
            yield from _check_moved(state, live, sequence)
            yield from _check_hashes(state.cache, sequence)


def _check_queues(state: State, live: Mapping[int, Sequence]) -> None:
    running, waiting = state.running, list(state.policy.candidates())
    if not live and (state.siblings or running or waiting):
        raise InvariantViolation("I11", "no sequence is live, but one is queued or has siblings")
    queued = [sequence.id for sequence in (*running, *waiting)]
    if len(queued) != len(live) or live.keys() != {*queued}:
        raise InvariantViolation("I7", f"queues hold {sorted(queued)}, live are {sorted(live)}")
    if len(running) > state.limits.max_requests:
        raise InvariantViolation(
            "I7", f"{len(running)} sequences run, more than max_requests allows"
        )
    for queue, is_pending in ((running, False), (waiting, True)):
        if any((sequence.status is Status.PENDING) != is_pending for sequence in queue):
            raise InvariantViolation("I7", "a sequence runs that is pending, or waits as another")


def _check_sequence(state: State, sequence: Sequence) -> int:
    if not 0 <= sequence.computed < len(sequence.tokens):
        raise InvariantViolation(
            "I6",
            f"sequence {sequence.id} has {sequence.computed} of {len(sequence.tokens)} computed",
        )
    if sequence.status in FINAL or len(sequence.tokens) >= sequence.limit:
        raise InvariantViolation("I9", f"sequence {sequence.id} has ended but is still live")
    if sequence.status is Status.PENDING:
        _check_waiting(sequence)
    elif not sequence.holds_units:
        raise InvariantViolation("I7", f"sequence {sequence.id} runs without blocks")
    if (
        state.limits.policy in ("fifo", "prefill_first")
        and sequence.preemptions > 4 + sequence.seniors
    ):
        text = f"{sequence.preemptions} times with {sequence.seniors} seniors"
        raise InvariantViolation("I13", f"sequence {sequence.id} was preempted {text}")
    states = state.cache.states
    tables = sequence.tables or sequence.host[: len(state.cache.groups)]
    if tables:
        _check_tables(state.cache, sequence, tables)
    if states is not None:
        _check_states(state.cache, states, sequence)
    return 64 + sum(map(len, (*tables, *sequence.states)))


def _check_waiting(sequence: Sequence) -> None:
    if sequence.steps_in_flight or sequence.planned_length != sequence.computed:
        raise InvariantViolation("I14", f"sequence {sequence.id} waits while it is in flight")
    if sequence.holds_units:
        raise InvariantViolation("I7", f"sequence {sequence.id} waits with blocks")
    if sequence.computed and not sequence.host:
        raise InvariantViolation(
            "I5", f"sequence {sequence.id} waits with tokens computed and no blocks"
        )


def _check_tables(cache: PagedCache, sequence: Sequence, tables: list[list[int]]) -> None:
    for group, table in zip(cache.groups, tables, strict=True):
        if len(table) != cache.blocks(sequence.planned_length):
            computed, ahead = sequence.computed, sequence.computed_in_flight
            text = f"{len(table)} blocks for {computed} tokens and {ahead} in flight"
            raise InvariantViolation("I5", f"sequence {sequence.id}, group {group.index}: {text}")
        first = group.first_block(sequence.computed, cache.block_size)
        if table[:first].count(NULL) != first or NULL in table[first:]:
            raise InvariantViolation(
                "I5", f"sequence {sequence.id}, group {group.index}: window from {first}"
            )
        if tables is sequence.tables:
            for unit in table[sequence.computed // cache.block_size :]:
                if cache.pool.refs[unit] != 1 or cache.pool.content[unit] is not None:
                    raise InvariantViolation(
                        "I4", f"sequence {sequence.id} would write into shared unit {unit}"
                    )


def _check_states(cache: PagedCache, states: StateUnits, sequence: Sequence) -> None:
    """A sequence that runs has all versions, one in host memory the current one. What its steps in
    flight write is its own; what is kept of the current one is kept as what it is.
    """
    pool, versions = cache.pool, sequence.states
    on_host = [len(sequence.host[-1])] if sequence.host else []
    wanted = [] if sequence.status is Status.PENDING else [states.units] * states.versions
    if [*map(len, versions)] != wanted or on_host not in ([], [states.units]):
        raise InvariantViolation(
            "I5", f"sequence {sequence.id} has states of {[*map(len, versions), *on_host]} units"
        )
    if len({unit for version in versions for unit in version}) != sum(wanted):
        raise InvariantViolation("I4", f"sequence {sequence.id} would write over its own state")
    for ahead in range(1, sequence.steps_in_flight + 1):
        for unit in versions[(sequence.turn + ahead) % states.versions]:
            if pool.refs[unit] != 1 or pool.content[unit] is not None:
                raise InvariantViolation(
                    "I4", f"sequence {sequence.id} writes a state to shared unit {unit}"
                )
    for version in versions:
        contents = {pool.content[unit] for unit in version}
        kinds = [pool.group_of(unit) for unit in version] if contents != {None} else []
        if len(contents) > 1 or (kinds and kinds != [*states.groups]):
            raise InvariantViolation(
                "I10", f"sequence {sequence.id}: a state of which the parts have other contents"
            )
    if versions and (content := pool.content[states.current(sequence)[0]]) is not None:
        end = sequence.computed // cache.block_size
        if sequence.computed % cache.block_size or content not in digests(
            sequence.hashes, end - 1, end
        ):
            raise InvariantViolation(
                "I10", f"sequence {sequence.id}: its state is found as that of other tokens"
            )


def _check_hashes(cache: PagedCache, sequence: Sequence) -> Iterator[int]:
    """Check that each digest of a sequence covers its own tokens, from the first token on."""
    size, step = cache.block_size, max(1, ENTRIES_PER_PART // ENTRIES_PER_DIGEST)
    start, first = root(cache.identity, sequence.request.salt), 0
    while cache.sharing and first < (end := min(first + step, sequence.registered)):
        chain = sequence.hashes[: first * DIGEST]
        extend_chain(chain, sequence.tokens, start, size, end * size)
        expected = digests(sequence.hashes, first, end)
        for i, digest in enumerate(digests(chain, first, end)):
            if digest != expected[i]:
                text = f"sequence {sequence.id}: hash {first + i} covers other tokens"
                raise InvariantViolation("I10", text)
            for group, table in zip(cache.groups, sequence.tables, strict=False):
                if not _may_hold(cache.pool, table[first + i], group.index, digest):
                    text = f"sequence {sequence.id}: block {first + i} holds other content"
                    raise InvariantViolation("I10", text)
        yield ENTRIES_PER_DIGEST * (end - first)
        first = end


def _may_hold(pool: BlockPool, unit: int, group: int, digest: bytes) -> bool:
    """Whether a table of the group may name the unit for a block of this digest."""
    if unit == NULL or pool.content[unit] is None:
        return True
    return pool.content[unit] == digest and pool.group_of(unit) == group
