"""Finds the blocks of earlier sequences that begin with the same tokens.

A full block is known by a hash of all tokens up to its end, so equal hashes mean equal keys and values. Knows nothing
about scheduling; `BlockPool` decides which contents survive.
"""

from __future__ import annotations

from array import array
from hashlib import sha256

from ..config import BLOCK_SIZE
from .kv_cache import BlockPool
from .sequence import Sequence


class PrefixCache:
    """queries, hits: prompt tokens that were looked up, and those of them that were found."""

    def __init__(self, pool: BlockPool):
        self.queries = 0
        self.hits = 0
        self._pool = pool
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        pool.on_evict = self._forget

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._block_of)

    def find(self, sequence: Sequence) -> list[int]:
        """The longest run of blocks that the sequence begins with; its last token is in none of them.

        Nobody holds them on its behalf yet.
        """
        found: list[int] = []
        if sequence.skips_prefix_cache:
            return found
        for block_hash in block_hashes(sequence, (len(sequence.token_ids) - 1) // BLOCK_SIZE):
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def insert(self, sequence: Sequence) -> None:
        """Make the full blocks whose keys and values are computed findable. Of equal ones the first counts."""
        full = sequence.num_computed // BLOCK_SIZE
        if full <= sequence.num_shared_blocks:
            return
        hashes = block_hashes(sequence, full)
        for index in range(sequence.num_shared_blocks, full):
            if hashes[index] not in self._block_of:
                block = sequence.block_table[index]
                self._block_of[hashes[index]] = block
                self._hash_of[block] = hashes[index]
                self._pool.keep(block)
        sequence.num_shared_blocks = full

    def _forget(self, block: int) -> None:
        del self._block_of[self._hash_of.pop(block)]


def block_hashes(sequence: Sequence, count: int) -> list[bytes]:
    """Hashes of the first `count` blocks, all of them full: SHA-256 of the hash before, which starts as that of the
    salt, and the token ids as int64."""
    hashes = sequence.block_hashes
    for index in range(len(hashes), count):
        parent = hashes[-1] if hashes else sha256(sequence.cache_salt.encode()).digest()
        tokens = sequence.token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
        hashes.append(sha256(parent + array("q", tokens).tobytes()).digest())
    return hashes[:count]
