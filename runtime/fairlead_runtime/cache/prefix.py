"""Content hashes of full blocks, and the longest prefix that every layer group still has.

The chain is sha256 over (salt, model identity) at its root, then (parent, tokens) block by block,
so equal digests mean equal tokens from the first on, for the same model and tenant. Reads the pool,
never changes it.
"""

import hashlib
import struct
from array import array
from collections.abc import Sequence

from fairlead_runtime.cache.blocks import BlockPool
from fairlead_runtime.request import BlockHash
from fairlead_runtime.sizing.groups import NULL, LayerGroup


def root(identity: bytes, salt: bytes) -> bytes:
    """The parent of a first block. Lengths are framed: (b"ab", b"c") and (b"a", b"bc") differ."""
    framed = struct.pack("<QQ", len(identity), len(salt)) + identity + salt
    return hashlib.sha256(framed).digest()


def extend_chain(
    hashes: list[BlockHash], tokens: Sequence[int], start: bytes, block_size: int, until: int
) -> None:
    """Append the hashes of the full blocks among ``tokens[:until]`` that are missing."""
    parent = hashes[-1].digest if hashes else start
    for at in range(len(hashes) * block_size, until - block_size + 1, block_size):
        packed = array("q", tokens[at : at + block_size]).tobytes()
        digest = hashlib.sha256(parent + packed).digest()
        hashes.append(BlockHash(digest, parent, packed))
        parent = digest


def longest_hit(
    pool: BlockPool, groups: Sequence[LayerGroup], block_size: int, hashes: Sequence[BlockHash]
) -> list[list[int]]:
    """Tables of the longest prefix that all groups can continue from.

    A full group needs the whole chain, a window group only the blocks that the next query can see;
    entries before the window are NULL. Groups shorten each other's hit until none does (after
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
        units = [pool.find(group.index, h.digest) for h in hashes[first:length]]
        tables.append([NULL] * first + [unit for unit in units if unit is not None])
    return tables


def _longest_group_hit(
    pool: BlockPool, group: LayerGroup, block_size: int, hashes: Sequence[BlockHash], length: int
) -> int:
    """The longest hit of one group that is no longer than ``length`` blocks."""
    if group.window is None:
        for i in range(length):
            if pool.find(group.index, hashes[i].digest) is None:
                return i
        return length
    end = at = length  # blocks at..end-1 are there
    while end and at > group.first_block(end * block_size, block_size):
        at -= 1
        if pool.find(group.index, hashes[at].digest) is None:
            end = at
    return end
