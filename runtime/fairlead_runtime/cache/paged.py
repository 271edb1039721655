"""The block tables of sequences: how sequences take, share and release blocks.

    table of a full group      [ 7 | 3 | 9 | 4 ]   ceil(computed / block_size) entries,
                                                   plus the step's growth
    table of a window group    [ - | - | 8 | 2 ]   NULL where no later query can see the block

Owns every change to tables, to the pool and to host units. Counting methods change nothing. The
others raise when the pool lacks what a plan counted on. Does not decide which sequences run.
"""

from collections import abc
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

from fairlead_runtime.cache.blocks import BlockPool, PoolError
from fairlead_runtime.cache.offload import HostPool
from fairlead_runtime.cache.prefix import (
    DIGEST,
    digests,
    extend_chain,
    leading_units,
    longest_hit,
    root,
)
from fairlead_runtime.cache.states import StateUnits
from fairlead_runtime.request.sequence import Request, Sequence
from fairlead_runtime.sizing.groups import NULL, LayerGroup, pool_units

Pairs = list[tuple[int, int]]


class Hit(NamedTuple):
    """A cached prefix of ``tokens`` tokens, with one table per group and the units of the ``state``
    there. It counts as long as the pool has this ``version``; later looks start from it.
    """

    tokens: int
    tables: list[list[int]]
    version: int
    losses: int = 0  # of the pool by then
    walked: int = 0  # tokens whose blocks this look compared
    state: abc.Sequence[int] = ()
    branch: int = 0  # tokens whose keys are there, with or without a state at their end


class PagedCache:
    """All device and host units of one engine, and the sequences that hold them."""

    def __init__(
        self,
        groups: abc.Sequence[LayerGroup],
        *,
        num_blocks: int,
        block_size: int,
        max_batch_tokens: int,
        sharing: bool,
        host_units: int,
        identity: bytes,
        state_units: int = 0,
        state_versions: int = 2,
        shares_answers: bool = True,
    ) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        self.sharing = sharing
        # Else a generated token has other keys and states than the same one in a prompt.
        self.shares_answers = shares_answers
        self.identity = identity
        units = pool_units(num_blocks, len(groups))
        self.pool = BlockPool(units, len(groups) + state_units, state_units)
        # None: no layer keeps a state.
        self.states = (
            StateUnits(self.pool, len(groups), state_units, state_versions, block_size)
            if state_units
            else None
        )
        self.state_need = 0 if self.states is None else self.states.held  # of a running sequence
        self.host = HostPool(host_units)
        # By id, the last look of a waiting sequence that found something.
        self._hits: dict[int, Hit] = {}
        self._windowed = tuple(g for g in self.groups if g.window is not None)
        # The computed tokens, modulo a block's, at which the last one has filled a block, or a
        # window has passed one.
        self.turns = frozenset({0, *((g.window - 1) % block_size for g in groups if g.window)})
        # The most blocks that a window group holds: window W and a chunk of c tokens touch
        # W - 1 + c positions, which may start inside a block. None: no window.
        self._window_blocks = tuple(
            None if g.window is None else self.blocks(g.window - 1 + max_batch_tokens) + 1
            for g in self.groups
        )

    # -- counting

    def blocks(self, tokens: int) -> int:
        """Blocks per group for ``tokens`` tokens, the last one possibly partial."""
        return -(-tokens // self.block_size)

    def units(self, start: int, end: int) -> int:
        """Units, over all groups, to grow from ``start`` computed tokens to ``end``."""
        size = self.block_size
        return (-(-end // size) + -start // size) * len(self.groups)

    def growth(self, sequence: Sequence, start: int) -> int:
        """Units, beside its states, to compute all its tokens from ``start`` on and one more block,
        but none beyond its limit.
        """
        target = min(self.blocks(len(sequence.tokens)) + 1, self.blocks(sequence.limit - 1))
        more = target - self.blocks(start)
        return sum(more if span is None else min(more, span) for span in self._window_blocks)

    def most_units(self, sequence: Sequence) -> int:
        """The most units that the sequence can hold: those at its limit."""
        blocks = self.blocks(sequence.limit - 1)
        keys = sum(blocks if span is None else min(blocks, span) for span in self._window_blocks)
        return keys + self.state_need

    def units_held(self, sequence: Sequence) -> int:
        """Units in the sequence's tables and states, on the device or in host memory."""
        keys = sum(
            len(table) - group.first_block(sequence.computed, self.block_size)
            for group, table in zip(self.groups, sequence.host or sequence.tables, strict=False)
        )
        if self.states is None:
            return keys
        return keys + (self.states.units if sequence.host else sum(map(len, sequence.states)))

    def start_units(self, sequence: Sequence) -> int:
        """Units that an offloaded sequence takes when it comes back: all versions of its states,
        too.
        """
        held = self.units_held(sequence)
        return held if self.states is None else held - self.states.units + self.states.held

    def units_offloaded(self, sequence: Sequence) -> int:
        """Units that one on the device takes in host memory: of its states the current one."""
        held = self.units_held(sequence)
        return held if self.states is None else held - self.states.held + self.states.units

    def renewal(self, sequence: Sequence, dropped: abc.Mapping[int, int]) -> int:
        """``StateUnits.renewal`` of a sequence's next step."""
        return 0 if self.states is None else self.states.renewal(sequence, dropped)

    def units_freed(self, sequence: Sequence, dropped: dict[int, int]) -> int:
        """Units that become available when the sequence is released. ``dropped`` counts, by unit,
        the references that earlier releases drop; those of this sequence are added to it.
        """
        count = 0
        for unit in _units_of(chain(sequence.tables, sequence.states)):
            dropped[unit] = dropped.get(unit, 0) + 1
            count += self.pool.refs[unit] == dropped[unit]
        return count

    def hit(self, sequence: Sequence) -> Hit:
        """The longest cached prefix of its tokens that leaves at least one token to compute; none
        for a sequence that must compute its prompt's logits.
        """
        if not self.sharing or sequence.scores_prompt:
            return Hit(0, [[] for _ in self.groups], self.pool.version)
        # Extending the hash chain here does not change a decision: the hashes of tokens never
        # change. The last token is left out: its keys are written only when the next is predicted.
        until = len(sequence.tokens) - 1
        until = min(until, self._shared_end(sequence))
        last, pool = self._hits.get(sequence.id), self.pool
        if last is not None and last.version == pool.version:
            return last
        self._extend_hashes(sequence, until)
        hashes, end = sequence.hashes, until // self.block_size
        known = self._known_units(hashes, last)
        leading = leading_units(pool, self.groups, hashes, end, known)
        find = None if self.states is None else self.states.find
        length, tables, state = longest_hit(
            pool, self.groups, self.block_size, hashes, end, leading, find
        )
        size, walked = self.block_size, end  # by windows or states, which search from the end
        if self.states is None and len(self._windowed) < len(self.groups):
            walked = max(len(u) - len(k) for u, k in zip(leading, known, strict=True))
        branch = 0
        if self.states is not None:
            full = (len(leading[g.index]) for g in self.groups if g.window is None)
            branch = min(full, default=0) * size
        return Hit(length * size, tables, pool.version, pool.losses, walked * size, state, branch)

    def _known_units(self, hashes: bytearray, last: Hit | None) -> list[list[int]]:
        """By full group, the units of the last look before the first block that has left the index
        since.
        """
        lost = None if last is None else self.pool.lost_since(last.losses)
        if last is None or lost is None:
            return [[] for _ in self.groups]
        ends = [
            len(table) if group.window is None else 0
            for group, table in zip(self.groups, last.tables, strict=True)
        ]
        for group, block, digest in lost:
            if block < ends[group] and hashes.startswith(digest, block * DIGEST):
                ends[group] = block
        return [table[:end] for table, end in zip(last.tables, ends, strict=True)]

    def next_block(self, sequence: Sequence, start: int, *, keep: int = 0) -> bytes | None:
        """The hash of the block that holds token ``start``. None when the sequence, without its
        last ``keep`` tokens, does not fill that block, or when blocks are not shared.
        """
        index = start // self.block_size
        end = (index + 1) * self.block_size
        if not self.sharing or end > min(len(sequence.tokens) - keep, self._shared_end(sequence)):
            return None
        self._extend_hashes(sequence, end)
        return bytes(sequence.hashes[index * DIGEST : (index + 1) * DIGEST])

    def _shared_end(self, sequence: Sequence) -> int:
        """How many of its first tokens others may find, or it may find of others."""
        return len(sequence.tokens) if self.shares_answers else sequence.prompt_len

    def has_none(self, sequence: Sequence) -> bool:
        """Whether no block of its tokens is cached: a hit needs the first one, but for windows."""
        if not self.sharing or sequence.scores_prompt:
            return True
        first = self.next_block(sequence, 0, keep=1)
        if first is None or self._windowed or not self.groups:
            return first is None
        return not self._has_keys(first)

    def has(self, digest: bytes) -> bool:
        """Whether every group has a block with this content, and where there are states there is
        the one at its end.
        """
        states = self.states
        return self._has_keys(digest) and (states is None or bool(states.find(digest)))

    def _has_keys(self, digest: bytes) -> bool:
        return all(self.pool.find(group.index, digest) is not None for group in self.groups)

    def evictable(self, hit: Hit) -> list[int]:
        """Units of the hit's tables without a reference. Sharing them makes them unavailable to
        others.
        """
        refs = self.pool.refs
        return [u for table in hit.tables for u in table if not refs[u] and u != NULL]

    def can_fork(self, sibling: Sequence, tokens: int) -> bool:
        """Whether the sibling still holds all blocks that a query at ``tokens`` can see. It keeps
        no state of them: snapshots do.
        """
        if sibling.computed < tokens or not sibling.tables or self.states is not None:
            return False
        return all(
            NULL not in table[group.first_block(tokens, self.block_size) : self.blocks(tokens)]
            for group, table in zip(self.groups, sibling.tables, strict=True)
        )

    def prompt_hashes(
        self, request: Request, pause: abc.Callable[[], None] | None = None
    ) -> bytearray:
        """The digests of the prompt's full blocks; none when blocks are not shared. Reads what
        never changes: any thread may call it, with a ``pause`` for the others.
        """
        hashes = bytearray()
        if self.sharing:
            start = root(self.identity, request.salt)
            length = len(request.prompt)
            extend_chain(hashes, request.prompt, start, self.block_size, length, pause)
        return hashes

    # -- changing

    def remember(self, sequence: Sequence, hit: Hit) -> None:
        """Keep a waiting sequence's look at the cache: the next one compares only what is new."""
        if hit.tokens:
            self._hits[sequence.id] = hit._replace(walked=0)

    def adopt(self, sequence: Sequence, hit: Hit) -> None:
        """Start with a cached prefix: add a reference to each of its units. ``start_states``
        follows.
        """
        self._hits.pop(sequence.id, None)
        self.pool.share(_units_of(hit.tables))
        if hit.state:
            self.pool.share(hit.state)
            sequence.states = [[*hit.state]]
        sequence.tables = [table[:] for table in hit.tables]
        sequence.branch = hit.branch
        sequence.computed = hit.tokens
        sequence.registered = hit.tokens // self.block_size

    def start_states(self, sequence: Sequence) -> None:
        """Complete the states of one that has adopted a prefix, if the model has any."""
        if self.states is not None:
            self.states.start(sequence, *sequence.states or [[]])

    def fork(self, sequence: Sequence, sibling: Sequence, tokens: int) -> None:
        """Start with the sibling's full blocks of the first ``tokens`` tokens; ``copy_tail`` adds
        the partial one.
        """
        if not self.can_fork(sibling, tokens):
            raise PoolError(f"sequence {sibling.id} no longer holds {tokens} tokens to fork from")
        full = tokens // self.block_size
        self._hits.pop(sequence.id, None)
        sequence.tables = []
        for group, table in zip(self.groups, sibling.tables, strict=True):
            first = group.first_block(tokens, self.block_size)
            sequence.tables.append([NULL] * first + table[first:full])
            self.pool.share(table[first:full])
        sequence.computed = tokens
        sequence.registered = full
        if len(sequence.hashes) < full * DIGEST:
            sequence.hashes = sibling.hashes[: full * DIGEST]

    def copy_tail(self, sequence: Sequence, sibling: Sequence) -> Pairs:
        """Take units for a fork's partial last block. Returns the copies that fill them with the
        sibling's content (copy on write).
        """
        full = sequence.computed // self.block_size
        if sequence.computed % self.block_size == 0:
            return []
        self.grow(sequence, sequence.computed)
        return [
            (source[full], target[full])
            for source, target in zip(sibling.tables, sequence.tables, strict=True)
        ]

    def offload(self, sequence: Sequence) -> Pairs:
        """Move to host units; ``computed`` stays. Returns the copies, which must be made before the
        device units are written again.
        """
        tables = sequence.tables
        if self.states is not None:
            tables = [*tables, self.states.current(sequence)]
        device = list(_units_of(tables))
        pairs = list(zip(device, self.host.take(len(device)), strict=True))
        self._release_units(sequence)
        sequence.host, sequence.tables = _map_units(tables, pairs), []
        return pairs

    def restore(self, sequence: Sequence) -> Pairs:
        """Move back from host units; returns the copies. Its blocks are registered again: some of
        its content may have been evicted.
        """
        host = list(_units_of(sequence.host))
        pairs = list(zip(host, self.pool.take(len(host)), strict=True))
        self.host.release(host)
        sequence.tables, sequence.host = _map_units(sequence.host, pairs), []
        if self.states is not None:
            self.states.start(sequence, sequence.tables.pop())
        sequence.registered = 0
        return pairs

    def grow(self, sequence: Sequence, end: int) -> None:
        """Take blocks for ``tokens[:end]`` in every group."""
        count = self.blocks(end) - len(sequence.tables[0])
        for table in sequence.tables:
            table.extend(self.pool.take(count))

    def finish_forward(self, sequence: Sequence) -> None:
        """After the forward pass, register full blocks and release those before a window."""
        computed = sequence.computed
        full = min(computed, self._shared_end(sequence)) // self.block_size
        if self.sharing and sequence.registered < full:
            self._extend_hashes(sequence, computed)
            contents = digests(sequence.hashes, sequence.registered, full)
            for index, table in enumerate(sequence.tables):
                units = table[sequence.registered : full]
                for block, (unit, digest) in enumerate(
                    zip(units, contents, strict=True), sequence.registered
                ):
                    if unit != NULL:
                        self.pool.register(unit, index, digest, block)
            sequence.registered = full
            if self.states is not None and computed == full * self.block_size:
                self.states.keep(sequence, full)
        for group in self._windowed:
            table = sequence.tables[group.index]
            at = group.first_block(computed, self.block_size) - 1
            while at >= 0 and table[at] != NULL:
                self.pool.release((table[at],))
                table[at] = NULL
                at -= 1

    def release(self, sequence: Sequence, *, forget: bool = False) -> None:
        """Release all units. Registered content stays in the index until its unit is taken, or is
        removed now if ``forget``.
        """
        if forget:
            for digest in digests(sequence.hashes, 0, sequence.registered):
                if self.states is not None:
                    self.states.drop(digest)
                for group in self.groups:
                    unit = self.pool.find(group.index, digest)
                    if unit is not None:
                        self.pool.forget(unit)
        self._hits.pop(sequence.id, None)
        self._release_units(sequence)
        self.host.release(list(_units_of(sequence.host)))
        sequence.tables, sequence.host = [], []
        sequence.computed = sequence.registered = 0

    def _release_units(self, sequence: Sequence) -> None:
        # Release tails first, over all groups together: the pool evicts in this order, so prefixes
        # stay longest.
        tails = zip(*(reversed(table) for table in sequence.tables), strict=True)
        if self.states is None:
            units: Iterable[int] = chain.from_iterable(tails)
        else:
            units = self.states.released_with(sequence, [*tails])
        self.pool.release([unit for unit in units if unit != NULL])
        sequence.states = []

    def _extend_hashes(self, sequence: Sequence, until: int) -> None:
        if len(sequence.hashes) < until // self.block_size * DIGEST:
            start = root(self.identity, sequence.request.salt)
            extend_chain(sequence.hashes, sequence.tokens, start, self.block_size, until)


def _units_of(tables: Iterable[list[int]]) -> Iterable[int]:
    return (unit for table in tables for unit in table if unit != NULL)


def _map_units(tables: list[list[int]], pairs: Pairs) -> list[list[int]]:
    target = {**dict(pairs), NULL: NULL}
    return [[target[unit] for unit in table] for table in tables]
