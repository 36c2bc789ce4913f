"""What an adapter makes of a foreign checkpoint: one neutral description, the same for every family.

Adapters only translate names and layouts. Completing from a base, densifying, rebalancing, casting and
writing happen once, in `convert/__init__.py`, for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..tensors import LazyTensor


@dataclass(frozen=True, eq=False)
class Factors:
    """A low-rank module: weight = factor_out @ factor_in.

    factor_in [rank, in], factor_out [out, rank], bias [out]. Modules that hold the same `factor_in`
    object share it.
    """

    factor_in: LazyTensor
    factor_out: LazyTensor
    bias: LazyTensor | None = None

    @property
    def rank(self) -> int:
        return self.factor_in.shape[0]


@dataclass
class SourceModel:
    """A checkpoint in neutral terms.

    family: name of the format ("svd-llm"). config: the Hugging Face config of the dense model, foreign
    keys removed; None if the source has none. tensors: dense tensors under their Hugging Face names
    (embedding, norms, `<module>.weight`, `<module>.bias`). factors: low-rank modules by name.
    tokenizer_files: file name -> content, for tokenizer, generation config and chat template.
    dropped: one line for each thing in the source that is left out. base_model: the dense model that
    the source says it came from.
    """

    family: str
    config: dict[str, Any] | None
    tensors: dict[str, LazyTensor]
    factors: dict[str, Factors] = field(default_factory=dict)
    tokenizer_files: dict[str, bytes] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    base_model: str | None = None
