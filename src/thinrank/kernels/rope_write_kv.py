"""Bias, q/k norm and RoPE on what q, k and v give, and K/V into their blocks: one launch between two GEMMs."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

#: At least as many of the queries' elements has a program: 16 a thread, a load of 16 bytes from each half of a head.
_ELEMENTS = 4096


def rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    qk_norm: Tensor | None,
    eps: float,
    rotation: Tensor,
    positions: Tensor,
    key_cache: Tensor | None,
    value_cache: Tensor | None,
    slots: Tensor | None,
) -> None:
    """q, k and v plus their biases, q and k normed (Qwen3) and rotated: in place, and k and v in the cache.

    q: [tokens, heads * head_dim]; k, v: [tokens, kv_heads * head_dim]; any float dtype, each with a row stride of its
    own. bias: float32 [q_size + 2 * kv_size] or None. qk_norm: float32 [2, head_dim], read with eps, or None. rotation:
    float32 [positions, 2, head_dim/2], cos and sin of every position. positions: int64 or int32 [tokens]. caches:
    [blocks, kv_heads, block_size, head_dim] with equal strides, a block contiguous. slots: int64 [tokens]; slot s is
    row s % block_size of block s // block_size. Without a cache all three are None. The arithmetic is float32.
    """
    tokens, half = len(q), rotation.shape[2]
    heads, kv_heads = q.shape[1] // (2 * half), k.shape[1] // (2 * half)
    elements = triton.next_power_of_2(heads) * triton.next_power_of_2(2 * half)  # of a token's queries
    rows = triton.cdiv(_ELEMENTS, elements)
    block_stride, block_size = (0, 1) if key_cache is None else (key_cache.stride(0), key_cache.shape[2])
    _rope_write_kv_kernel[(triton.cdiv(tokens, rows), 3)](
        q, k, v, q.stride(0), k.stride(0), v.stride(0), bias, qk_norm, eps, rotation, positions, tokens,
        key_cache, value_cache, slots, block_stride,
        HEADS=heads, KV_HEADS=kv_heads, HALF=half, BLOCK_SIZE=block_size, ROWS=rows, num_warps=8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _rope_write_kv_kernel(
    q, k, v, q_stride, k_stride, v_stride, bias, qk_norm, eps, rotation, positions, tokens,
    key_cache, value_cache, slots, block_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None, None]
    part = tl.program_id(1)
    if part == 0:
        _finish_heads(
            q + token * q_stride, bias, 0, qk_norm, 0, eps, rotation, positions, token, tokens,
            None, slots, block_stride, HEADS, HALF, BLOCK_SIZE, True,
        )  # fmt: skip
    elif part == 1:
        _finish_heads(
            k + token * k_stride, bias, HEADS * 2 * HALF, qk_norm, 2 * HALF, eps, rotation, positions, token, tokens,
            key_cache, slots, block_stride, KV_HEADS, HALF, BLOCK_SIZE, True,
        )  # fmt: skip
    else:
        _finish_heads(
            v + token * v_stride, bias, (HEADS + KV_HEADS) * 2 * HALF, None, 0, eps, rotation, positions, token, tokens,
            value_cache, slots, block_stride, KV_HEADS, HALF, BLOCK_SIZE, False,
        )  # fmt: skip


@triton.jit
def _finish_heads(
    row, bias, bias_start, norm, norm_start, eps, rotation, positions, token, tokens, cache, slots, block_stride,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """All heads of some tokens, in two tiles [tokens, heads, HALF] whose elements RoPE turns together."""
    head = tl.arange(0, triton.next_power_of_2(HEADS))[None, :, None]
    pair = tl.arange(0, triton.next_power_of_2(HALF))[None, None, :]
    mask = (token < tokens) & (head < HEADS) & (pair < HALF)
    offsets = head * (2 * HALF) + pair
    first = tl.load(row + offsets, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(row + HALF + offsets, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        first += tl.load(bias + bias_start + offsets, mask=mask, other=0.0)
        second += tl.load(bias + bias_start + HALF + offsets, mask=mask, other=0.0)
    if norm is not None:
        inverse = tl.rsqrt(tl.sum(first * first + second * second, axis=2, keep_dims=True) / (2 * HALF) + eps)
        first *= inverse * tl.load(norm + norm_start + pair, mask=pair < HALF, other=0.0)
        second *= inverse * tl.load(norm + norm_start + HALF + pair, mask=pair < HALF, other=0.0)
    if ROTATE:
        angle = rotation + tl.load(positions + token, mask=token < tokens, other=0) * (2 * HALF) + pair
        cos = tl.load(angle, mask=pair < HALF, other=0.0)
        sin = tl.load(angle + HALF, mask=pair < HALF, other=0.0)
        first, second = first * cos - second * sin, second * cos + first * sin
    dtype = row.dtype.element_ty
    if ROTATE or bias is not None:
        tl.store(row + offsets, first.to(dtype), mask=mask)
        tl.store(row + HALF + offsets, second.to(dtype), mask=mask)
    if cache is not None:
        slot = tl.load(slots + token, mask=token < tokens, other=0)
        place = cache + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * (2 * HALF)
        offsets = head * (BLOCK_SIZE * 2 * HALF) + pair
        tl.store(place + offsets, first.to(cache.dtype.element_ty), mask=mask)
        tl.store(place + HALF + offsets, second.to(cache.dtype.element_ty), mask=mask)
