"""Dobi-SVD (Wang et al., arXiv 2502.02723), without and with its 8-bit remapping.

Without: a pickled module whose `X.ALinear` [rank, in] is applied first, `X.BLinear` [out, rank] second.
With: `remapping_weight.pt` holds both factors as codes of an 8-bit floating-point map, one scale per latent
dimension, and the part of the longer factor that did not fit as float16. They are decoded to float16 here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from ...config import LinearShape
from ...errors import CheckpointError
from ..tensors import LazyTensor
from .asvd import split_ab_linear
from .foreign import ForeignCheckpoint
from .names import all_linears, sort_names
from .source_model import Factors, SourceModel

FAMILY = "dobi-svd"


def read(source: ForeignCheckpoint, config: Mapping[str, Any]) -> SourceModel:
    """Raises CheckpointError when codes, scales and tails do not fit the config."""
    if source.remapped is None:
        factors, dense = sort_names(source.tensors, config, split_ab_linear, ("ALinear", "BLinear"))
        return SourceModel(dense, factors)
    linears = all_linears(config)
    factors = {}
    for module, entry in source.remapped.items():
        if module not in linears or not isinstance(entry, Mapping):
            raise CheckpointError(
                f"the remapped weights hold {module}", "the config belongs to another model"
            )
        factors[module] = _decode(module, entry, linears[module])
    return SourceModel(dict(source.tensors), factors)


def _decode(module: str, entry: Mapping[str, Any], shape: LinearShape) -> Factors:
    """Factors of one module. us [out, k] and vt [k, in] share k; both keep min(out, in) codes per k."""
    out_features, in_features = shape.out_features, shape.in_features
    short = min(out_features, in_features)
    us_codes, vt_codes = _part(module, entry, "us_quan"), _part(module, entry, "vt_quan")
    us_scale, vt_scale = _part(module, entry, "us_absmax"), _part(module, entry, "vt_absmax")
    rank = us_codes.shape[0]
    tail = _tail(module, entry.get("tuple_info"))
    expected_tail = (
        None
        if out_features == in_features
        else ("us", (out_features - short, rank))
        if out_features > in_features
        else ("vt", (rank, in_features - short))
    )
    fits = (
        us_codes.shape == vt_codes.shape == (rank, short)
        and us_codes.dtype == vt_codes.dtype == torch.uint8
        and us_scale.shape == vt_scale.shape == (rank,)
        and (tail and (tail[0], tail[1].shape)) == expected_tail
    )
    if not fits:
        raise CheckpointError(
            f"the remapped weights of {module} do not fit its shape {list(shape[:2])}",
            "the config belongs to another model, or the file is damaged",
        )

    def read_us() -> torch.Tensor:
        us = (dynamic_map()[us_codes.read().int()].T * us_scale.read().float()).half()
        return torch.cat([us, tail[1].read().half()], 0) if tail and tail[0] == "us" else us.contiguous()

    def read_vt() -> torch.Tensor:
        vt = (vt_scale.read().float()[:, None] * dynamic_map()[vt_codes.read().int()]).half()
        return torch.cat([vt, tail[1].read().half()], 1) if tail and tail[0] == "vt" else vt

    return Factors(
        LazyTensor((rank, in_features), torch.float16, read_vt),
        LazyTensor((out_features, rank), torch.float16, read_us),
        dense_dtype=torch.float16,
    )


def _part(module: str, entry: Mapping[str, Any], name: str) -> LazyTensor:
    tensor = entry.get(name)
    if not isinstance(tensor, LazyTensor) or not tensor.shape:
        raise CheckpointError(f"the remapped weights of {module} lack {name}", "the file is damaged")
    return tensor


def _tail(module: str, info: object) -> tuple[str, LazyTensor] | None:
    match info:
        case None:
            return None
        case (str(side), LazyTensor() as tensor):
            return side, tensor
    raise CheckpointError(
        f"the remapped weights of {module} have a malformed tuple_info", "the file is damaged"
    )


@cache
def dynamic_map() -> torch.Tensor:
    """The 256 values of the signed 8-bit dynamic map, ascending, float32.

    Seven decades from 1e-6 to 1; decade i holds the midpoints of 2^i equal steps from 0.1 to 1, with both
    signs; then 0 and 1 (Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", 2015, as
    bitsandbytes lays it out).
    """
    values = [torch.tensor([0.0, 1.0])]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1)
        midpoints = 10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += [midpoints, -midpoints]
    return torch.cat(values).sort().values
