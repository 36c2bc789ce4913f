"""Basis Sharing (Wang et al., arXiv 2410.03765): consecutive layers share one basis [rank, in].

Every layer keeps its own coefficient under the dense name (`q_proj.weight`, but [out, rank]). The basis is
registered at model level for each layer of its group (`model.q_basis.3.weight`) and, in the LLaMA layout,
inside each layer too. Sharded files hold all copies; they are compared before one is kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from ...errors import CheckpointError
from ..tensors import LazyTensor
from .foreign import ForeignCheckpoint
from .names import all_linears, check_factors
from .source_model import Factors, SourceModel

FAMILY = "basis-sharing"

_MODULE = re.compile(r"(model\.layers\.(\d+)\.\w+)\.(\w+)_proj")


def read(source: ForeignCheckpoint, config: Mapping[str, Any]) -> SourceModel:
    """Raises CheckpointError when a basis is missing, or differs within its group."""
    tensors = dict(source.tensors)
    factors: dict[str, Factors] = {}
    bases: dict[tuple[str, tuple[str, ...]], LazyTensor] = {}
    for module, shape in all_linears(config).items():
        match = _MODULE.fullmatch(module)
        if match is None:
            continue  # lm_head
        parent, layer, projection = match[1], int(match[2]), match[3]
        names = (f"model.{projection}_basis.{layer}.weight", f"{parent}.{projection}_basis.weight")
        copies = {name: tensors.pop(name) for name in names if name in tensors}
        if not copies:
            continue  # a projection that this model neither shares nor factors stays dense
        coefficient = tensors.pop(f"{module}.weight", None)
        if coefficient is None:
            raise CheckpointError(f"{module} has a basis and no coefficient", "the checkpoint is incomplete")
        group = _group_of(layer, source.config or {}, projection)
        basis = bases.setdefault((projection, group), next(iter(copies.values())))
        for name, copy in copies.items():
            if copy is not basis and not _equal(copy, basis):
                raise CheckpointError(
                    f"{name} differs from the basis of its group of layers {', '.join(group)}",
                    "the checkpoint or its config is damaged",
                )
        factors[module] = check_factors(
            module, Factors(basis, coefficient, tensors.pop(f"{module}.bias", None)), shape
        )
    return SourceModel(tensors, factors)


def _equal(one: LazyTensor, other: LazyTensor) -> bool:
    described_alike = (one.shape, one.dtype) == (other.shape, other.dtype)
    return described_alike and torch.equal(one.read(), other.read())


def _group_of(layer: int, config: Mapping[str, Any], projection: str) -> tuple[str, ...]:
    """The layers that share this layer's basis, by the config; the layer alone where it does not say."""
    groups = config.get(f"{projection}_groups")
    for group in groups if isinstance(groups, list) else []:
        if isinstance(group, list) and layer in group:
            return tuple(map(str, group))
    return (str(layer),)
