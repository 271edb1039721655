"""The invariants that hold between any two steps, as checks: I1 to I14, as far as the scheduler's
state shows them. Between two steps one may be in flight: launched, and not collected.

Reads everything, changes nothing. The caller checks I8 and the events of I9; I9's state is checked
here.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping

from fairlead_runtime.cache.prefix import root
from fairlead_runtime.request.sequence import FINAL, BlockHash, Sequence, Status
from fairlead_runtime.scheduling.planner import State, plan_step
from fairlead_runtime.sizing.groups import NULL

UNITS_PER_PART = 256


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
    _check_pool(state)
    yield
    _check_references(state, live)
    yield
    _check_queues(state, live)
    yield
    for first in range(0, state.cache.pool.units, UNITS_PER_PART):
        _check_content(state, first)
        yield
    for number in list(live):
        if (sequence := live.get(number)) is not None:
            _check_sequence(state, sequence)
            yield
    in_flight = state.ended or any(sequence.steps_in_flight for sequence in live.values())
    if live and not in_flight and not plan_step(state).rows:
        raise InvariantViolation(
            "I12", f"{len(live)} sequences, but the next step would compute nothing"
        )


def _check_queues(state: State, live: Mapping[int, Sequence]) -> None:
    waiting = list(state.policy.candidates())
    queued = Counter([s.id for s in state.running] + [s.id for s in waiting])
    if queued != Counter(live.keys()):
        raise InvariantViolation("I7", f"queues hold {dict(queued)}, live are {sorted(live)}")
    if len(state.running) > state.limits.max_requests:
        raise InvariantViolation(
            "I7", f"{len(state.running)} sequences run, more than max_requests allows"
        )
    for sequence in state.running:
        if sequence.status not in (Status.PREFILLING, Status.DECODING) or not sequence.tables:
            raise InvariantViolation("I7", f"sequence {sequence.id} runs as {sequence.status}")
    for sequence in waiting:
        if sequence.steps_in_flight or sequence.planned_length != sequence.computed:
            raise InvariantViolation("I14", f"sequence {sequence.id} waits while it is in flight")
        if sequence.status is not Status.PENDING or sequence.tables:
            raise InvariantViolation(
                "I7", f"sequence {sequence.id} waits as {sequence.status} with blocks"
            )
        if sequence.computed and not sequence.host:
            raise InvariantViolation(
                "I5", f"sequence {sequence.id} waits with tokens computed and no blocks"
            )


def _check_pool(state: State) -> None:
    pool = state.cache.pool
    referenced = {unit for unit, refs in enumerate(pool.refs) if refs}
    free, cached = set(pool.free), set(pool.cached)
    if len(pool.free) + len(pool.cached) + len(referenced) != pool.units:
        counts = f"{len(pool.free)} free + {len(pool.cached)} cached + {len(referenced)} referenced"
        raise InvariantViolation("I1", f"{counts} do not add up to {pool.units}")
    if len(free) != len(pool.free) or free & referenced or cached & referenced or free & cached:
        raise InvariantViolation("I3", "a unit is in the free list twice, or free and in use")


def _check_references(state: State, live: Mapping[int, Sequence]) -> None:
    pool, host = state.cache.pool, state.cache.host
    referenced = {unit for unit, refs in enumerate(pool.refs) if refs}
    holders = (*live.values(), *state.ended.values())
    counted = Counter(u for s in holders for table in s.tables for u in table if u != NULL)
    if counted != Counter({unit: pool.refs[unit] for unit in referenced}):
        raise InvariantViolation("I2", "the reference counts differ from the block tables")
    on_host = [u for s in live.values() for table in s.host for u in table if u != NULL]
    if sorted(on_host + host.free) != list(range(host.units)):
        raise InvariantViolation("I1", "a host unit is lost, or two sequences hold it")
    for sequence in state.ended.values():
        if not sequence.steps_in_flight or sequence.status not in FINAL:
            raise InvariantViolation(
                "I14", f"sequence {sequence.id} holds blocks after its end, with no step in flight"
            )
    leak = referenced and not state.ended
    if not live and (leak or state.siblings or state.running or len(state.policy)):
        raise InvariantViolation(
            "I11", f"no sequence is live, but {len(referenced)} units are held"
        )


def _check_content(state: State, first: int) -> None:
    """Check the content of UNITS_PER_PART units."""
    pool = state.cache.pool
    for unit in range(first, min(first + UNITS_PER_PART, pool.units)):
        content = pool.content[unit]
        if content is None:
            if unit in pool.cached:
                raise InvariantViolation("I3", f"unit {unit} is cached without content")
            continue
        group, block = content
        if hashlib.sha256(block.parent + block.tokens).digest() != block.digest:
            raise InvariantViolation(
                "I10", f"the digest of unit {unit} is not the hash of its content"
            )
        if pool.find(group, block.digest) != unit or (
            pool.refs[unit] == 0 and unit not in pool.cached
        ):
            raise InvariantViolation(
                "I10", f"unit {unit} has content that is not in the index or cannot be evicted"
            )


def _check_sequence(state: State, sequence: Sequence) -> None:
    if not 0 <= sequence.computed < len(sequence.tokens):
        raise InvariantViolation(
            "I6",
            f"sequence {sequence.id} has {sequence.computed} of {len(sequence.tokens)} computed",
        )
    if sequence.status in FINAL or len(sequence.tokens) >= sequence.limit:
        raise InvariantViolation("I9", f"sequence {sequence.id} has ended but is still live")
    if (
        state.limits.policy in ("fifo", "prefill_first")
        and sequence.preemptions > 4 + sequence.seniors
    ):
        text = f"{sequence.preemptions} times with {sequence.seniors} seniors"
        raise InvariantViolation("I13", f"sequence {sequence.id} was preempted {text}")
    if sequence.tables:
        _check_tables(state, sequence, sequence.tables)
        _check_hashes(state, sequence)
    elif sequence.host:
        _check_tables(state, sequence, sequence.host)


def _check_tables(state: State, sequence: Sequence, tables: list[list[int]]) -> None:
    cache = state.cache
    for group, table in zip(cache.groups, tables, strict=True):
        if len(table) != cache.blocks(sequence.planned_length):
            computed, ahead = sequence.computed, sequence.computed_in_flight
            text = f"{len(table)} blocks for {computed} tokens and {ahead} in flight"
            raise InvariantViolation("I5", f"sequence {sequence.id}, group {group.index}: {text}")
        first = group.first_block(sequence.computed, cache.block_size)
        if any((unit == NULL) != (i < first) for i, unit in enumerate(table)):
            raise InvariantViolation(
                "I5", f"sequence {sequence.id}, group {group.index}: window from {first}"
            )
        if tables is sequence.tables:
            for unit in table[sequence.computed // cache.block_size :]:
                if cache.pool.refs[unit] != 1 or cache.pool.content[unit] is not None:
                    raise InvariantViolation(
                        "I4", f"sequence {sequence.id} would write into shared unit {unit}"
                    )


def _check_hashes(state: State, sequence: Sequence) -> None:
    """Check that each hash of a sequence covers its own tokens, from the first token on."""
    cache = state.cache
    size, parent = cache.block_size, root(cache.identity, sequence.request.salt)
    for i in range(sequence.registered if cache.sharing else 0):
        packed = array("q", sequence.tokens[i * size : (i + 1) * size]).tobytes()
        stamp = BlockHash(hashlib.sha256(parent + packed).digest(), parent, packed)
        if sequence.hashes[i] != stamp.digest:
            raise InvariantViolation("I10", f"sequence {sequence.id}: hash {i} covers other tokens")
        parent = stamp.digest
        for group, table in enumerate(sequence.tables):
            if table[i] != NULL and cache.pool.content[table[i]] not in (None, (group, stamp)):
                raise InvariantViolation(
                    "I10", f"sequence {sequence.id}: block {i} holds other content"
                )
