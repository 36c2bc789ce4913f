"""What is factored: units of modules that share one factor_in, mostly a single module each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..config import ModelConfig
from ..errors import OptionError
from .statistics import layer_of
from .store import fingerprint
from .truncate import rank_for


@dataclass(frozen=True)
class Unit:
    """One module, or the same projection of consecutive layers. Each weight is [out_features, in_features]."""

    modules: tuple[str, ...]
    out_features: int
    in_features: int

    @property
    def name(self) -> str:
        return self.modules[0]

    @property
    def file_name(self) -> str:
        """Of a file about the unit. Its first module may also be a unit of its own, or of other groups."""
        group = f"-{fingerprint(self.modules)}" if len(self.modules) > 1 else ""
        return f"{self.name}{group}.safetensors"

    @property
    def projection(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def layers(self) -> list[int]:
        return [layer_of(module) for module in self.modules]

    @property
    def dense_parameters(self) -> int:
        return len(self.modules) * self.out_features * self.in_features

    @property
    def max_rank(self) -> int:
        return min(self.in_features, len(self.modules) * self.out_features)

    def parameters(self, rank: int | None) -> int:
        """Weights stored at this rank; None: dense."""
        if rank is None:
            return self.dense_parameters
        return rank * (self.in_features + len(self.modules) * self.out_features)

    def rank_for(self, keep_ratio: float) -> int:
        """The largest rank that keeps at most this share of the parameters, at least 1."""
        return rank_for(keep_ratio, len(self.modules) * self.out_features, self.in_features)


def units_of(
    config: ModelConfig, pattern: str = "*", group_size: int = 1, shared: Sequence[str] = ()
) -> list[Unit]:
    """The units of all modules whose name matches `pattern`, in the order of execution. lm_head is never one.

    shared: the projections of which `group_size` consecutive layers form a unit.

    Raises OptionError when nothing matches, or nothing but lm_head.
    """
    groups: dict[tuple[str, int], list[str]] = {}
    linears = {name: shape for name, shape in config.linears().items() if name != "lm_head"}
    for module in linears:
        if fnmatchcase(module, pattern):
            projection = module.rpartition(".")[2]
            size = group_size if projection in shared else 1
            groups.setdefault((projection, layer_of(module) // size), []).append(module)
    if not groups and fnmatchcase("lm_head", pattern):
        raise OptionError(
            "lm_head is never factored",
            "it stays dense, and so does an embedding that is tied to it; name projections, like '*.mlp.*'",
        )
    if not groups:
        raise OptionError(
            f"no module matches {pattern!r}", "names are like model.layers.0.mlp.up_proj; try '*.mlp.*'"
        )
    return [
        Unit(tuple(modules), linears[modules[0]].out_features, linears[modules[0]].in_features)
        for modules in groups.values()
    ]
