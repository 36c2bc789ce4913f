"""silu(gate) * up with both output-side matrices in one launch (step 7 of a layer)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .gemv import gemv_pair, load_rows, load_squares, norm_scale, program_row, store_parts, wait_for_inputs
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

    x is latents[b, seg.in_offset:] for a low-rank module; for a dense one (in_offset below 0) the normed vector, as in
    `norm_project`. segments: gate and up, with equal rows; their widths may differ. bias: float32 [2 * rows] or
    None. latents, scaled, out: [batch, 2, width], in two parts (gemv).
    """
    rows = segments.rows[0]
    batch, _, hidden_size = scaled.shape
    config = config.for_batch(batch, 2 * rows)
    arguments = config.arguments(batch, *segments.widths[:2])
    if batch <= 4 and config.ahead == 1:
        # With so few tiles under way many programs make up for it: 14 of 2 warps an SM, 12 with the 80 it would take.
        arguments["maxnreg"] = 72
    _project_silu_mul_kernel[(triton.cdiv(rows, config.rows // 2),)](
        latents, latents.stride(0), scaled, squares, squares.shape[1], hidden_size, eps, arena, rows, batch,
        *segments.offsets[:2], *segments.widths[:2], *segments.in_offsets[:2], bias, out, out.stride(0),
        NUM_SQUARES=triton.next_power_of_2(squares.shape[1]), HAS_BIAS=bias is not None,
        DENSE0=segments.in_offsets[0] < 0, DENSE1=segments.in_offsets[1] < 0,
        ROWS=config.rows // 2, UNEQUAL=segments.widths[0] != segments.widths[1],
        PDL=pdl, launch_pdl=pdl, **arguments,
    )  # fmt: skip


@triton.jit(do_not_specialize=["batch"])
def _project_silu_mul_kernel(
    latents, latents_stride, scaled, squares, num_squares, hidden_size, eps, arena, num_rows, batch,
    offset0: tl.int64, offset1: tl.int64, K0, K1, in0, in1, bias, out, out_stride,
    SLICES: tl.constexpr, AHEAD: tl.constexpr, EVEN: tl.constexpr, FOUR: tl.constexpr,
    NUM_SQUARES: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr, DENSE0: tl.constexpr, DENSE1: tl.constexpr,
    ROWS: tl.constexpr, UNEQUAL: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(0) * ROWS
    apart: tl.constexpr = ROWS // 2
    gate_rows = load_rows(arena + offset0, first_row, num_rows, K0, apart, 0, K0, ROWS, SLICES, AHEAD, EVEN)
    up_rows = load_rows(arena + offset1, first_row, num_rows, K1, apart, 0, K1, ROWS, SLICES, AHEAD, EVEN)
    wait_for_inputs(PDL)
    if DENSE0 or DENSE1:
        square_sums = load_squares(squares, num_squares, batch, NUM_SQUARES)
    if DENSE0:
        x0, stride0 = scaled, 2 * hidden_size
    else:
        x0, stride0 = latents + in0, latents_stride
    if DENSE1:
        x1, stride1 = scaled, 2 * hidden_size
    else:
        x1, stride1 = latents + in1, latents_stride
    gate, up = gemv_pair(
        gate_rows, x0, stride0, K0, up_rows, x1, stride1, K1, 0, batch,
        True, DENSE0 and DENSE1, SLICES, AHEAD, EVEN, FOUR, UNEQUAL,
    )  # fmt: skip
    if DENSE0 or DENSE1:
        scale = norm_scale(square_sums, hidden_size, eps)
        if DENSE0:
            gate *= scale
        if DENSE1:
            up *= scale
    row, column = first_row + program_row(tl.arange(0, ROWS), apart), tl.arange(0, 8)
    if HAS_BIAS:
        gate += tl.load(bias + row, mask=row < num_rows, other=0.0)[:, None]
        up += tl.load(bias + num_rows + row, mask=row < num_rows, other=0.0)[:, None]
    result = gate / (1.0 + tl.exp(-gate)) * up
    pointers = out + column[None, :] * out_stride + row[:, None]
    store_parts(pointers, out_stride // 2, result, (row < num_rows)[:, None] & (column < batch)[None, :])
