"""RMSNorm's scale and the matrices that read the normed vector, in one launch (steps 1 and 6, and lm_head)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .gemv import (
    gemv,
    load_rows,
    load_squares,
    norm_scale,
    program_row,
    split_range,
    store_result,
    sum_splits,
    wait_for_inputs,
)
from .segments import Segments
from .tuning import GemvConfig
from .workspace import SplitWorkspace


def norm_project(
    scaled: Tensor,
    squares: Tensor,
    eps: float,
    arena: Tensor,
    segments: Segments,
    out: Tensor,
    workspace: SplitWorkspace,
    *,
    config: GemvConfig,
    pdl: bool,
) -> None:
    """out[b, seg.out_offset + i] = (W_seg @ scaled[b])[i] / sqrt(mean(hidden[b]^2) + eps) for every segment.

    scaled: [batch, 2, hidden_size], hidden times the norm's weight, in the weights' dtype and in two parts (gemv).
    squares: float32 [batch, hidden_size / 16], sums of hidden^2 over groups of 16 channels. segments: at most three,
    all of width hidden_size. out: [batch, 2, stride] in two parts for the next GEMV, or [batch, stride], in any float
    dtype.
    """
    batch, _, hidden_size = scaled.shape
    config = config.for_batch(batch, sum(segments.rows))
    blocks = [triton.cdiv(rows, config.rows) for rows in segments.rows]
    _norm_project_kernel[(sum(blocks), config.splits)](
        scaled, squares, squares.shape[1], eps, arena, out, out.stride(0), hidden_size, batch,
        *segments.offsets, *segments.rows, *segments.out_offsets, blocks[0], blocks[0] + blocks[1],
        workspace.partials, workspace.counters,
        PARTS=out.dim() == 3, ROWS=config.rows, SPLITS=config.splits,
        NUM_SQUARES=triton.next_power_of_2(squares.shape[1]),
        PDL=pdl, launch_pdl=pdl, **config.arguments(batch, hidden_size),
    )  # fmt: skip


@triton.jit(do_not_specialize=["batch", "rows0", "rows1", "rows2", "end0", "end1"])
def _norm_project_kernel(
    scaled, squares, num_squares, eps, arena, out, out_stride, K, batch,
    offset0: tl.int64, offset1: tl.int64, offset2: tl.int64, rows0, rows1, rows2, out0, out1, out2, end0, end1,
    partials, counters,
    PARTS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, NUM_SQUARES: tl.constexpr,
    SLICES: tl.constexpr, AHEAD: tl.constexpr, EVEN: tl.constexpr, FOUR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block, split = tl.program_id(0), tl.program_id(1)
    offset, num_rows, out_offset, first_block = offset0, rows0, out0, 0
    if block >= end1:
        offset, num_rows, out_offset, first_block = offset2, rows2, out2, end1
    elif block >= end0:
        offset, num_rows, out_offset, first_block = offset1, rows1, out1, end0
    first_row = (block - first_block) * ROWS
    begin, end = split_range(K, split, SPLITS)
    weights = load_rows(
        arena + offset, first_row, num_rows, K, ROWS // 2, begin, end, ROWS, SLICES, AHEAD, EVEN
    )
    wait_for_inputs(PDL)
    square_sums = load_squares(squares, num_squares, batch, NUM_SQUARES)
    sums = gemv(weights, scaled, 2 * K, begin, end, batch, SLICES, AHEAD, EVEN, FOUR)
    sums, is_last = sum_splits(sums, partials, counters, block, split, ROWS, SPLITS)
    if is_last:
        row, column = first_row + program_row(tl.arange(0, ROWS), ROWS // 2), tl.arange(0, 8)
        pointers = out + column[None, :] * out_stride + out_offset + row[:, None]
        result = sums * norm_scale(square_sums, K, eps)
        mask = (row < num_rows)[:, None] & (column < batch)[None, :]
        store_result(pointers, out_stride, result, mask, PARTS)
