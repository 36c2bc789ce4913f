"""Add a projection to the residual stream and norm the sum: what lies between two GEMMs that leave and enter it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

#: At least as many elements has a program: 16 a thread of 8 warps.
_ELEMENTS = 4096


def add_rms_norm(
    residual: Tensor, projection: Tensor | None, bias: Tensor | None, weight: Tensor, eps: float, out: Tensor
) -> None:
    """residual += projection + bias, in place; out = residual / sqrt(mean(residual^2) + eps) * weight.

    residual: float32 [tokens, hidden_size]. projection: the same shape in any float dtype, or None: the residual
    is only read. bias: float32 [hidden_size] or None. weight: float32 [hidden_size]. out: [tokens, hidden_size] in
    any float dtype. All contiguous; the arithmetic is float32.
    """
    tokens, hidden_size = residual.shape
    block = triton.next_power_of_2(hidden_size)
    rows = triton.cdiv(_ELEMENTS, block)
    _add_rms_norm_kernel[(triton.cdiv(tokens, rows),)](
        residual, projection, bias, weight, out, eps, tokens, HIDDEN=hidden_size, BLOCK=block, ROWS=rows,
        num_warps=min(max(block // 512, 8), 16),
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _add_rms_norm_kernel(
    residual, projection, bias, weight, out, eps, tokens,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (token < tokens) & (column < HIDDEN)
    places = token * HIDDEN + column
    x = tl.load(residual + places, mask=mask, other=0.0)
    if projection is not None:
        x += tl.load(projection + places, mask=mask, other=0.0).to(tl.float32)
        if bias is not None:
            x += tl.load(bias + column, mask=column < HIDDEN, other=0.0)
        tl.store(residual + places, x, mask=mask)
    inverse = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / HIDDEN + eps)
    normed = x * inverse * tl.load(weight + column, mask=column < HIDDEN, other=0.0)
    tl.store(out + places, normed.to(out.dtype.element_ty), mask=mask)
