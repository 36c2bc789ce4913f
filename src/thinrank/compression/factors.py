"""The tensors of a compressed checkpoint, each computed when it is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ..checkpoint.balance import balancing_scale
from ..checkpoint.format import expected_tensors, factor_in_name, factor_out_name, guard_name
from ..checkpoint.load import OpenCheckpoint
from ..checkpoint.tensors import LazyTensor
from ..config import ModelConfig
from .ranks import Ranks
from .units import Unit

#: factor_in [rank, in] and the factor_out [out, rank] of each module of a unit, float32.
Factors = tuple[Tensor, tuple[Tensor, ...]]


@dataclass(frozen=True)
class CompressedModel:
    """A dense checkpoint with some units factored, each by `factors` at its rank."""

    checkpoint: OpenCheckpoint
    ranks: Ranks
    factors: Callable[[Unit, int], Factors]

    @property
    def config(self) -> ModelConfig:
        """Ranks of all modules, and ties to the factor_in of the first module of each unit."""
        ranks, tied = {}, {}
        order = {module: number for number, module in enumerate(self.checkpoint.config.linears())}
        for unit, rank in self.ranks.items():
            for module in unit.modules:
                ranks[module] = rank
                if module != unit.name:
                    tied[factor_in_name(module)] = factor_in_name(unit.name)
        ranks = dict(sorted(ranks.items(), key=lambda item: order[item[0]]))
        return replace(self.checkpoint.config, ranks=ranks, tied_factors=tied)

    def tensors(self, dtype: torch.dtype | None) -> dict[str, LazyTensor]:
        """Everything to store. dtype: of all tensors; None: each its own, factors that of the dense weight."""
        tensors = self._tensors(dtype, _balanced)
        return {name: tensor.to(dtype or tensor.dtype) for name, tensor in tensors.items()}

    def source(self, device: torch.device) -> Callable[[str], Tensor]:
        """Tensors by name in float32 on `device`; factors as they are before balancing and cast."""
        tensors = self._tensors(torch.float32, lambda factors: factors)
        return lambda name: tensors[name].read().to(device=device, dtype=torch.float32)

    def _tensors(
        self, dtype: torch.dtype | None, finish: Callable[[Factors], Factors]
    ) -> dict[str, LazyTensor]:
        config, stored = self.config, self.checkpoint.tensors
        factor_names = {}
        dtypes = {}
        for unit in self.ranks:
            unit_dtype = stored[f"{unit.name}.weight"].dtype if dtype is None else dtype
            factor_names[factor_in_name(unit.name)] = unit, -1
            for number, module in enumerate(unit.modules):
                factor_names[factor_out_name(module)] = unit, number
                dtypes[module] = unit_dtype
            dtypes[unit.name] = unit_dtype
        # The tensors of a unit are written one after the other, unless its modules lie in several layers.
        finished = lru_cache(maxsize=2)(lambda unit: finish(self.factors(unit, self.ranks[unit])))
        tensors: dict[str, LazyTensor] = {}
        for name, shape in expected_tensors(config).items():
            module = name.removesuffix(".weight")
            if name in factor_names:
                unit, number = factor_names[name]
                tensors[name] = _lazy(shape, dtypes[unit.name], finished, unit, number)
            elif module in config.ranks:
                tensors[guard_name(module)] = LazyTensor.of(torch.empty(0, dtype=dtypes[module]))
            else:
                tensors[name] = stored[name.replace(".factor_out.bias", ".bias")]
        return tensors


def _balanced(factors: Factors) -> Factors:
    factor_in, factor_outs = factors
    scale = balancing_scale(factor_in, factor_outs)
    return factor_in * scale[:, None], tuple(factor_out / scale for factor_out in factor_outs)


def _lazy(
    shape: tuple[int, ...], dtype: torch.dtype, factors: Callable[[Unit], Factors], unit: Unit, number: int
) -> LazyTensor:
    """number: which factor_out of the unit; -1 for its factor_in."""

    def read() -> Tensor:
        factor_in, factor_outs = factors(unit)
        tensor = factor_in if number < 0 else factor_outs[number]
        return tensor.to(dtype).cpu().contiguous()

    return LazyTensor(shape, dtype, read)
