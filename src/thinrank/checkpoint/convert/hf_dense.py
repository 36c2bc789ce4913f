"""Plain dense Hugging Face checkpoints: the names are right already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .foreign import ForeignCheckpoint
from .source_model import SourceModel

FAMILY = "hf-dense"


def read(source: ForeignCheckpoint, config: Mapping[str, Any]) -> SourceModel:
    return SourceModel(dict(source.tensors))
