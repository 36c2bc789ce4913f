"""The KV cache: one pool of equal blocks, handed out to sequences by number.

Knows nothing about what a block holds or which request it serves.
"""

from __future__ import annotations

import torch

from ..config import BLOCK_SIZE, EngineConfig, ModelConfig
from ..errors import OptionError
from ..model.batch import KVLayer
from ..model.cost import kv_bytes_per_token

#: Memory for the cache when the user names none.
DEFAULT_KV_CACHE_MEMORY = 2**30


class BlockPool:
    """Which blocks are free. The block freed last is handed out first, so that a small load stays in few."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_free = [True] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks. The caller has looked at `num_free` first."""
        assert count <= len(self._free), f"{count} blocks wanted, {len(self._free)} free"
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._is_free[block] = False
        return blocks

    def free(self, blocks: list[int]) -> None:
        """Give blocks back, each exactly once."""
        for block in reversed(blocks):
            assert not self._is_free[block], f"block {block} is free already"
            self._is_free[block] = True
            self._free.append(block)


def blocks_for(tokens: int) -> int:
    """Blocks that this many tokens occupy."""
    return -(-tokens // BLOCK_SIZE)


def num_kv_blocks(config: ModelConfig, engine: EngineConfig, max_model_len: int, itemsize: int) -> int:
    """How many blocks the cache gets, at `itemsize` bytes an element; see `EngineConfig.kv_cache_memory`.

    Raises OptionError when the memory is less than one block.
    """
    block_bytes = BLOCK_SIZE * kv_bytes_per_token(config, itemsize)
    enough = engine.max_num_seqs * blocks_for(max_model_len)
    if engine.kv_cache_memory is None:
        return max(1, min(DEFAULT_KV_CACHE_MEMORY // block_bytes, enough))
    count = min(engine.kv_cache_memory // block_bytes, enough)
    if count == 0:
        raise OptionError(
            f"kv_cache_memory is {engine.kv_cache_memory} bytes, less than one block of {BLOCK_SIZE} tokens",
            f"this model needs {block_bytes} bytes a block",
        )
    return count


def allocate_kv_cache(
    config: ModelConfig, num_blocks: int, dtype: torch.dtype, device: torch.device
) -> list[KVLayer]:
    """Uninitialised blocks for every layer. On a CPU the pages are committed when first written."""
    shape = (num_blocks, config.num_key_value_heads, BLOCK_SIZE, config.head_dim)
    return [
        KVLayer(
            torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)
        )
        for _ in range(config.num_hidden_layers)
    ]
