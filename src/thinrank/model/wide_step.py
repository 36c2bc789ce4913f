"""The rows of a decode step that multiplies them as matrices: one new token of each of many sequences.

The layers are those of prefill; only where a row stands and what it reads comes from device memory, so that one
captured graph serves every step. Knows nothing about requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.decode_attention import DecodeWorkspace, decode_attention
from ..kernels.slots import slots
from .batch import KVLayer


@dataclass(frozen=True, eq=False)
class SequenceRows:
    """`gemm_layers.Rows` of a decode step; fields as in `DecodeState`. slots: int64 [batch].

    What a row reads and how it is summed depends on the batch size, and on nothing that another row holds: a GEMM's row
    is the product of that row alone, and attention is split by the row's own length.
    """

    positions: Tensor
    context_lens: Tensor
    block_tables: Tensor
    slots: Tensor
    workspace: DecodeWorkspace
    pdl: bool

    @staticmethod
    def of(
        positions: Tensor, context_lens: Tensor, block_tables: Tensor, workspace: DecodeWorkspace, pdl: bool
    ) -> SequenceRows:
        places = torch.empty(len(positions), dtype=torch.int64, device=positions.device)
        slots(positions, block_tables, places)
        return SequenceRows(positions, context_lens, block_tables, places, workspace, pdl)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: KVLayer | None, window: int | None) -> Tensor:
        """k and v are read from the cache, where they are already."""
        assert cache is not None
        head_dim = cache.keys.shape[3]
        return decode_attention(
            q.view(len(q), -1, head_dim), cache.keys, cache.values, self.block_tables, self.context_lens,
            scale=head_dim**-0.5, window=window, out=torch.empty_like(q), workspace=self.workspace, pdl=self.pdl,
        )  # fmt: skip
