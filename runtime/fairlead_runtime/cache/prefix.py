"""Content hashes of full blocks, and the longest prefix that every layer group has in the cache.

The chain starts with sha256 over (model identity, salt) and continues with (parent, tokens) for
each block. Equal digests therefore mean equal tokens from the first on, for the same model and
tenant. Reads the pool, never changes it.
"""

import hashlib
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter

from fairlead_runtime.cache.blocks import BlockPool
from fairlead_runtime.sizing.groups import NULL, LayerGroup

DIGEST = 32  # bytes of a digest
# Hashes after which other threads may have the interpreter's lock, which hashing a block keeps: the
# engine's would wait 5 ms for it, time and again.
YIELD_BLOCKS = 128


def root(identity: bytes, salt: bytes) -> bytes:
    """The parent of a first block: all that decides a block's content beside its tokens. The
    ``identity`` is what a server has for all requests, the ``salt`` what a request adds; whatever
    else one may add belongs here. It covers the lengths: (b"ab", b"c") is not (b"a", b"bc").
    """
    framed = struct.pack("<QQ", len(identity), len(salt)) + identity + salt
    return hashlib.sha256(framed).digest()


def extend_chain(
    hashes: bytearray,
    tokens: Sequence[int],
    start: bytes,
    block_size: int,
    until: int,
    pause: Callable[[], None] | None = None,
) -> None:
    """Append the missing digests of the full blocks of ``tokens[:until]``, DIGEST bytes each. They
    may be those of a million tokens, so they are no objects. ``pause``: what lets other threads go
    on, where this one is not theirs.
    """
    parent, size = bytes(hashes[-DIGEST:]) or start, 8 * block_size
    packed = pack(tokens[len(hashes) // DIGEST * block_size : until // block_size * block_size])
    missing: list[bytes] = []
    for at in range(0, len(packed), size):
        if pause is not None and len(missing) % YIELD_BLOCKS == YIELD_BLOCKS - 1:
            pause()
        parent = hashlib.sha256(parent + packed[at : at + size]).digest()
        missing.append(parent)
    hashes += b"".join(missing)


def each_digest(hashes: bytes | bytearray, first: int, end: int) -> Iterator[bytes]:
    """Those of the blocks from ``first`` to before ``end``, each made when it is asked for."""
    part = memoryview(hashes)[first * DIGEST : end * DIGEST]
    return map(itemgetter(0), struct.iter_unpack(f"{DIGEST}s", part))


def digests(hashes: bytes | bytearray, first: int, end: int) -> list[bytes]:
    """The same as a list."""
    return list(each_digest(hashes, first, end))


def pack(tokens: Sequence[int]) -> bytes:
    """Token ids, which are below 2**31, in 8 bytes each."""
    # A loop over a million ids would take 30 ms.
    packed = bytearray(8 * len(tokens))
    memoryview(packed).cast("i")[::2] = memoryview(array("i", tokens))
    return bytes(packed)


def leading_units(
    pool: BlockPool,
    groups: Sequence[LayerGroup],
    hashes: bytes | bytearray,
    end: int,
    known: Sequence[list[int]],
) -> list[list[int]]:
    """By full group, its units of the leading blocks before ``end``, up to the first block that it
    lacks; those of ``known`` are not looked up. Empty for a window group.
    """
    return [
        units + pool.find_leading(group.index, each_digest(hashes, len(units), end))
        if group.window is None
        else []
        for group, units in zip(groups, known, strict=True)
    ]


def longest_hit(
    pool: BlockPool,
    groups: Sequence[LayerGroup],
    block_size: int,
    hashes: bytes | bytearray,
    end: int,
    leading: Sequence[list[int]],
    find_state: Callable[[bytes], list[int]] | None = None,
) -> tuple[int, list[list[int]], list[int]]:
    """The length in blocks, tables and state of the longest prefix of ``end`` blocks from which all
    groups can continue.

    A full group needs the whole chain, its ``leading_units``, a window group only the blocks that
    the next query can see; entries before the window are NULL. Each window group shortens the hit
    in turn until none does (after vLLM's hybrid manager). So do states, which are there at the end
    of some blocks: ``find_state`` gives the units of one by the block's digest.
    """
    state: list[int] = []
    full = [len(leading[group.index]) for group in groups if group.window is None]
    length, stable = min(full, default=end), False
    while not stable:
        stable = True
        for group in groups:
            if group.window is not None:
                group_length = _longest_window_hit(pool, group, block_size, hashes, length)
                if group_length < length:
                    length, stable = group_length, False
        if find_state is not None:
            at = length
            while at and not (state := find_state(bytes(hashes[(at - 1) * DIGEST : at * DIGEST]))):
                at -= 1
            if at < length:
                length, stable = at, False
    tables: list[list[int]] = []
    for group in groups:
        if group.window is None:
            tables.append(leading[group.index][:length])
        else:
            first = group.first_block(length * block_size, block_size)
            units = pool.find_leading(group.index, each_digest(hashes, first, length))
            tables.append([NULL] * first + units)
    return length, tables, state if length else []


def _longest_window_hit(
    pool: BlockPool, group: LayerGroup, block_size: int, hashes: bytes | bytearray, length: int
) -> int:
    """The longest hit of a window group that is no longer than ``length`` blocks."""
    end = at = length  # blocks at..end-1 are cached
    while end and at > group.first_block(end * block_size, block_size):
        at -= 1
        if pool.find(group.index, bytes(hashes[at * DIGEST : (at + 1) * DIGEST])) is None:
            end = at
    return end
