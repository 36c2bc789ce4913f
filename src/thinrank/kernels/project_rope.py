"""The output-side matrices of q, k and v, bias, q/k norm, RoPE, and K/V into their block: one launch (step 2)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .gemv import gemv, load_rows, load_squares, norm_scale, wait_for_inputs
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

    x is latents[b, seg.in_offset:] for a low-rank module; for a dense one (in_offset below 0) the normed vector, as in
    `norm_project`. segments: q, k, v; their widths may differ. bias: float32 [q_size + 2 * kv_size] or None.
    qk_norm: float32 [2, head_dim] or None. rotation: float32 [positions, 2, head_dim/2], cos and sin of every
    position. latents, scaled: [batch, 2, width], in two parts (gemv). q: [batch, heads * head_dim]. caches: [blocks,
    kv_heads, block_size, head_dim]. positions: int32 [batch]; block_tables: int32 [batch, blocks]. A program computes 8
    or 16 pairs of rows that RoPE turns together; with a q/k norm all pairs of a head, 8 after 8.
    """
    kv_heads, block_size, head_dim = key_cache.shape[1:]
    batch, _, hidden_size = scaled.shape
    heads = segments.rows[0] // head_dim
    if qk_norm is None:
        config = config.for_batch(batch, sum(segments.rows))
    programs = 1 if qk_norm is not None else head_dim // config.rows
    _project_rope_kernel[((heads + 2 * kv_heads) * programs,)](
        latents, latents.stride(0), scaled, squares, squares.shape[1], hidden_size, eps, arena, batch,
        *segments.offsets, *segments.widths, *segments.in_offsets,
        bias, qk_norm, rotation, q, key_cache, value_cache, positions, block_tables, block_tables.stride(0),
        heads, kv_heads, key_cache.stride(0),
        PROGRAMS=programs, ROWS=config.rows, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        NUM_SQUARES=triton.next_power_of_2(squares.shape[1]),
        HAS_BIAS=bias is not None, QK_NORM=qk_norm is not None, ANY_DENSE=min(segments.in_offsets) < 0,
        PDL=pdl, launch_pdl=pdl, **config.arguments(batch, *segments.widths),
    )  # fmt: skip


@triton.jit(do_not_specialize=["batch"])
def _project_rope_kernel(
    latents, latents_stride, scaled, squares, num_squares, hidden_size, eps, arena, batch,
    offset_q: tl.int64, offset_k: tl.int64, offset_v: tl.int64, K_q, K_k, K_v, in_q, in_k, in_v,
    bias, qk_norm, rotation, q, key_cache, value_cache, positions, block_tables, table_stride,
    heads, kv_heads, cache_stride,
    PROGRAMS: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr, AHEAD: tl.constexpr, EVEN: tl.constexpr,
    FOUR: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_SQUARES: tl.constexpr,
    HAS_BIAS: tl.constexpr, QK_NORM: tl.constexpr, ANY_DENSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = HEAD_DIM // 2
    CHUNKS: tl.constexpr = HALF // 8 // PROGRAMS
    CHUNKS_PAD: tl.constexpr = triton.next_power_of_2(CHUNKS)
    head = tl.program_id(0) // PROGRAMS
    first_pair = tl.program_id(0) % PROGRAMS * (CHUNKS * 8)
    offset, K, in_offset, head_in = offset_q, K_q, in_q, head
    if head >= heads + kv_heads:
        offset, K, in_offset = offset_v, K_v, in_v
        head_in = head - heads - kv_heads
    elif head >= heads:
        offset, K, in_offset = offset_k, K_k, in_k
        head_in = head - heads
    row = head_in * HEAD_DIM + first_pair
    weights = load_rows(arena + offset, row, row + HEAD_DIM, K, HALF, 0, K, ROWS, SLICES, AHEAD, EVEN)
    # [CHUNKS_PAD, 8 pairs, 8 batch rows] from here on.
    column = tl.arange(0, 8)
    position = tl.load(positions + column, mask=column < batch, other=0)
    table = block_tables + column * table_stride + position // BLOCK_SIZE
    block = tl.load(table, mask=column < batch, other=0).to(tl.int64)
    pair = (first_pair + tl.arange(0, CHUNKS_PAD)[:, None] * 8 + tl.arange(0, 8)[None, :])[:, :, None]
    exists = pair < HALF
    angle = rotation + position[None, None, :] * HEAD_DIM + pair
    if not QK_NORM:  # there are registers for it
        cos, sin = tl.load(angle), tl.load(angle + HALF)
    wait_for_inputs(PDL)
    x, stride = latents + in_offset, latents_stride
    if ANY_DENSE:
        square_sums = load_squares(squares, num_squares, batch, NUM_SQUARES)
        # Selected, not branched: after a branch the compiler knows no alignment, and loads two bytes at a time.
        x = tl.where(in_offset < 0, scaled, x)
        stride = tl.where(in_offset < 0, 2 * hidden_size, stride)
    first, second = _halves(gemv(weights, x, stride, 0, K, batch, SLICES, AHEAD, EVEN, FOUR))
    TOGETHER: tl.constexpr = ROWS // 16
    if CHUNKS > TOGETHER:
        first = tl.broadcast_to(first, [CHUNKS_PAD, 8, 8])
        second = tl.broadcast_to(second, [CHUNKS_PAD, 8, 8])
        for chunk in range(1, CHUNKS):
            row += 8
            weights = load_rows(arena + offset, row, row + HEAD_DIM, K, HALF, 0, K, ROWS, SLICES, AHEAD, EVEN)
            first8, second8 = _halves(gemv(weights, x, stride, 0, K, batch, SLICES, AHEAD, EVEN, FOUR))
            here = (tl.arange(0, CHUNKS_PAD) == chunk)[:, None, None]
            first = tl.where(here, first8, first)
            second = tl.where(here, second8, second)
    if ANY_DENSE:
        if in_offset < 0:
            scale = tl.reshape(norm_scale(square_sums, hidden_size, eps), [1, 1, 8])
            first, second = first * scale, second * scale
    if HAS_BIAS:
        first += tl.load(bias + head * HEAD_DIM + pair, mask=exists, other=0.0)
        second += tl.load(bias + head * HEAD_DIM + HALF + pair, mask=exists, other=0.0)
    if head < heads + kv_heads:
        if QK_NORM:
            norm = qk_norm + tl.where(head < heads, 0, HEAD_DIM)
            squared = tl.where(exists, first * first + second * second, 0.0)
            inverse = tl.rsqrt(tl.sum(tl.sum(squared, axis=0), axis=0) / HEAD_DIM + eps)[None, None, :]
            first = first * inverse * tl.load(norm + pair, mask=exists, other=0.0)
            second = second * inverse * tl.load(norm + HALF + pair, mask=exists, other=0.0)
            cos, sin = tl.load(angle, mask=exists, other=0.0), tl.load(angle + HALF, mask=exists, other=0.0)
        first, second = first * cos - second * sin, second * cos + first * sin
    store_mask = exists & (column < batch)[None, None, :]
    if head < heads:
        queries = q + column[None, None, :] * (heads * HEAD_DIM) + head * HEAD_DIM + pair
        tl.store(queries, first.to(q.dtype.element_ty), mask=store_mask)
        tl.store(queries + HALF, second.to(q.dtype.element_ty), mask=store_mask)
    else:
        cache = key_cache
        if head >= heads + kv_heads:
            cache = value_cache
        place = block * cache_stride + (head_in * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM
        pointers = cache + place[None, None, :] + pair
        tl.store(pointers, first.to(cache.dtype.element_ty), mask=store_mask)
        tl.store(pointers + HALF, second.to(cache.dtype.element_ty), mask=store_mask)


@triton.jit
def _halves(sums):
    """[ROWS, 8] -> both halves [ROWS / 16, 8, 8] of its pairs of rows."""
    CHUNKS: tl.constexpr = sums.shape[0] // 16
    return tl.split(tl.permute(tl.reshape(sums, [CHUNKS, 2, 8, 8]), [0, 2, 3, 1]))
