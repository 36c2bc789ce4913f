"""What the attention kernels over KV blocks ask of their arguments. Imports without triton."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import BLOCK_SIZE

HEAD_DIMS = (64, 96, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: Stands for "no limit" in the kernels: context_len - NO_WINDOW is never positive.
NO_WINDOW = 2**31 - 1

#: The kernels compute powers of 2.
LOG2_E = 1.4426950408889634


def check_paged_inputs(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, context_lens: Tensor, out: Tensor
) -> tuple[int, int, int]:
    """What both attention kernels ask of their arguments; returns q's shape. Raises ValueError."""
    if q.dim() != 3 or key_cache.dim() != 4:
        raise ValueError(
            f"q has {q.dim()} dimensions and the cache {key_cache.dim()}; "
            "they are [tokens, heads, head_dim] and [blocks, kv_heads, 64, head_dim]"
        )
    tokens, heads, head_dim = q.shape
    _, kv_heads, block_size, cache_head_dim = key_cache.shape
    check_shape(heads, kv_heads, head_dim)
    if block_size != BLOCK_SIZE or cache_head_dim != head_dim:
        raise ValueError(
            f"blocks are {block_size} x {cache_head_dim}; {BLOCK_SIZE} tokens of head_dim {head_dim} expected"
        )
    if q.dtype not in DTYPES or key_cache.dtype not in DTYPES:
        raise ValueError(
            f"dtypes {q.dtype} and {key_cache.dtype}; bfloat16, float16 and float32 are supported"
        )
    if (key_cache.shape, key_cache.stride(), key_cache.dtype) != (
        value_cache.shape,
        value_cache.stride(),
        value_cache.dtype,
    ):
        raise ValueError("key_cache and value_cache must have the same shape, strides and dtype")
    if key_cache.stride()[2:] != (head_dim, 1):
        raise ValueError("the tokens of a block's head must be contiguous")
    if q.stride(2) != 1:
        raise ValueError(f"the last stride of q is {q.stride(2)}; it must be 1")
    if out.shape != (tokens, heads * head_dim) or out.dtype not in DTYPES or out.stride(1) != 1:
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} with strides {out.stride()}; "
            f"a float of {(tokens, heads * head_dim)} with last stride 1 expected"
        )
    for name, tensor, dim in (("block_tables", block_tables, 2), ("context_lens", context_lens, 1)):
        if tensor.dtype != torch.int32 or tensor.dim() != dim or tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} must be int32 with {dim} dimensions and last stride 1, not {tensor.dtype}"
            )
    devices = {tensor.device for tensor in (q, key_cache, value_cache, block_tables, context_lens, out)}
    if len(devices) > 1:
        raise ValueError(f"tensors are on several devices: {', '.join(sorted(map(str, devices)))}")
    return tokens, heads, head_dim


def check_scale_and_window(scale: float, window: int | None) -> None:
    """Raises ValueError. The kernels multiply a maximum by `scale`, so it is positive."""
    if not scale > 0:
        raise ValueError(f"scale is {scale}; it must be above 0")
    if window is not None and not 1 <= window <= NO_WINDOW:
        raise ValueError(f"window is {window}; it must be at least 1, or None")


def check_shape(heads: int, kv_heads: int, head_dim: int) -> None:
    """Raises ValueError for heads that no attention kernel takes."""
    if head_dim not in HEAD_DIMS:
        raise ValueError(
            f"head_dim is {head_dim}; the attention kernels take {', '.join(map(str, HEAD_DIMS))}"
        )
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{heads} query heads are not a multiple of {kv_heads} kv heads")
