"""python benchmarks/kernels/prefill_attention.py [--sweep]: our kernel over blocks beside PyTorch's on whole tensors.

PyTorch's kernels take sequences without history only. --sweep: ours with other launch settings, too.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from harness import DEVICE, DTYPE, Case, command_line, main
from torch.nn.attention import SDPBackend, sdpa_kernel

from thinrank.config import BLOCK_SIZE
from thinrank.kernels import reference
from thinrank.kernels.prefill_attention import PrefillConfig, prefill_attention, prefill_config

HEAD_DIM = 128
SCALE = HEAD_DIM**-0.5
DEFAULT = prefill_config(HEAD_DIM, DTYPE)
SWEEP = [PrefillConfig(*config) for config in ((128, 8, 2), (128, 8, 3), (128, 8, 4), (64, 4, 2), (64, 4, 3))]

#: History, new tokens, window, heads and kv heads.
SIZES = [
    (*lengths, *heads)
    for heads in ((32, 32), (32, 8))
    for lengths in (
        (0, 512, None),
        (0, 2048, None),
        (0, 8192, None),
        (2048, 2048, None),
        (6144, 2048, None),
        (0, 8192, 1024),
    )
]
SMALL = [(0, 64, None, 2, 1), (64, 64, 70, 2, 1)]


def cases(
    history: int, tokens: int, window: int | None, heads: int, kv_heads: int, config: PrefillConfig = DEFAULT
) -> Iterator[Case]:
    context = history + tokens
    seen = sum(min(position, window or context) for position in range(history + 1, context + 1))
    q = torch.randn(tokens, heads, HEAD_DIM, device=DEVICE).to(DTYPE)
    cache = (context // BLOCK_SIZE, kv_heads, BLOCK_SIZE, HEAD_DIM)
    keys, values = (torch.randn(cache, device=DEVICE).to(DTYPE) for _ in range(2))
    tables = torch.randperm(cache[0], device=DEVICE).int().unsqueeze(0)
    starts, contexts = (
        torch.tensor(numbers, dtype=torch.int32, device=DEVICE) for numbers in ([0, tokens], [context])
    )
    out = torch.zeros_like(q).flatten(1)

    def plain() -> None:
        found = reference.paged_attention(q, keys, values, tables, [tokens], [context], SCALE, window)
        out.copy_(found.flatten(1))

    yield Case(
        f"prefill_attention {tokens} after {history}, {heads}/{kv_heads} heads, window {window} {tuple(config)}",
        partial(
            prefill_attention, q, keys, values, tables, starts, contexts, max_query_len=tokens, scale=SCALE,
            window=window, out=out, config=config,
        ),
        plain,
        outputs=(out,),
        flops=4 * heads * HEAD_DIM * seen,
        beside={} if history or window else _whole_sequences(tokens, heads, kv_heads),
    )  # fmt: skip


def _whole_sequences(tokens: int, heads: int, kv_heads: int) -> dict[str, Callable[[], object]]:
    """PyTorch's kernels."""
    q, k, v = (
        torch.randn(1, tokens, count, HEAD_DIM, device=DEVICE).to(DTYPE).transpose(1, 2)
        for count in (heads, kv_heads, kv_heads)
    )

    def attend(backend: SDPBackend) -> None:
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=heads != kv_heads)

    backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    return {backend.name: partial(attend, backend) for backend in backends}


if __name__ == "__main__":
    parser = command_line()
    parser.add_argument("--sweep", action="store_true", help="other launch settings, too")
    options = parser.parse_args()
    configs = SWEEP if options.sweep else [DEFAULT]
    main(cases, [(*size, config) for size in SIZES for config in configs], options)
