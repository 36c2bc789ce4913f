"""silu(gate) * up: what lies between the GEMMs of gate and up and that of down."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

#: Elements of a program: 8 a thread, one load of 16 bytes each from gate and up.
_ELEMENTS = 1024


def silu_mul(gate: Tensor, up: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = silu(gate + bias of gate) * (up + bias of up), with silu(x) = x * sigmoid(x), in float32 arithmetic.

    gate, up, out: [tokens, columns] in any float dtype, each with a row stride of its own; out may be gate or up.
    bias: float32 [2 * columns], gate's then up's, or None.
    """
    tokens, columns = gate.shape
    block = min(triton.next_power_of_2(columns), _ELEMENTS)
    rows = _ELEMENTS // block
    _silu_mul_kernel[(triton.cdiv(tokens, rows) * triton.cdiv(columns, block),)](
        gate, up, bias, out, gate.stride(0), up.stride(0), out.stride(0), tokens,
        COLUMNS=columns, BLOCK=block, ROWS=rows,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _silu_mul_kernel(
    gate, up, bias, out, gate_stride, up_stride, out_stride, tokens,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = tl.cdiv(COLUMNS, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (token < tokens) & (column < COLUMNS)
    g = tl.load(gate + token * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + token * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        g += tl.load(bias + column, mask=column < COLUMNS, other=0.0)
        u += tl.load(bias + COLUMNS + column, mask=column < COLUMNS, other=0.0)
    result = g / (1.0 + tl.exp(-g)) * u
    tl.store(out + token * out_stride + column, result.to(out.dtype.element_ty), mask=mask)
