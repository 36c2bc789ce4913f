"""GET /ranks: what is left of every projection, as the checkpoint says."""

from __future__ import annotations

import re
from collections import defaultdict

from pydantic import BaseModel

from ..checkpoint.format import factor_in_name
from ..config import ModelConfig
from ..model.cost import dense_config, module_parameters, parameters

_FACTOR_IN = factor_in_name("")


class ModuleRank(BaseModel):
    """module: its whole name. layer, name: its parts; layer is null outside the layers. rank: null for a dense module.

    full_rank: the smaller of out_features and in_features. parameters: that are stored for it; a factor_in that
    several modules share counts in the one that stores it. shared_with: the other modules of its factor_in.
    """

    module: str
    layer: int | None
    name: str
    out_features: int
    in_features: int
    rank: int | None
    full_rank: int
    parameters: int
    dense_parameters: int
    shared_with: list[str]


class Ranks(BaseModel):
    """modules: all projections, in the order of execution. parameters: of them, embedding and norms together.
    linear_parameters: of the projections. dense_...: of the model before compression."""

    num_layers: int
    parameters: int
    dense_parameters: int
    linear_parameters: int
    dense_linear_parameters: int
    modules: list[ModuleRank]


def describe_ranks(config: ModelConfig) -> Ranks:
    dense = dense_config(config)
    stored, full = module_parameters(config), module_parameters(dense)
    shared = _sharing(config)
    return Ranks(
        num_layers=config.num_hidden_layers,
        parameters=parameters(config),
        dense_parameters=parameters(dense),
        linear_parameters=sum(stored.values()),
        dense_linear_parameters=sum(full.values()),
        modules=[
            ModuleRank(
                module=module,
                layer=_split(module)[0],
                name=_split(module)[1],
                out_features=shape.out_features,
                in_features=shape.in_features,
                rank=config.ranks.get(module),
                full_rank=min(shape.out_features, shape.in_features),
                parameters=stored[module],
                dense_parameters=full[module],
                shared_with=[other for other in shared.get(module, []) if other != module],
            )
            for module, shape in config.linears().items()
        ],
    )


def _split(module: str) -> tuple[int | None, str]:
    """ "model.layers.3.mlp.up_proj" -> (3, "mlp.up_proj"); "lm_head" -> (None, "lm_head")."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
    return (None, module) if match is None else (int(match[1]), match[2])


def _sharing(config: ModelConfig) -> dict[str, list[str]]:
    """Of each module whose factor_in is shared: all that share it, the one that stores it first."""
    groups: dict[str, list[str]] = defaultdict(list)
    for tensor, holder in config.tied_factors.items():
        groups[holder.removesuffix(_FACTOR_IN)].append(tensor.removesuffix(_FACTOR_IN))
    whole = [[holder, *others] for holder, others in groups.items()]
    return {module: group for group in whole for module in group}
