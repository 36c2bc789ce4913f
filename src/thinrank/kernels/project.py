"""The matrices behind attention and activation: to a latent, or onto the residual stream (steps 4, 5, 8 and 9)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .gemv import (
    SQUARES_GROUP,
    gemv,
    load_rows,
    program_row,
    split_range,
    store_parts,
    store_result,
    sum_splits,
    wait_for_inputs,
)
from .tuning import MAX_ROWS, GemvConfig
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

    x: [batch, 2, stride >= width], finite also beyond the true rank, in the weights' dtype and in two parts (gemv). W:
    `rows` x `width` at `offset` of the arena. out: [batch, 2, stride >= rows] in two parts for the next GEMV, or
    [batch, stride >= rows].
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

    bias, norm: float32 [rows], bias or None. hidden: float32 [batch, rows]. scaled: [batch, 2, rows] in the weights'
    dtype and in two parts. squares: float32 [batch, rows / 16].
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
    config = config.for_batch(x.shape[0], rows, SQUARES_GROUP if norm is not None else MAX_ROWS)
    _project_kernel[(triton.cdiv(rows, config.rows), config.splits)](
        x, x.stride(0), arena, offset, rows, width, out, out.stride(0), x.shape[0],
        bias, norm, scaled, squares, workspace.partials, workspace.counters,
        PARTS=out.dim() == 3, ROWS=config.rows, SPLITS=config.splits,
        HAS_BIAS=bias is not None, RESIDUAL=norm is not None,
        PDL=pdl, launch_pdl=pdl, **config.arguments(x.shape[0], width),
    )  # fmt: skip


@triton.jit(do_not_specialize=["batch"])
def _project_kernel(
    x, x_stride, arena, offset: tl.int64, num_rows, K, out, out_stride, batch,
    bias, norm, scaled, squares, partials, counters,
    PARTS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    SLICES: tl.constexpr, AHEAD: tl.constexpr, EVEN: tl.constexpr, FOUR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block, split = tl.program_id(0), tl.program_id(1)
    begin, end = split_range(K, split, SPLITS)
    matrix = arena + offset
    weights = load_rows(matrix, block * ROWS, num_rows, K, ROWS // 2, begin, end, ROWS, SLICES, AHEAD, EVEN)
    row, column = block * ROWS + program_row(tl.arange(0, ROWS), ROWS // 2), tl.arange(0, 8)
    row_mask = row < num_rows
    mask = row_mask[:, None] & (column < batch)[None, :]
    pointers = out + column[None, :] * out_stride + row[:, None]
    if RESIDUAL:  # written two launches ago at the latest: it need not wait
        addend = tl.load(pointers, mask=mask, other=0.0)
        next_norm = tl.load(norm + row, mask=row_mask, other=0.0)[:, None]
        if HAS_BIAS:
            addend += tl.load(bias + row, mask=row_mask, other=0.0)[:, None]
    wait_for_inputs(PDL)
    sums = gemv(weights, x, x_stride, begin, end, batch, SLICES, AHEAD, EVEN, FOUR)
    sums, is_last = sum_splits(sums, partials, counters, block, split, ROWS, SPLITS)
    if is_last:
        if RESIDUAL:
            sums += addend
            place = scaled + column[None, :] * (2 * num_rows) + row[:, None]
            store_parts(place, num_rows, sums * next_norm, mask)
            square = tl.sum(tl.where(mask, sums * sums, 0.0), axis=0)
            tl.store(squares + column * tl.num_programs(0) + block, square, mask=column < batch)
        store_result(pointers, out_stride, sums, mask, PARTS)
