"""The thinrank checkpoint format, version 1 (specified in docs/format.md): names, config section, shapes.

Knows nothing about reading or writing files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config import ModelConfig
from ..errors import CheckpointError, UnsupportedModelError
from ..model.registry import parse_config

QUANT_METHOD = "thinrank"
FORMAT_VERSION = 1

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


def factor_in_name(module: str) -> str:
    return f"{module}.factor_in.weight"


def factor_out_name(module: str) -> str:
    return f"{module}.factor_out.weight"


def factor_bias_name(module: str) -> str:
    return f"{module}.factor_out.bias"


def guard_name(module: str) -> str:
    """A zero-length tensor that makes a loader without our plugin fail instead of inventing weights."""
    return f"{module}.weight"


@dataclass(frozen=True)
class LowRankSection:
    """The `quantization_config` of a thinrank checkpoint.

    ranks: module name -> rank. tied_factors: tensor name -> tensor that holds it. source: where the
    checkpoint came from (family, keep_ratio, tool, base_model); informative only.
    """

    ranks: Mapping[str, int]
    tied_factors: Mapping[str, str] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "quant_method": QUANT_METHOD,
            "format_version": FORMAT_VERSION,
            "modules": {name: {"rank": rank} for name, rank in self.ranks.items()},
            "tied_factors": dict(self.tied_factors),
            "source": dict(self.source),
        }

    @staticmethod
    def from_json(section: Any) -> LowRankSection:
        """Parse and check the section. Raises CheckpointError naming the entry that is wrong."""
        if not isinstance(section, Mapping) or section.get("quant_method") != QUANT_METHOD:
            method = section.get("quant_method") if isinstance(section, Mapping) else section
            raise UnsupportedModelError(
                f"the checkpoint is quantised with {method!r}", "only 16- and 32-bit weights are supported"
            )
        version = section.get("format_version")
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"the checkpoint has format_version {version!r}",
                f"this thinrank reads version {FORMAT_VERSION}; install a newer one",
            )
        modules, tied = section.get("modules"), section.get("tied_factors", {})
        if not isinstance(modules, Mapping) or not isinstance(tied, Mapping):
            raise CheckpointError(
                "quantization_config lacks modules or tied_factors", "the config is damaged"
            )
        ranks: dict[str, int] = {}
        for name, entry in modules.items():
            rank = entry.get("rank") if isinstance(entry, Mapping) else None
            if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
                raise CheckpointError(
                    f"quantization_config gives {name} the rank {rank!r}", "the config is damaged"
                )
            ranks[str(name)] = rank
        source = section.get("source", {})
        return LowRankSection(
            ranks,
            {str(name): str(holder) for name, holder in tied.items()},
            source if isinstance(source, Mapping) else {},
        )


def read_config(config: Mapping[str, Any]) -> tuple[ModelConfig, LowRankSection | None]:
    """Parse the config.json of a thinrank or plain dense checkpoint.

    Raises CheckpointError when ranks or ties name modules that the architecture does not have.
    """
    raw = config.get("quantization_config")
    section = None if raw is None else LowRankSection.from_json(raw)
    model = parse_config(
        config,
        ranks=section.ranks if section else None,
        tied_factors=section.tied_factors if section else None,
    )
    linears = model.linears()
    for module in model.ranks:
        if module not in linears:
            raise CheckpointError(
                f"quantization_config lists {module}", "the architecture has no such module"
            )
    factor_shapes = factor_in_shapes(model)
    for name, holder in model.tied_factors.items():
        if name not in factor_shapes or holder not in factor_shapes:
            raise CheckpointError(
                f"quantization_config ties {name} to {holder}", "one of them is no factor_in"
            )
        if holder in model.tied_factors or factor_shapes[name] != factor_shapes[holder]:
            raise CheckpointError(
                f"quantization_config ties {name} to {holder}",
                "they differ in shape, or the holder is tied itself",
            )
    return model, section


def factor_in_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all `factor_in` tensors, tied ones included."""
    linears = config.linears()
    return {factor_in_name(m): (rank, linears[m].in_features) for m, rank in config.ranks.items()}


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this config stores, guards included."""
    tensors = config.other_tensors()
    for module, shape in config.linears().items():
        rank = config.ranks.get(module)
        if rank is None:
            tensors[f"{module}.weight"] = (shape.out_features, shape.in_features)
            if shape.bias:
                tensors[f"{module}.bias"] = (shape.out_features,)
            continue
        if factor_in_name(module) not in config.tied_factors:
            tensors[factor_in_name(module)] = (rank, shape.in_features)
        tensors[factor_out_name(module)] = (shape.out_features, rank)
        if shape.bias:
            tensors[factor_bias_name(module)] = (shape.out_features,)
        tensors[guard_name(module)] = (0,)
    return tensors
