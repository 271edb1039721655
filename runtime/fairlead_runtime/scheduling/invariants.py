"""What must hold between any two steps, written down as checks: I1 to I13 as far as the core can
see them.

Reads everything, changes nothing. I8 and I9 (events) are the caller's to check; their state side is
here.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Mapping

from fairlead_runtime.cache.prefix import root
from fairlead_runtime.request import FINAL, Sequence, Status
from fairlead_runtime.scheduling.planner import State, plan_step
from fairlead_runtime.sizing.groups import NULL


class InvariantViolation(RuntimeError):  # noqa: N818 - it reports a state, not a failed call
    """A rule of the core is broken: a bug here, never the client's doing."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name


def check(state: State, live: Mapping[int, Sequence]) -> None:
    """Raise InvariantViolation unless every invariant holds."""
    _check_pool(state, live)
    _check_content(state)
    waiting = list(state.policy.candidates())
    queued = Counter([s.id for s in state.running] + [s.id for s in waiting])
    if queued != Counter(live.keys()):
        raise InvariantViolation("I7", f"queues hold {dict(queued)}, live are {sorted(live)}")
    for sequence in live.values():
        _check_sequence(state, sequence)
    for sequence in state.running:
        if sequence.status not in (Status.PREFILLING, Status.DECODING) or not sequence.tables:
            raise InvariantViolation("I7", f"sequence {sequence.id} runs as {sequence.status}")
        _check_tables(state, sequence, sequence.tables)
        _check_hashes(state, sequence)
    for sequence in waiting:
        if sequence.status is not Status.PENDING or sequence.tables:
            raise InvariantViolation(
                "I7", f"sequence {sequence.id} waits as {sequence.status} with blocks"
            )
        if sequence.host:
            _check_tables(state, sequence, sequence.host)
        elif sequence.computed:
            raise InvariantViolation(
                "I5", f"sequence {sequence.id} waits with tokens computed and no blocks"
            )
    if live and not plan_step(state).rows:
        raise InvariantViolation(
            "I12", f"{len(live)} sequences, but the next step would compute nothing"
        )


def _check_pool(state: State, live: Mapping[int, Sequence]) -> None:
    pool, host = state.cache.pool, state.cache.host
    referenced = {unit for unit, refs in enumerate(pool.refs) if refs}
    free, cached = set(pool.free), set(pool.cached)
    if len(pool.free) + len(pool.cached) + len(referenced) != pool.units:
        parts = f"{len(pool.free)} free + {len(pool.cached)} cached + {len(referenced)} referenced"
        raise InvariantViolation("I1", f"{parts} are not {pool.units}")
    if len(free) != len(pool.free) or free & referenced or cached & referenced or free & cached:
        raise InvariantViolation("I3", "a unit is in the free list twice, or free and in use")
    counted = Counter(u for s in live.values() for table in s.tables for u in table if u != NULL)
    if counted != Counter({unit: pool.refs[unit] for unit in referenced}):
        raise InvariantViolation("I2", "reference counts differ from the tables")
    on_host = [u for s in live.values() for table in s.host for u in table if u != NULL]
    if sorted(on_host + host.free) != list(range(host.units)):
        raise InvariantViolation("I1", "host units are lost or held twice")
    if not live and (referenced or state.families or state.running or len(state.policy)):
        raise InvariantViolation("I11", f"at rest {len(referenced)} units are held")


def _check_content(state: State) -> None:
    pool = state.cache.pool
    for unit, content in enumerate(pool.content):
        if content is None:
            if unit in pool.cached:
                raise InvariantViolation("I3", f"unit {unit} is cached without content")
            continue
        group, block = content
        if hashlib.sha256(block.parent + block.tokens).digest() != block.digest:
            raise InvariantViolation("I10", f"unit {unit}'s stamp is not its hash")
        if pool.find(group, block.digest) != unit or (
            pool.refs[unit] == 0 and unit not in pool.cached
        ):
            raise InvariantViolation(
                "I10", f"unit {unit} has content that cannot be found or evicted"
            )


def _check_sequence(state: State, sequence: Sequence) -> None:
    if not 0 <= sequence.computed < len(sequence.tokens):
        raise InvariantViolation(
            "I6", f"sequence {sequence.id}: {sequence.computed} of {len(sequence.tokens)}"
        )
    if sequence.status in FINAL or len(sequence.tokens) >= sequence.limit:
        raise InvariantViolation("I9", f"sequence {sequence.id} is over but has not left")
    if (
        state.limits.policy in ("fifo", "prefill_first")
        and sequence.preemptions > 4 + sequence.seniors
    ):
        seen = f"{sequence.preemptions} times with {sequence.seniors} seniors"
        raise InvariantViolation("I13", f"sequence {sequence.id} was preempted {seen}")


def _check_tables(state: State, sequence: Sequence, tables: list[list[int]]) -> None:
    cache = state.cache
    for group, table in zip(cache.groups, tables, strict=True):
        if len(table) != cache.blocks(sequence.computed):
            held = f"{len(table)} blocks for {sequence.computed} tokens"
            raise InvariantViolation("I5", f"sequence {sequence.id}, group {group.index}: {held}")
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
    """What is found by hash in a sequence's table must be its own tokens, from the first on."""
    cache = state.cache
    size, parent = cache.block_size, root(cache.identity, sequence.request.salt)
    for i in range(sequence.registered if cache.sharing else 0):
        stamp = sequence.hashes[i]
        packed = array("q", sequence.tokens[i * size : (i + 1) * size]).tobytes()
        if stamp.parent != parent or stamp.tokens != packed:
            raise InvariantViolation("I10", f"sequence {sequence.id}: hash {i} is of other tokens")
        parent = stamp.digest
        for group, table in enumerate(sequence.tables):
            if table[i] != NULL and cache.pool.content[table[i]] not in (None, (group, stamp)):
                raise InvariantViolation(
                    "I10", f"sequence {sequence.id}: block {i} holds other content"
                )
