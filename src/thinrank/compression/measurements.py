"""What a compression can know about a model on its calibration text, measured when it is first asked for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint.load import OpenCheckpoint
from .sensitivity import Sensitivity, measure
from .statistics import Statistics, collect


@dataclass(frozen=True)
class Measurements:
    """sequences: int64 [samples, length]; None where nothing will be asked for. root: keeps the files."""

    checkpoint: OpenCheckpoint
    sequences: Tensor | None
    root: Path
    device: torch.device
    progress: bool

    @property
    def tokens(self) -> Tensor:
        """The sequences, where they are known to be there."""
        assert self.sequences is not None, "nothing is measured without calibration"
        return self.sequences

    @cached_property
    def statistics(self) -> Statistics:
        return collect(self.checkpoint, self.tokens, self.root, self.device, self.progress)

    @cached_property
    def sensitivity(self) -> Sensitivity:
        return measure(self.checkpoint, self.tokens, self.statistics, self.device, self.progress)
