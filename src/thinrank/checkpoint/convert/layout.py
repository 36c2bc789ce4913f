"""Turns a `SourceModel` into the tensors of the thinrank format: the same steps for every family.

1. A pair that saves nothing (rank * (in + out) >= in * out, not shared) becomes one dense tensor.
2. Shared factors are stored once and tied.
3. Before a cast to 16 bits, factors are rebalanced by powers of two, which is exact.

All of it is lazy: nothing is read before the writer asks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch

from ...errors import CheckpointError
from ..balance import balancing_scale
from ..format import factor_bias_name, factor_in_name, factor_out_name, guard_name
from ..tensors import LazyTensor
from .source_model import Factors, SourceModel

_SIXTEEN_BIT = (torch.float16, torch.bfloat16)


@dataclass
class Layout:
    """What is written: tensors by their names in the format, and the config section that describes them.

    densified: module -> rank of the pairs that were stored dense.
    """

    tensors: dict[str, LazyTensor] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    tied_factors: dict[str, str] = field(default_factory=dict)
    densified: dict[str, int] = field(default_factory=dict)


def lay_out(model: SourceModel, dtype: torch.dtype | None) -> Layout:
    """Plan the tensors of `model`. dtype: None keeps each tensor's own (float64 becomes float32)."""
    layout = Layout()
    for name, tensor in model.tensors.items():
        layout.tensors[name] = _cast(name, tensor, dtype)

    groups: dict[int, list[str]] = {}
    for module, factors in model.factors.items():
        groups.setdefault(id(factors.factor_in), []).append(module)
    for modules in groups.values():
        members = [model.factors[module] for module in modules]
        if len(members) == 1 and not _saves(members[0]):
            _store_dense(layout, modules[0], members[0], dtype)
        else:
            _store_factors(layout, modules, members, dtype)
    return layout


def _saves(factors: Factors) -> bool:
    (rank, in_features), out_features = factors.factor_in.shape, factors.factor_out.shape[0]
    return rank * (in_features + out_features) < in_features * out_features


def _store_dense(layout: Layout, module: str, factors: Factors, dtype: torch.dtype | None) -> None:
    # The product of two 16-bit factors needs more than 16 bits: it stays float32 unless the family's own
    # loader rounds it (Dobi-SVD), so that logits agree with the public code.
    rounded = factors.dense_dtype or torch.float32
    product = LazyTensor(
        (factors.factor_out.shape[0], factors.factor_in.shape[1]),
        rounded,
        lambda: multiply(factors).to(rounded),
    )
    layout.tensors[f"{module}.weight"] = _cast(f"{module}.weight", product, dtype)
    if factors.bias is not None:
        layout.tensors[f"{module}.bias"] = _cast(f"{module}.bias", factors.bias, dtype)
    layout.densified[module] = factors.rank


def multiply(factors: Factors) -> torch.Tensor:
    """factor_out @ factor_in in float32, [out, in]."""
    return factors.factor_out.read().float() @ factors.factor_in.read().float()


def _store_factors(
    layout: Layout, modules: list[str], members: list[Factors], dtype: torch.dtype | None
) -> None:
    """Store modules that share one factor_in (usually a single module)."""
    holder = factor_in_name(modules[0])
    factor_in, factor_outs = members[0].factor_in, [factors.factor_out for factors in members]
    if dtype in _SIXTEEN_BIT and any(t.dtype != dtype for t in (factor_in, *factor_outs)):
        scale = _balancing_scale(factor_in, factor_outs)
        factor_in = _map(factor_in, lambda t: t * scale()[:, None])
        factor_outs = [_map(t, lambda t: t / scale()) for t in factor_outs]
    layout.tensors[holder] = _cast(holder, factor_in, dtype)
    for module, factors, factor_out in zip(modules, members, factor_outs, strict=True):
        layout.ranks[module] = factors.rank
        layout.tensors[factor_out_name(module)] = _cast(factor_out_name(module), factor_out, dtype)
        if factors.bias is not None:
            layout.tensors[factor_bias_name(module)] = _cast(factor_bias_name(module), factors.bias, dtype)
        layout.tensors[guard_name(module)] = LazyTensor.of(torch.empty(0, dtype=factor_out.dtype))
        if factor_in_name(module) != holder:
            layout.tied_factors[factor_in_name(module)] = holder


def _balancing_scale(factor_in: LazyTensor, factor_outs: list[LazyTensor]) -> Callable[[], torch.Tensor]:
    """Computed when first asked for, and then kept: the writer reads the sides one after the other."""
    return cache(lambda: balancing_scale(factor_in.read(), [factor.read() for factor in factor_outs]))


def _map(tensor: LazyTensor, transform: Callable[[torch.Tensor], torch.Tensor]) -> LazyTensor:
    """`transform` applied in float32 when read."""
    return LazyTensor(tensor.shape, torch.float32, lambda: transform(tensor.read().float()))


def _cast(name: str, tensor: LazyTensor, dtype: torch.dtype | None) -> LazyTensor:
    target = dtype or (torch.float32 if tensor.dtype == torch.float64 else tensor.dtype)
    if target == tensor.dtype:
        return tensor

    def read() -> torch.Tensor:
        value = tensor.read()
        rounded = value.to(target)
        if not rounded.isfinite().all() and value.isfinite().all():
            largest = value.abs().max().item()
            raise CheckpointError(
                f"{name} has values up to {largest:.3g}, too large for {str(target).removeprefix('torch.')}",
                "use --dtype bfloat16 or float32",
            )
        return rounded

    return LazyTensor(tensor.shape, target, read)
