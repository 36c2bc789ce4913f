"""The output-side matrices of q, k and v, bias, q/k norm, RoPE, and K/V into their block: one launch (step 2)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .gemv import gemv_pair, load_tiles, norm_scale, wait_for_inputs
from .segments import Segments
from .tuning import GemvConfig


def project_rope(
    latents: Tensor,
    scaled: Tensor,
    squares: Tensor,
    eps: float,
    arena: Tensor,
    segments: Segments,
    bias: Tensor | None,
    qk_norm: Tensor | None,
    rotation: Tensor,
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    block_tables: Tensor,
    *,
    config: GemvConfig,
    pdl: bool,
) -> None:
    """q, k, v = W @ x + bias; q and k are normed (Qwen3) and rotated; k and v go to the cache.

    x is latents[b, seg.in_offset:] for a low-rank module; for a dense one (in_offset -1) the normed vector, as in
    `norm_project`. segments: q, k, v; their widths may differ. bias: float32 [q_size + 2 * kv_size] or None.
    qk_norm: float32 [2, head_dim] or None. rotation: float32 [positions, 2, head_dim/2], cos and sin of every
    position. q: [batch, heads * head_dim]. caches: [blocks, kv_heads, block_size, head_dim]. positions: int32
    [batch]; block_tables: int32 [batch, blocks]. A program computes `config.rows` pairs of rows that RoPE turns
    together; with a q/k norm all pairs of a head.
    """
    kv_heads, block_size, head_dim = key_cache.shape[1:]
    batch, hidden_size = scaled.shape
    half = head_dim // 2
    pairs = triton.next_power_of_2(half) if qk_norm is not None else config.rows
    chunks = triton.cdiv(half, pairs)
    heads = segments.rows[0] // head_dim
    _project_rope_kernel[((heads + 2 * kv_heads) * chunks,)](
        latents, latents.stride(0), scaled, squares, squares.shape[1], hidden_size, eps, arena, batch,
        *segments.offsets, *segments.widths, *segments.in_offsets,
        bias, qk_norm, rotation, q, key_cache, value_cache, positions, block_tables, block_tables.stride(0),
        heads, kv_heads, key_cache.stride(0),
        PAIRS=pairs, CHUNKS=chunks, VECTOR=config.vector, SLICES=config.num_warps, AHEAD=config.ahead,
        BLOCK_K=config.block_k,
        HEAD_DIM=head_dim, BLOCK_SIZE=block_size, NUM_SQUARES=triton.next_power_of_2(squares.shape[1]),
        HAS_BIAS=bias is not None, QK_NORM=qk_norm is not None, ANY_DENSE=min(segments.in_offsets) < 0, PDL=pdl,
        num_warps=config.num_warps, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _project_rope_kernel(
    latents, latents_stride, scaled, squares, num_squares, hidden_size, eps, arena, batch,
    offset_q, offset_k, offset_v, K_q, K_k, K_v, in_q, in_k, in_v,
    bias, qk_norm, rotation, q, key_cache, value_cache, positions, block_tables, table_stride,
    heads, kv_heads, cache_stride,
    PAIRS: tl.constexpr, CHUNKS: tl.constexpr, VECTOR: tl.constexpr, SLICES: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_SQUARES: tl.constexpr,
    HAS_BIAS: tl.constexpr, QK_NORM: tl.constexpr, ANY_DENSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = HEAD_DIM // 2
    COLUMNS: tl.constexpr = 1 if VECTOR else 8
    head = tl.program_id(0) // CHUNKS
    pair = tl.program_id(0) % CHUNKS * PAIRS + tl.arange(0, PAIRS)
    mask = pair < HALF
    offset, K, in_offset, head_in = tl.cast(offset_q, tl.int64), K_q, in_q, head
    if head >= heads + kv_heads:
        offset, K, in_offset = tl.cast(offset_v, tl.int64), K_v, in_v
        head_in = head - heads - kv_heads
    elif head >= heads:
        offset, K, in_offset = tl.cast(offset_k, tl.int64), K_k, in_k
        head_in = head - heads
    rows = head_in * HEAD_DIM + pair
    tiles1 = load_tiles(arena, offset, rows, mask, 0, K, K, VECTOR, SLICES, BLOCK_K, AHEAD)
    tiles2 = load_tiles(arena, offset, rows + HALF, mask, 0, K, K, VECTOR, SLICES, BLOCK_K, AHEAD)
    wait_for_inputs(PDL)
    x, stride = latents + in_offset, latents_stride
    if ANY_DENSE:
        if in_offset < 0:
            x, stride = scaled, hidden_size
    first, second = gemv_pair(
        arena, offset, rows, x, stride, K, tiles1, offset, rows + HALF, x, stride, K, tiles2, mask, batch,
        PAIRS, VECTOR, SLICES, BLOCK_K, AHEAD,
    )  # fmt: skip
    if ANY_DENSE:
        if in_offset < 0:
            scale = norm_scale(squares, num_squares, hidden_size, eps, batch, COLUMNS, NUM_SQUARES)[None, :]
            first, second = first * scale, second * scale
    if HAS_BIAS:
        first += tl.load(bias + head * HEAD_DIM + pair, mask=mask, other=0.0)[:, None]
        second += tl.load(bias + head * HEAD_DIM + HALF + pair, mask=mask, other=0.0)[:, None]
    column = tl.arange(0, COLUMNS)
    position = tl.load(positions + column, mask=column < batch, other=0)
    store_mask = mask[:, None] & (column < batch)[None, :]
    if head < heads + kv_heads:
        if QK_NORM:
            norm = qk_norm + tl.where(head < heads, 0, HEAD_DIM)
            squared = tl.where(mask[:, None], first * first + second * second, 0.0)
            inverse = tl.rsqrt(tl.sum(squared, axis=0) / HEAD_DIM + eps)[None, :]
            first = first * inverse * tl.load(norm + pair, mask=mask, other=0.0)[:, None]
            second = second * inverse * tl.load(norm + HALF + pair, mask=mask, other=0.0)[:, None]
        angle = rotation + position[None, :] * HEAD_DIM + pair[:, None]
        cos = tl.load(angle, mask=mask[:, None], other=0.0)
        sin = tl.load(angle + HALF, mask=mask[:, None], other=0.0)
        first, second = first * cos - second * sin, second * cos + first * sin
    if head < heads:
        pointers = q + column[None, :] * (heads * HEAD_DIM) + head * HEAD_DIM + pair[:, None]
        tl.store(pointers, first.to(q.dtype.element_ty), mask=store_mask)
        tl.store(pointers + HALF, second.to(q.dtype.element_ty), mask=store_mask)
    else:
        table = block_tables + column * table_stride + position // BLOCK_SIZE
        block = tl.load(table, mask=column < batch, other=0).to(tl.int64)
        place = block * cache_stride + (head_in * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM
        if head < heads + kv_heads:
            pointers = key_cache + place[None, :] + pair[:, None]
            tl.store(pointers, first.to(key_cache.dtype.element_ty), mask=store_mask)
            tl.store(pointers + HALF, second.to(key_cache.dtype.element_ty), mask=store_mask)
        else:
            pointers = value_cache + place[None, :] + pair[:, None]
            tl.store(pointers, first.to(value_cache.dtype.element_ty), mask=store_mask)
            tl.store(pointers + HALF, second.to(value_cache.dtype.element_ty), mask=store_mask)
