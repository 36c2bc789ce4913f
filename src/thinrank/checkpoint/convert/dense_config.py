"""The dense model's own config, recovered from a foreign one: foreign keys and class names removed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...model.registry import ARCHITECTURES

_FOREIGN_KEYS = {"auto_map", "truncation_ranks", "svd_ranks", "dobi_target_modules", "quantization_config"}
_FOREIGN_PREFIXES = ("_", "low_rank_", "lowrank_", "num_basis_", "share_")
_FOREIGN_SUFFIXES = ("_groups",)


def dense_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without foreign keys, with the plain `model_type` and `architectures`.

    "svdllm-llama" and "lowrank_llama" are llama. An architecture that is not implemented keeps its name,
    so that the refusal can name it.
    """
    dense = {key: value for key, value in config.items() if not _is_foreign(key)}
    model_type = str(dense.get("model_type", ""))
    plain = model_type.replace("-", "_").rpartition("_")[2]
    if model_type not in ARCHITECTURES and plain in ARCHITECTURES:
        dense["model_type"] = model_type = plain
    if model_type in ARCHITECTURES:
        dense["architectures"] = [ARCHITECTURES[model_type].class_name]
    return dense


def _is_foreign(key: str) -> bool:
    return key in _FOREIGN_KEYS or key.startswith(_FOREIGN_PREFIXES) or key.endswith(_FOREIGN_SUFFIXES)
