"""silu(gate) * up with both output-side matrices in one launch (step 7 of a layer)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .gemv import gemv_pair, load_tiles, norm_scale, wait_for_inputs
from .segments import Segments
from .tuning import GemvConfig


def project_silu_mul(
    latents: Tensor,
    scaled: Tensor,
    squares: Tensor,
    eps: float,
    arena: Tensor,
    segments: Segments,
    bias: Tensor | None,
    out: Tensor,
    *,
    config: GemvConfig,
    pdl: bool,
) -> None:
    """out[b, i] = silu(g) * u with g, u = (W @ x + bias)[i] of segments 0 and 1.

    x is latents[b, seg.in_offset:] for a low-rank module; for a dense one (in_offset -1) the normed vector, as in
    `norm_project`. segments: gate and up, with equal rows; their widths may differ. bias: float32 [2 * rows] or
    None. out: [batch, rows].
    """
    rows = segments.rows[0]
    batch, hidden_size = scaled.shape
    _project_silu_mul_kernel[(triton.cdiv(rows, config.rows),)](
        latents, latents.stride(0), scaled, squares, squares.shape[1], hidden_size, eps, arena, rows, batch,
        *segments.offsets[:2], *segments.widths[:2], *segments.in_offsets[:2], bias, out, out.stride(0),
        ROWS=config.rows, VECTOR=config.vector, SLICES=config.num_warps, BLOCK_K=config.block_k, AHEAD=config.ahead,
        NUM_SQUARES=triton.next_power_of_2(squares.shape[1]), HAS_BIAS=bias is not None, PDL=pdl,
        DENSE0=segments.in_offsets[0] < 0, DENSE1=segments.in_offsets[1] < 0,
        num_warps=config.num_warps, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _project_silu_mul_kernel(
    latents, latents_stride, scaled, squares, num_squares, hidden_size, eps, arena, num_rows, batch,
    offset0, offset1, K0, K1, in0, in1, bias, out, out_stride,
    ROWS: tl.constexpr, VECTOR: tl.constexpr, SLICES: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr,
    NUM_SQUARES: tl.constexpr,
    HAS_BIAS: tl.constexpr, PDL: tl.constexpr, DENSE0: tl.constexpr, DENSE1: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = 1 if VECTOR else 8
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < num_rows
    offset0, offset1 = tl.cast(offset0, tl.int64), tl.cast(offset1, tl.int64)
    tiles0 = load_tiles(arena, offset0, rows, row_mask, 0, K0, K0, VECTOR, SLICES, BLOCK_K, AHEAD)
    tiles1 = load_tiles(arena, offset1, rows, row_mask, 0, K1, K1, VECTOR, SLICES, BLOCK_K, AHEAD)
    wait_for_inputs(PDL)
    if DENSE0:
        x0, stride0 = scaled, hidden_size
    else:
        x0, stride0 = latents + in0, latents_stride
    if DENSE1:
        x1, stride1 = scaled, hidden_size
    else:
        x1, stride1 = latents + in1, latents_stride
    gate, up = gemv_pair(
        arena, offset0, rows, x0, stride0, K0, tiles0, offset1, rows, x1, stride1, K1, tiles1, row_mask, batch,
        ROWS, VECTOR, SLICES, BLOCK_K, AHEAD,
    )  # fmt: skip
    if DENSE0 or DENSE1:
        scale = norm_scale(squares, num_squares, hidden_size, eps, batch, COLUMNS, NUM_SQUARES)[None, :]
        if DENSE0:
            gate *= scale
        if DENSE1:
            up *= scale
    if HAS_BIAS:
        gate += tl.load(bias + rows, mask=row_mask, other=0.0)[:, None]
        up += tl.load(bias + num_rows + rows, mask=row_mask, other=0.0)[:, None]
    result = gate / (1.0 + tl.exp(-gate)) * up
    column = tl.arange(0, COLUMNS)
    pointers = out + column[None, :] * out_stride + rows[:, None]
    tl.store(pointers, result.to(out.dtype.element_ty), mask=row_mask[:, None] & (column < batch)[None, :])
