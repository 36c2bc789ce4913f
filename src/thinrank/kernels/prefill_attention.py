"""Causal attention of many new tokens of several sequences over the KV blocks: a flash attention.

The new tokens' keys and values are already in the blocks, and so is the history of earlier chunks.
Imports triton: only the GPU path may import this file. Knows nothing about layers or scheduling.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..config import BLOCK_SIZE
from .paged import LOG2_E, NO_WINDOW, check_paged_inputs, check_scale_and_window


class PrefillConfig(NamedTuple):
    """How the kernel is launched: block_m queries a program, num_stages of the key loop."""

    block_m: int
    num_warps: int
    num_stages: int


def prefill_config(head_dim: int, dtype: torch.dtype) -> PrefillConfig:
    """The launch of a layer's shape; `dtype` is the caches'. The batch does not enter: results would differ.

    16 bit: 128 queries by two warpgroups. Each 32 KiB block (head_dim 128) then serves 4 * 128 * 64 * 128 =
    4.2 MFLOP, so that 600 TFLOP/s take 20 bytes a cycle and SM from L2; 64 queries would take 40 of its 64.
    Three blocks of keys and values in flight: 207 registers a thread (228 with a window) and 128 KiB of shared
    memory at head_dim 128, one program an SM.
    """
    if dtype == torch.float32:
        # No tensor cores: correct, not fast. Anything larger spills (32 queries by 4 warps: 10 KB a thread).
        return PrefillConfig(16 if head_dim > 128 else 32, 8, 1)
    if head_dim > 128:
        return PrefillConfig(128, 8, 2)  # acc alone takes 128 registers a thread; a dozen others are spilled
    return PrefillConfig(128, 8, 3)


def prefill_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    *,
    max_query_len: int,
    scale: float,
    window: int | None = None,
    out: Tensor,
    config: PrefillConfig | None = None,
) -> Tensor:
    """out[t, h] = softmax(scale * q[t, h] . keys) . values over the tokens up to t of t's sequence.

    q: [tokens, heads, head_dim], bfloat16, float16 or float32, the sequences one after the other; tokens and
    heads may have any stride. It is rounded to the caches' dtype. caches: [blocks, kv_heads, 64, head_dim]
    with equal strides, a block's head contiguous; heads a multiple of kv_heads. block_tables: int32
    [sequences, blocks], any row stride. query_start: int32 [sequences + 1]; the new tokens of sequence s are
    query_start[s] to query_start[s + 1], its last ones. context_lens: int32 [sequences], all tokens of a
    sequence, new ones included. max_query_len: the most new tokens of a sequence, or more; decides the grid.
    window: a token sees this many tokens, itself included; None: all before it.
    out: [tokens, heads * head_dim], q's dtype.

    Returns out. Blocks that no query of a program sees are not touched; rows beyond the context may hold
    anything, NaN included. Raises ValueError for a shape, dtype or stride that the kernel does not take;
    lengths live on the device and are not checked.
    """
    _, heads, head_dim = check_paged_inputs(q, key_cache, value_cache, block_tables, context_lens, out)
    check_scale_and_window(scale, window)
    kv_heads = key_cache.shape[1]
    sequences = len(context_lens)
    if len(block_tables) != sequences or query_start.shape != (sequences + 1,):
        raise ValueError(
            f"{sequences} context_lens need as many block_tables and one more query_start, "
            f"not {len(block_tables)} and {tuple(query_start.shape)}"
        )
    if query_start.dtype != torch.int32 or query_start.stride(0) != 1 or query_start.device != q.device:
        raise ValueError(f"query_start must be contiguous int32 on {q.device}, not {query_start.dtype}")
    if max_query_len < 1:
        raise ValueError(f"max_query_len is {max_query_len}; it must be at least 1")
    config = config or prefill_config(head_dim, key_cache.dtype)
    _prefill_kernel[(heads, triton.cdiv(max_query_len, config.block_m), sequences)](
        q,
        key_cache,
        value_cache,
        block_tables,
        query_start,
        context_lens,
        out,
        scale * LOG2_E,
        NO_WINDOW if window is None else window,
        q.stride(0),
        q.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        block_tables.stride(0),
        out.stride(0),
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        HEAD_DIM_PAD=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=BLOCK_SIZE,
        BLOCK_M=config.block_m,
        HAS_WINDOW=window is not None,
        NUM_STAGES=config.num_stages,
        num_warps=config.num_warps,
    )
    return out


# Device code.


@triton.jit(do_not_specialize=["table_stride"])  # it grows with the context: no new compilation for that
def _prefill_kernel(
    q_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    query_start_ptr,
    context_ptr,
    out_ptr,
    scale_log2,
    window,
    q_stride_row,
    q_stride_head,
    cache_stride_block,
    cache_stride_head,
    table_stride,
    out_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    head = tl.program_id(0)  # fastest: neighbours read the same keys (of one group) at the same time
    # The last queries see the most keys; started first, they do not become the tail.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence = tl.program_id(2)
    start = tl.load(query_start_ptr + sequence)
    query_len = tl.load(query_start_ptr + sequence + 1) - start
    if tile * BLOCK_M < query_len:
        context_len = tl.load(context_ptr + sequence)
        query = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        dim = tl.arange(0, HEAD_DIM_PAD)
        row = (start + query).to(tl.int64)
        mask = (query < query_len)[:, None] & (dim < HEAD_DIM)[None, :]
        q_offsets = row[:, None] * q_stride_row + head.to(tl.int64) * q_stride_head + dim[None, :]
        q = tl.load(q_ptr + q_offsets, mask=mask, other=0.0).to(key_ptr.dtype.element_ty)

        history = context_len - query_len
        position = history + query  # of each query in its sequence
        first = history + tile * BLOCK_M
        last = tl.minimum(first + BLOCK_M, context_len) - 1
        # Blocks [begin, full_begin) and [full_end, end) need a mask; every query sees all of those between.
        full_end = (first + 1) // BLOCK_SIZE
        end = last // BLOCK_SIZE + 1
        begin = 0
        full_begin = 0
        if HAS_WINDOW:
            begin = tl.maximum(first + 1 - window, 0) // BLOCK_SIZE
            full_begin = tl.cdiv(tl.maximum(last + 1 - window, 0), BLOCK_SIZE)
            full_end = tl.maximum(full_end, begin)
            full_begin = tl.minimum(full_begin, full_end)

        head_offset = (head // GROUP).to(tl.int64) * cache_stride_head
        keys = key_ptr + head_offset
        values = value_ptr + head_offset
        table = table_ptr + sequence.to(tl.int64) * table_stride
        # Finite, so that the difference of two maxima is never inf - inf, also where a block is all masked.
        m = tl.full([BLOCK_M], -1e30, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, HEAD_DIM_PAD], tl.float32)
        if HAS_WINDOW:
            m, total, acc = _attend_blocks(
                m, total, acc, q, keys, values, table, position, window, context_len, scale_log2, begin,
                full_begin, cache_stride_block, HEAD_DIM, HEAD_DIM_PAD, BLOCK_SIZE, True, HAS_WINDOW,
                NUM_STAGES,
            )  # fmt: skip
        m, total, acc = _attend_blocks(
            m, total, acc, q, keys, values, table, position, window, context_len, scale_log2, full_begin,
            full_end, cache_stride_block, HEAD_DIM, HEAD_DIM_PAD, BLOCK_SIZE, False, HAS_WINDOW, NUM_STAGES,
        )  # fmt: skip
        m, total, acc = _attend_blocks(
            m, total, acc, q, keys, values, table, position, window, context_len, scale_log2, full_end, end,
            cache_stride_block, HEAD_DIM, HEAD_DIM_PAD, BLOCK_SIZE, True, HAS_WINDOW, NUM_STAGES,
        )  # fmt: skip

        # Queries past the end of the tile may have seen nothing.
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        out_offsets = row[:, None] * out_stride + head * HEAD_DIM + dim[None, :]
        tl.store(out_ptr + out_offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _attend_blocks(
    m, total, acc, q, key_ptr, value_ptr, table, position, window, context_len, scale_log2, begin, end,
    cache_stride_block, HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Takes blocks [begin, end) into the running softmax (m, total, acc) of a tile of queries."""
    token = tl.arange(0, BLOCK_SIZE)
    dim = tl.arange(0, HEAD_DIM_PAD)
    # 32 bits: with 64 ptxas runs short of registers and serialises wgmma.
    offsets = token[:, None] * HEAD_DIM + dim[None, :]
    # Read a step ahead: a load whose address is loaded in the same step has no stages left to be early by.
    block = tl.load(table + begin, mask=begin < end, other=0)
    for i in tl.range(begin, end, num_stages=NUM_STAGES):
        following = tl.load(table + tl.minimum(i + 1, end - 1))
        key_position = i * BLOCK_SIZE + token
        start = block.to(tl.int64) * cache_stride_block
        if MASKED:
            mask = (key_position < context_len)[:, None] & (dim < HEAD_DIM)[None, :]
            k = tl.load(key_ptr + start + offsets, mask=mask, other=0.0)
            v = tl.load(value_ptr + start + offsets, mask=mask, other=0.0)
        elif HEAD_DIM != HEAD_DIM_PAD:
            k = tl.load(key_ptr + start + offsets, mask=(dim < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(value_ptr + start + offsets, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        else:
            k = tl.load(key_ptr + start + offsets)
            v = tl.load(value_ptr + start + offsets)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            distance = position[:, None] - key_position[None, :]
            seen = distance >= 0
            if HAS_WINDOW:
                seen = seen & (distance < window)
            # Queries past the end of a tile see no less than the last one; keys past the context no one sees.
            seen = seen & (key_position < context_len)[None, :]
            score = tl.where(seen, score, float("-inf"))
        m_new = tl.maximum(m, tl.max(score, axis=1) * scale_log2)
        decay = tl.exp2(m - m_new)
        p = tl.exp2(score * scale_log2 - m_new[:, None])
        total = total * decay + tl.sum(p, axis=1)
        acc = acc * decay[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        m = m_new
        block = following
    return m, total, acc
