"""Which family a foreign checkpoint belongs to, judged by its content alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .tensors import LazyTensor

#: `X.ALinear.weight` / `X.BLinear.weight`: ASVD, Dobi-SVD and LowRankArena, in two orders.
AB_LINEAR = re.compile(r"(.+)\.(ALinear|BLinear)\.(weight|bias)")
#: `X.q_u_proj.weight`: the pickled modules of SVD-LLM.
UV_IN_NAME = re.compile(r"(.+)\.(q|k|v|o|gate|up|down|out|fc1|fc2)_(u|v)_proj\.(weight|bias)")
#: `X.q_proj.u_proj.weight`: LowRankArena's export of SVD-LLM.
UV_BELOW_NAME = re.compile(r"(.+\.(?:q|k|v|o|gate|up|down)_proj|lm_head)\.(u|v)_proj\.(weight|bias)")
#: `model.q_basis.0.weight`, `model.layers.0.self_attn.q_basis.weight`: Basis Sharing.
BASIS = re.compile(r"(.+)[._](?:q|k|v|o|gate|up|down|attn|out)_basis(?:\.\d+)?\.weight")


def detect_family(config: Mapping[str, Any] | None, tensors: Mapping[str, LazyTensor]) -> str:
    """The family of a state dict: config keys first, tensor names where they are missing."""
    keys = config or {}
    if "low_rank_modules" in keys or "svd_ranks" in keys:
        return "lowrank-arena"
    if "dobi_target_modules" in keys:
        return "dobi-svd"
    if "truncation_ranks" in keys:
        return "asvd"
    if any(key.startswith("num_basis_") for key in keys) or any(BASIS.fullmatch(name) for name in tensors):
        return "basis-sharing"
    if any(UV_BELOW_NAME.fullmatch(name) for name in tensors):
        return "lowrank-arena"
    if any(UV_IN_NAME.fullmatch(name) for name in tensors):
        return "svd-llm"
    if any(AB_LINEAR.fullmatch(name) for name in tensors):
        return _family_of_ab_linear(tensors)
    return "hf-dense"


def _family_of_ab_linear(tensors: Mapping[str, LazyTensor]) -> str:
    """ASVD applies BLinear first, Dobi-SVD ALinear; the rank, on the inside, tells them apart."""
    for name, a in tensors.items():
        match = AB_LINEAR.fullmatch(name)
        b = tensors.get(f"{match[1]}.BLinear.weight") if match and match[2] == "ALinear" else None
        if b is None or len(a.shape) != 2 or len(b.shape) != 2:
            continue
        if a.shape[0] == b.shape[1] and a.shape[1] != b.shape[0]:
            return "dobi-svd"
    return "asvd"
