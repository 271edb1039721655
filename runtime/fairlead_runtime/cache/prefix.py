"""Content hashes of full blocks, and the longest prefix that every layer group has in the cache.

The chain starts with sha256 over (model identity, salt) and continues with (parent, tokens) for
each block. Equal digests therefore mean equal tokens from the first on, for the same model and
tenant. Reads the pool, never changes it.
"""

import hashlib
import struct
from array import array
from collections.abc import Sequence

from fairlead_runtime.cache.blocks import BlockPool
from fairlead_runtime.sizing.groups import NULL, LayerGroup


def root(identity: bytes, salt: bytes) -> bytes:
    """The parent of a first block. It covers the lengths: (b"ab", b"c") is not (b"a", b"bc")."""
    framed = struct.pack("<QQ", len(identity), len(salt)) + identity + salt
    return hashlib.sha256(framed).digest()


def extend_chain(
    hashes: list[bytes], tokens: Sequence[int], start: bytes, block_size: int, until: int
) -> None:
    """Append the missing digests of the full blocks of ``tokens[:until]``. A sequence keeps digests
    only, since they may be those of a million tokens; the rest of a BlockHash follows from them.
    """
    for index in range(len(hashes), until // block_size):
        parent, packed = link(hashes, tokens, start, block_size, index)
        hashes.append(hashlib.sha256(parent + packed).digest())


def link(
    hashes: Sequence[bytes], tokens: Sequence[int], start: bytes, block_size: int, index: int
) -> tuple[bytes, bytes]:
    """The bytes that the digest of block ``index`` covers: its parent, and its tokens in 8 bytes
    each.
    """
    at = index * block_size
    packed = array("q", tokens[at : at + block_size]).tobytes()
    return hashes[index - 1] if index else start, packed


def longest_hit(
    pool: BlockPool, groups: Sequence[LayerGroup], block_size: int, hashes: Sequence[bytes]
) -> list[list[int]]:
    """Tables of the longest prefix from which all groups can continue.

    A full group needs the whole chain, a window group only the blocks that the next query can see;
    entries before the window are NULL. Each group shortens the hit in turn until none does (after
    vLLM's hybrid manager).
    """
    length, stable = len(hashes), False
    while not stable:
        stable = True
        for group in groups:
            group_length = _longest_group_hit(pool, group, block_size, hashes, length)
            if group_length < length:
                length, stable = group_length, False
    tables: list[list[int]] = []
    for group in groups:
        first = group.first_block(length * block_size, block_size)
        units = [pool.find(group.index, digest) for digest in hashes[first:length]]
        tables.append([NULL] * first + [unit for unit in units if unit is not None])
    return tables


def _longest_group_hit(
    pool: BlockPool, group: LayerGroup, block_size: int, hashes: Sequence[bytes], length: int
) -> int:
    """The longest hit of one group that is no longer than ``length`` blocks."""
    if group.window is None:
        for i in range(length):
            if pool.find(group.index, hashes[i]) is None:
                return i
        return length
    end = at = length  # blocks at..end-1 are cached
    while end and at > group.first_block(end * block_size, block_size):
        at -= 1
        if pool.find(group.index, hashes[at]) is None:
            end = at
    return end
