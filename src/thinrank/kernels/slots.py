"""Where the keys and values of each row's next token go (the start of a decode step of many rows)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..config import BLOCK_SIZE

#: Rows of a program.
_ROWS = 64


def slots(positions: Tensor, block_tables: Tensor, out: Tensor) -> None:
    """out[b] = block_tables[b, positions[b] // 64] * 64 + positions[b] % 64.

    positions: int32 [batch]. block_tables: int32 [batch, blocks], any row stride. out: int64 [batch].
    """
    rows = len(positions)
    _slots_kernel[(triton.cdiv(rows, _ROWS),)](
        positions, block_tables, block_tables.stride(0), out, rows, BLOCK_SIZE=BLOCK_SIZE, ROWS=_ROWS, num_warps=2
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride", "rows"])
def _slots_kernel(
    positions, block_tables, table_stride, out, rows, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < rows
    position = tl.load(positions + row, mask=mask, other=0)
    entry = block_tables + row.to(tl.int64) * table_stride + position // BLOCK_SIZE
    block = tl.load(entry, mask=mask, other=0).to(tl.int64)
    tl.store(out + row, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=mask)
