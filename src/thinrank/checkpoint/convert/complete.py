"""Fills a model up from its dense base, and drops what no decoder uses; both are reported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...errors import CheckpointError
from ...model.registry import parse_config
from .foreign import ForeignCheckpoint
from .names import all_linears
from .source_model import SourceModel

#: Tables and masks that old module classes keep as buffers; the values can be wrong (rounded, other base).
_BUFFERS = re.compile(r"(inv_freq|original_inv_freq|cos_cached|sin_cached|bias_mask|masked_bias|causal_mask)")


def complete(model: SourceModel, config: Mapping[str, Any], base: ForeignCheckpoint | None) -> list[str]:
    """Change `model` in place; return the names of the tensors taken from `base`.

    The source's own tensors win; a shape that disagrees with the config is reported by the check that
    follows every conversion.
    """
    parsed, linears = parse_config(config), all_linears(config)
    buffers = [name for name in model.tensors if _BUFFERS.fullmatch(name.rpartition(".")[2])]
    for name in buffers:
        del model.tensors[name]
    if buffers:
        model.dropped.append(f"{len(buffers)} rotary and mask buffers (rebuilt exactly at run time)")
    if parsed.tie_word_embeddings and model.tensors.pop("lm_head.weight", None) is not None:
        model.dropped.append("lm_head.weight (tied to the embedding)")
    for module, shape in linears.items():
        if not shape.bias and f"{module}.bias" in model.tensors:
            del model.tensors[f"{module}.bias"]
            model.dropped.append(f"{module}.bias (this architecture has none)")
    if base is None:
        return []
    if any(name not in base.tensors for name in ("model.embed_tokens.weight", "model.norm.weight")):
        raise CheckpointError(f"{base.path} is no dense model", "name the dense model with --base")
    wanted = list(parsed.other_tensors())
    for module, shape in parsed.linears().items():
        if module not in model.factors:
            wanted += [f"{module}.weight", f"{module}.bias"] if shape.bias else [f"{module}.weight"]
    taken = [name for name in wanted if name not in model.tensors and name in base.tensors]
    for name in taken:
        model.tensors[name] = base.tensors[name]
    return taken
