"""python benchmarks/kernels/rope_write_kv.py: RoPE and cache writes of prefill beside PyTorch's single operations."""

import torch
from harness import DEVICE, header, report

from thinrank.config import BLOCK_SIZE
from thinrank.kernels import reference
from thinrank.kernels.rope_write_kv import rope_write_kv

HEAD_DIM = 128


def measure(tokens: int, heads: int, kv_heads: int) -> None:
    q, k, v = (
        torch.randn(tokens, count * HEAD_DIM, device=DEVICE).bfloat16()
        for count in (heads, kv_heads, kv_heads)
    )
    angles = torch.rand(tokens, HEAD_DIM // 2, device=DEVICE) * 6
    rotation = torch.stack([angles.cos(), angles.sin()], dim=1)
    positions = torch.arange(tokens, device=DEVICE)
    blocks = torch.randperm(tokens // BLOCK_SIZE, device=DEVICE)
    slots = blocks[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    cache = (len(blocks), kv_heads, BLOCK_SIZE, HEAD_DIM)
    keys, values = (torch.empty(cache, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    arguments = (q, k, v, None, None, 0.0, rotation, positions, keys, values, slots)
    # Read all three, write q and k in place, k and v into the cache.
    nbytes = 2 * (2 * q.numel() + 3 * k.numel() + 2 * v.numel())
    shape = f"{tokens} tokens, {heads}/{kv_heads} heads"
    report(f"rope_write_kv {shape}", lambda: rope_write_kv(*arguments), nbytes=nbytes)
    report(f"  reference {shape}", lambda: reference.rope_write_kv(*arguments))


if __name__ == "__main__":
    header()
    for heads, kv_heads in ((32, 32), (32, 8)):
        for tokens in (512, 2048, 8192):
            measure(tokens, heads, kv_heads)
