"""LowRankArena's exports of other families' checkpoints, told apart by their tensor names.

`X.u_proj` / `X.v_proj` (its SVD-LLM export; v first) or `X.ALinear` / `X.BLinear` (either order).
The ranks in their configs can be wrong for grouped-query models; shapes are used instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..detect import UV_BELOW_NAME
from .asvd import split_ab_linear
from .foreign import ForeignCheckpoint
from .names import Part, sort_names
from .source_model import SourceModel

FAMILY = "lowrank-arena"


def read(source: ForeignCheckpoint, config: Mapping[str, Any]) -> SourceModel:
    if any(UV_BELOW_NAME.fullmatch(name) for name in source.tensors):
        factors, dense = sort_names(source.tensors, config, _split_uv, ("v", "u"))
    else:
        factors, dense = sort_names(source.tensors, config, split_ab_linear, ("BLinear", "ALinear"))
    return SourceModel(dense, factors)


def _split_uv(name: str) -> Part | None:
    match = UV_BELOW_NAME.fullmatch(name)
    return Part(*match.groups()) if match else None
