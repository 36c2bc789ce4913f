"""Token ids to the residual stream, and what the first norm needs of it (the start of a decode step)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .gemv import SQUARES_GROUP, store_parts, wait_for_inputs


def embed(
    token_ids: Tensor,
    embed_tokens: Tensor,
    norm: Tensor,
    hidden: Tensor,
    scaled: Tensor,
    squares: Tensor,
    *,
    pdl: bool,
) -> None:
    """hidden[b] = embed_tokens[token_ids[b]]; scaled = hidden * norm; sums of squares over groups of 16 channels.

    token_ids: int64 [batch]. embed_tokens: [vocab_size, hidden_size]. norm: float32 [hidden_size]. hidden: float32
    [batch, hidden_size]. scaled: [batch, 2, hidden_size], in the weights' dtype and in two parts (gemv). squares:
    float32 [batch, hidden_size / 16].
    """
    batch, hidden_size = hidden.shape
    _embed_kernel[(triton.cdiv(hidden_size, 1024), batch)](
        token_ids, embed_tokens, norm, hidden, scaled, squares, hidden_size,
        GROUPS=1024 // SQUARES_GROUP, GROUP=SQUARES_GROUP, PDL=pdl, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _embed_kernel(
    token_ids, embed_tokens, norm, hidden, scaled, squares, hidden_size,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row = tl.program_id(1)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    columns = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = columns < hidden_size
    token = tl.load(token_ids + row)
    x = tl.load(embed_tokens + token * hidden_size + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(hidden + row * hidden_size + columns, x, mask=mask)
    next_input = x * tl.load(norm + columns, mask=mask, other=0.0)
    store_parts(scaled + row * 2 * hidden_size + columns, hidden_size, next_input, mask)
    num_groups = hidden_size // GROUP
    tl.store(squares + row * num_groups + group, tl.sum(x * x, axis=1), mask=group < num_groups)
