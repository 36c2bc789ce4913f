"""Invariants of the block pool, and how many blocks an engine gets."""

import random
from dataclasses import replace

import pytest
import torch

from thinrank.config import EngineConfig
from thinrank.engine import kv_cache
from thinrank.engine.kv_cache import (
    CPU_KV_CACHE_MEMORY,
    BlockPool,
    allocate_kv_cache,
    blocks_for,
    num_kv_blocks,
)
from thinrank.errors import OptionError
from thinrank.model.registry import parse_config
from tiny_hf_models import CONFIGS

CONFIG = parse_config(CONFIGS["llama-gqa"].to_dict())
CPU = torch.device("cpu")
BLOCK_BYTES = 64 * 3 * 2 * 2 * 16 * 4  # tokens, layers, keys and values, heads, head_dim, bytes


def test_no_block_is_held_twice_and_none_is_lost() -> None:
    pool, held, rng = BlockPool(17), [], random.Random(0)
    for _ in range(500):
        if held and (rng.random() < 0.5 or pool.num_free < 4):
            pool.free(held.pop(rng.randrange(len(held))))
        else:
            held.append(pool.allocate(rng.randint(0, 4)))
        blocks = [block for table in held for block in table]
        assert len(blocks) == len(set(blocks)) == 17 - pool.num_free
        assert set(blocks) <= set(range(17))


def test_misuse_is_caught() -> None:
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="4 blocks wanted, 3 free"):
        pool.allocate(4)
    blocks = pool.allocate(2)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="free already"):
        pool.free(blocks)


def test_kept_blocks_are_shared_and_evicted_last() -> None:
    evicted: list[int] = []
    pool = BlockPool(4, evicted.append)
    first = pool.allocate(3)
    for block in first:
        pool.keep(block)
    pool.share(first[:2])
    pool.free(first)
    assert pool.num_free == 2 and pool.is_free(first[2]) and not pool.is_free(first[0])
    pool.free(first[:2])
    assert pool.num_free == 4
    pool.share(first[1:2])  # a free one comes back
    assert pool.num_free == 3
    assert pool.allocate(1) != first[:1] and evicted == []
    # the one freed longest ago, then, of those freed together, the last
    assert pool.allocate(2) == evicted == [first[2], first[0]]
    with pytest.raises(AssertionError, match="are not kept"):
        pool.share(evicted[:1])
    pool.free(evicted[:1])
    with pytest.raises(AssertionError, match=f"block {evicted[0]} is free"):
        pool.keep(evicted[0])


def test_blocks_for() -> None:
    assert [blocks_for(n) for n in (0, 1, 64, 65, 128, 129)] == [0, 1, 1, 2, 2, 3]


def test_number_of_blocks() -> None:
    assert num_kv_blocks(CONFIG, EngineConfig(max_num_seqs=3), 100, 4, CPU) == 6
    large = EngineConfig(max_num_seqs=10**6)
    assert num_kv_blocks(CONFIG, large, 512, 4, CPU) == CPU_KV_CACHE_MEMORY // BLOCK_BYTES
    limited = EngineConfig(kv_cache_memory=BLOCK_BYTES * 2 + 1)
    assert num_kv_blocks(CONFIG, limited, 512, 4, CPU) == 2
    with pytest.raises(OptionError, match=f"needs {BLOCK_BYTES} bytes"):
        num_kv_blocks(CONFIG, EngineConfig(kv_cache_memory=BLOCK_BYTES - 1), 512, 4, CPU)


def test_a_share_of_the_gpus_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the share leaves beside all that is in use, weights and other programs; nothing on a CPU."""
    share = EngineConfig(gpu_memory_utilization=0.9, max_num_seqs=10**6)
    gpu, total = torch.device("cuda", 0), 1000 * BLOCK_BYTES
    for used, blocks in ((0, 900), (300, 600), (899, 1)):
        monkeypatch.setattr(
            kv_cache, "device_memory", lambda device, u=used: (total - u * BLOCK_BYTES, total)
        )
        assert num_kv_blocks(CONFIG, share, 512, 4, gpu) == blocks
        assert num_kv_blocks(CONFIG, replace(share, kv_cache_memory=5 * BLOCK_BYTES), 512, 4, gpu) == 5
    assert num_kv_blocks(CONFIG, replace(share, max_num_seqs=1), 64, 4, gpu) == 1
    assert num_kv_blocks(CONFIG, share, 512, 4, CPU) == CPU_KV_CACHE_MEMORY // BLOCK_BYTES
    monkeypatch.setattr(kv_cache, "device_memory", lambda device: (99 * BLOCK_BYTES, total))
    with pytest.raises(OptionError, match="gpu_memory_utilization leaves for keys and values is 0 bytes"):
        num_kv_blocks(CONFIG, share, 512, 4, gpu)


def test_cache_shape() -> None:
    cache = allocate_kv_cache(CONFIG, 5, torch.bfloat16, torch.device("cpu"))
    assert len(cache) == 3
    assert cache[0].keys.shape == cache[2].values.shape == (5, 2, 64, 16)
    assert cache[0].keys.dtype == torch.bfloat16
