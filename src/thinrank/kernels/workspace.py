"""Scratch memory of the split sums, shared by all GEMVs of a decode step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SplitWorkspace(NamedTuple):
    """partials: float32, what programs that share a block of rows hand to the last of them. counters: int32, how
    many have arrived; zero between launches."""

    partials: Tensor
    counters: Tensor

    @staticmethod
    def allocate(max_rows: int, max_splits: int, device: torch.device) -> SplitWorkspace:
        """Enough for matrices of `max_rows` rows."""
        return SplitWorkspace(
            torch.empty(max_rows * max_splits * 8 + 1024, dtype=torch.float32, device=device),
            torch.zeros(max_rows // 8 + 8, dtype=torch.int32, device=device),
        )
