"""What an adapter makes of a foreign checkpoint: one neutral description, the same for every family.

Adapters only translate names and layouts. Completing from a base, densifying, rebalancing, casting and
writing happen once, in `convert/__init__.py`, for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..tensors import LazyTensor


@dataclass(frozen=True, eq=False)
class Factors:
    """A low-rank module: weight = factor_out @ factor_in.

    factor_in [rank, in], factor_out [out, rank], bias [out]. Modules that hold the same `factor_in`
    object share it. dense_dtype: what the family's own loader rounds the product to when it multiplies
    the pair out; None: it never does.
    """

    factor_in: LazyTensor
    factor_out: LazyTensor
    bias: LazyTensor | None = None
    dense_dtype: torch.dtype | None = None

    @property
    def rank(self) -> int:
        return self.factor_in.shape[0]


@dataclass
class SourceModel:
    """A checkpoint in neutral terms.

    tensors: dense tensors under their Hugging Face names (embedding, norms, `<module>.weight`,
    `<module>.bias`). factors: low-rank modules by name. dropped: one line for each thing in the source
    that is left out.
    """

    tensors: dict[str, LazyTensor]
    factors: dict[str, Factors] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
