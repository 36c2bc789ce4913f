"""SVD-LLM v1 and v2 (Wang et al., arXiv 2403.07378, 2503.12340).

`q_v_proj` [rank, in] is applied first, `q_u_proj` [out, rank] second.

The file is a pickled module, so `Linear.in_features` may be stale (grouped-query attention); the tensors'
shapes are right. `v_v_proj` and `v_u_proj` are the two factors of the value projection.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..detect import UV_IN_NAME
from .foreign import ForeignCheckpoint
from .names import Part, sort_names
from .source_model import SourceModel

FAMILY = "svd-llm"


def read(source: ForeignCheckpoint, config: Mapping[str, Any]) -> SourceModel:
    factors, dense = sort_names(source.tensors, config, _split, ("v", "u"))
    return SourceModel(dense, factors)


def _split(name: str) -> Part | None:
    match = UV_IN_NAME.fullmatch(name)
    if match is None:
        return None
    parent, projection, side, kind = match.groups()
    return Part(f"{parent}.{projection}_proj", side, kind)
