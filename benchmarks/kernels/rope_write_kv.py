"""python benchmarks/kernels/rope_write_kv.py: RoPE and cache writes of prefill beside PyTorch's single operations."""

from collections.abc import Iterator
from functools import partial

import torch
from harness import DEVICE, DTYPE, Case, main, nbytes

from thinrank.config import BLOCK_SIZE
from thinrank.kernels import reference
from thinrank.kernels.rope_write_kv import rope_write_kv

HEAD_DIM = 128

#: Tokens, heads and kv heads.
SIZES = [(tokens, *heads) for heads in ((32, 32), (32, 8)) for tokens in (512, 2048, 8192)]
SMALL = [(64, 2, 1)]


def cases(tokens: int, heads: int, kv_heads: int) -> Iterator[Case]:
    q, k, v = (
        torch.randn(tokens, count * HEAD_DIM, device=DEVICE).to(DTYPE)
        for count in (heads, kv_heads, kv_heads)
    )
    angles = torch.rand(tokens, HEAD_DIM // 2, device=DEVICE) * 6
    rotation = torch.stack([angles.cos(), angles.sin()], dim=1)
    positions = torch.arange(tokens, device=DEVICE)
    blocks = torch.randperm(tokens // BLOCK_SIZE, device=DEVICE)
    slots = blocks[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    cache = (len(blocks), kv_heads, BLOCK_SIZE, HEAD_DIM)
    keys, values = (torch.zeros(cache, dtype=DTYPE, device=DEVICE) for _ in range(2))
    arguments = (q, k, v, None, None, 0.0, rotation, positions, keys, values, slots)
    plain = partial(reference.rope_write_kv, *arguments)
    yield Case(
        f"rope_write_kv {tokens} tokens, {heads}/{kv_heads} heads",
        partial(rope_write_kv, *arguments),
        plain,
        outputs=(q, k, v, keys, values),
        # Read all three, write q and k in place, k and v into the cache.
        nbytes=nbytes(q, q, k, k, k, v, v),
        beside={"reference": plain},
    )


if __name__ == "__main__":
    main(cases, SIZES)
