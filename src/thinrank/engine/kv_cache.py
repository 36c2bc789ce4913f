"""The KV cache: one pool of equal blocks, handed out to sequences by number.

Knows nothing about what a block holds or which request it serves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch

from ..config import BLOCK_SIZE, EngineConfig, ModelConfig
from ..device import device_memory
from ..errors import OptionError
from ..model.batch import KVLayer
from ..model.cost import kv_bytes_per_token

#: Bytes of main memory for the cache when the user names none: as vLLM on a CPU.
CPU_KV_CACHE_MEMORY = 4 * 2**30


class BlockPool:
    """How many hold each block, and which ones are free.

    A free block may still have contents that somebody wants to find again (`keep`). Others are handed out first, the
    one freed last before all, so that a small load stays in few; then those, the one freed longest ago first.
    on_evict: told the number of a kept block before it is handed out.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] = lambda block: None):
        self.num_blocks = num_blocks
        self.on_evict = on_evict
        self._holders = [0] * num_blocks
        self._kept = [False] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._free_kept: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free) + len(self._free_kept)

    def is_free(self, block: int) -> bool:
        return not self._holders[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks. The caller has looked at `num_free` first."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        return [self._take() for _ in range(count)]

    def keep(self, block: int) -> None:
        """Hand a held block out as late as possible once it is free."""
        assert self._holders[block], f"block {block} is free"
        self._kept[block] = True

    def share(self, blocks: list[int]) -> None:
        """Hold kept blocks, free or not, once more."""
        for block in blocks:
            assert self._kept[block], f"the contents of block {block} are not kept"
            if self.is_free(block):
                del self._free_kept[block]
            self._holders[block] += 1

    def free(self, blocks: list[int]) -> None:
        """Give blocks back, each as often as it was taken or shared. The last one is the first to be evicted."""
        for block in reversed(blocks):
            assert self._holders[block], f"block {block} is free already"
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if self._kept[block]:
                self._free_kept[block] = None
            else:
                self._free.append(block)

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._free_kept.popitem(last=False)
            self._kept[block] = False
            self.on_evict(block)
        self._holders[block] = 1
        return block


def blocks_for(tokens: int) -> int:
    """Blocks that this many tokens occupy."""
    return -(-tokens // BLOCK_SIZE)


def num_kv_blocks(
    config: ModelConfig, engine: EngineConfig, max_model_len: int, itemsize: int, device: torch.device
) -> int:
    """How many blocks the cache gets, at `itemsize` bytes an element; see `EngineConfig.kv_cache_memory`.

    Raises OptionError when the memory is less than one block.
    """
    block_bytes = BLOCK_SIZE * kv_bytes_per_token(config, itemsize)
    enough = engine.max_num_seqs * blocks_for(max_model_len)
    if engine.kv_cache_memory is not None:
        option, memory = "kv_cache_memory", engine.kv_cache_memory
    elif device.type == "cuda":
        torch.cuda.empty_cache()  # what PyTorch keeps of an engine that is gone is free too
        free, total = device_memory(device)
        option = "what gpu_memory_utilization leaves for keys and values"
        memory = int(engine.gpu_memory_utilization * total) - (total - free)
    else:
        option, memory = "the default on a CPU", CPU_KV_CACHE_MEMORY
    if memory < block_bytes:
        raise OptionError(
            f"{option} is {max(0, memory)} bytes, less than one block of {BLOCK_SIZE} tokens",
            f"this model needs {block_bytes} bytes a block",
        )
    return min(memory // block_bytes, enough)


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
