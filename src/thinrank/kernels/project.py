"""The matrices behind attention and activation: to a latent, or onto the residual stream (steps 4, 5, 8 and 9)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .gemv import SQUARES_GROUP, gemv, load_tiles, sum_splits, wait_for_inputs
from .tuning import GemvConfig
from .workspace import SplitWorkspace


def project(
    x: Tensor,
    arena: Tensor,
    offset: int,
    rows: int,
    width: int,
    out: Tensor,
    workspace: SplitWorkspace,
    *,
    config: GemvConfig,
    pdl: bool,
) -> None:
    """out[b, i] = (W @ x[b])[i].

    x: [batch, stride >= width], finite also beyond the true rank, in the weights' dtype. W: `rows` x `width` at
    `offset` of the arena. out: [batch, stride >= rows].
    """
    _launch(x, arena, offset, rows, width, out, None, None, None, None, workspace, config, pdl)


def project_residual(
    x: Tensor,
    arena: Tensor,
    offset: int,
    rows: int,
    width: int,
    bias: Tensor | None,
    hidden: Tensor,
    norm: Tensor,
    scaled: Tensor,
    squares: Tensor,
    workspace: SplitWorkspace,
    *,
    config: GemvConfig,
    pdl: bool,
) -> None:
    """hidden[b] += W @ x[b] + bias; and what the next norm needs of it: scaled = hidden * norm, sums of squares.

    bias, norm: float32 [rows], bias or None. hidden: float32 [batch, rows]. scaled: [batch, rows] in the weights'
    dtype. squares: float32 [batch, rows / 16].
    """
    assert config.rows == SQUARES_GROUP, "a program writes one sum of squares"
    _launch(x, arena, offset, rows, width, hidden, bias, norm, scaled, squares, workspace, config, pdl)


def _launch(
    x: Tensor,
    arena: Tensor,
    offset: int,
    rows: int,
    width: int,
    out: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    scaled: Tensor | None,
    squares: Tensor | None,
    workspace: SplitWorkspace,
    config: GemvConfig,
    pdl: bool,
) -> None:
    _project_kernel[(triton.cdiv(rows, config.rows), config.splits)](
        x, x.stride(0), arena, offset, rows, width, out, out.stride(0), x.shape[0],
        bias, norm, scaled, squares, workspace.partials, workspace.counters,
        ROWS=config.rows, VECTOR=config.vector, SLICES=config.num_warps, BLOCK_K=config.block_k, AHEAD=config.ahead,
        SPLITS=config.splits,
        HAS_BIAS=bias is not None, RESIDUAL=norm is not None, PDL=pdl,
        num_warps=config.num_warps, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _project_kernel(
    x, x_stride, arena, offset, num_rows, K, out, out_stride, batch,
    bias, norm, scaled, squares, partials, counters,
    ROWS: tl.constexpr, VECTOR: tl.constexpr, SLICES: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = 1 if VECTOR else 8
    block, split = tl.program_id(0), tl.program_id(1)
    offset = tl.cast(offset, tl.int64)
    rows = block * ROWS + tl.arange(0, ROWS)
    row_mask = rows < num_rows
    share = tl.cdiv(tl.cdiv(K, SPLITS), 64) * 64
    begin = split * share
    end = tl.minimum(K, begin + share)
    tiles = load_tiles(arena, offset, rows, row_mask, begin, K, end, VECTOR, SLICES, BLOCK_K, AHEAD)
    wait_for_inputs(PDL)
    acc = gemv(
        arena, offset, rows, row_mask, x, x_stride, K, begin, end, batch, tiles,
        ROWS, VECTOR, SLICES, BLOCK_K, AHEAD,
    )  # fmt: skip
    acc, is_last = sum_splits(acc, partials, counters, block, split, ROWS, COLUMNS, SPLITS)
    if is_last:
        column = tl.arange(0, COLUMNS)
        mask = row_mask[:, None] & (column < batch)[None, :]
        pointers = out + column[None, :] * out_stride + rows[:, None]
        if RESIDUAL:
            if HAS_BIAS:
                acc += tl.load(bias + rows, mask=row_mask, other=0.0)[:, None]
            acc += tl.load(pointers, mask=mask, other=0.0)
            place = column[None, :] * num_rows + rows[:, None]
            next_input = acc * tl.load(norm + rows, mask=row_mask, other=0.0)[:, None]
            tl.store(scaled + place, next_input.to(scaled.dtype.element_ty), mask=mask)
            sums = tl.sum(tl.where(mask, acc * acc, 0.0), axis=0)
            tl.store(squares + column * tl.num_programs(0) + block, sums, mask=column < batch)
        tl.store(pointers, acc.to(out.dtype.element_ty), mask=mask)
