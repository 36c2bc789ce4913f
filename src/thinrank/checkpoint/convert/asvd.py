"""ASVD (Yuan et al., arXiv 2312.05821): `X.BLinear` [rank, in] goes first, `X.ALinear` [out, rank] second.

Only the factored modules are listed in the config; lm_head may be one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..detect import AB_LINEAR
from .foreign import ForeignCheckpoint
from .names import Part, sort_names
from .source_model import SourceModel

FAMILY = "asvd"


def read(source: ForeignCheckpoint, config: Mapping[str, Any]) -> SourceModel:
    factors, dense = sort_names(source.tensors, config, split_ab_linear, ("BLinear", "ALinear"))
    return SourceModel(dense, factors)


def split_ab_linear(name: str) -> Part | None:
    match = AB_LINEAR.fullmatch(name)
    return Part(*match.groups()) if match else None
