"""python benchmarks/kernels/prefill_attention.py [--sweep]: our kernel over blocks beside PyTorch's on whole tensors.

PyTorch's kernels take sequences without history only. --sweep: ours with other launch settings, too.
"""

import argparse

import torch
import torch.nn.functional as F
from harness import DEVICE, header, report
from torch.nn.attention import SDPBackend, sdpa_kernel

from thinrank.config import BLOCK_SIZE
from thinrank.kernels.prefill_attention import PrefillConfig, prefill_attention, prefill_config

HEAD_DIM = 128
SCALE = HEAD_DIM**-0.5
DEFAULT = prefill_config(HEAD_DIM, torch.bfloat16)
SWEEP = [PrefillConfig(*config) for config in ((128, 8, 2), (128, 8, 3), (128, 8, 4), (64, 4, 2), (64, 4, 3))]


def measure(
    history: int, tokens: int, heads: int, kv_heads: int, window: int | None, configs: list[PrefillConfig]
) -> None:
    context = history + tokens
    seen = sum(min(position, window or context) for position in range(history + 1, context + 1))
    flops = 4 * heads * HEAD_DIM * seen
    shape = f"{tokens} after {history}, {heads}/{kv_heads} heads, window {window}"
    q = torch.randn(tokens, heads, HEAD_DIM, device=DEVICE).bfloat16()
    cache = (context // BLOCK_SIZE, kv_heads, BLOCK_SIZE, HEAD_DIM)
    keys, values = (torch.randn(cache, device=DEVICE).bfloat16() for _ in range(2))
    tables = torch.randperm(cache[0], device=DEVICE).int().unsqueeze(0)
    starts, contexts = (
        torch.tensor(numbers, dtype=torch.int32, device=DEVICE) for numbers in ([0, tokens], [context])
    )
    out = torch.empty_like(q).flatten(1)
    for config in configs:
        report(
            f"prefill_attention {shape} {tuple(config)}",
            lambda config=config: prefill_attention(
                q, keys, values, tables, starts, contexts, max_query_len=tokens, scale=SCALE, window=window,
                out=out, config=config,
            ),
            flops=flops,
        )  # fmt: skip
    if history or window:
        return
    whole = q.unsqueeze(0).transpose(1, 2)
    k, v = (torch.randn(1, tokens, kv_heads, HEAD_DIM, device=DEVICE).bfloat16() for _ in range(2))
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(backend):
            report(
                f"  {backend.name} {shape}",
                lambda: F.scaled_dot_product_attention(
                    whole, k, v, is_causal=True, scale=SCALE, enable_gqa=heads != kv_heads
                ),
                flops=flops,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", action="store_true")
    configs = SWEEP if parser.parse_args().sweep else [DEFAULT]
    header()
    for heads, kv_heads in ((32, 32), (32, 8)):
        for history, tokens in ((0, 512), (0, 2048), (0, 8192), (2048, 2048), (6144, 2048)):
            measure(history, tokens, heads, kv_heads, None, configs)
        measure(0, 8192, heads, kv_heads, 1024, configs)
