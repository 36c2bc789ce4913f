"""`LazyTensor`: a tensor whose shape and dtype are known and whose bytes are read when asked for.

Readers of every file type produce them, converters pass them on or derive new ones, the writer reads
them one at a time. That keeps the peak memory of a conversion at about one tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

import torch


@dataclass(frozen=True, eq=False)
class LazyTensor:
    """A promise of `read()`, a contiguous CPU tensor of exactly this `shape` and `dtype`.

    Two names that hold the same object share it (a tied factor, a tied embedding).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor] = field(repr=False)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def to(self, dtype: torch.dtype) -> LazyTensor:
        """The same tensor, rounded to `dtype` when read."""
        if dtype == self.dtype:
            return self
        return LazyTensor(self.shape, dtype, lambda: self.read().to(dtype))

    @staticmethod
    def of(tensor: torch.Tensor) -> LazyTensor:
        """Wrap a tensor that is in memory already."""
        return LazyTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor.contiguous())
