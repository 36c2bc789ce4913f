"""Foreign tensor names sorted into low-rank modules and the dense rest; the order of a pair by its shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ...config import LinearShape
from ...errors import CheckpointError
from ...model.registry import parse_config
from ..tensors import LazyTensor
from .source_model import Factors


class Part(NamedTuple):
    """What a foreign tensor name means: which side of which module, and "weight" or "bias"."""

    module: str
    side: str
    kind: str


def sort_names(
    tensors: Mapping[str, LazyTensor],
    config: Mapping[str, Any],
    split: Callable[[str], Part | None],
    sides: tuple[str, str],
) -> tuple[dict[str, Factors], dict[str, LazyTensor]]:
    """Low-rank modules, and the tensors that belong to none.

    split: gives the `Part` that a name stands for, None for a dense tensor. sides: (applied first, applied
    second) by the family's convention; where shapes say the opposite they win, because ASVD and Dobi-SVD
    use the same two names in opposite orders.

    Raises CheckpointError when a module lacks a side, or its shapes do not fit the config.
    """
    linears = all_linears(config)
    found: dict[str, dict[tuple[str, str], LazyTensor]] = {}
    dense: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        part = split(name)
        if part is None or part.module not in linears:
            dense[name] = tensor
        else:
            found.setdefault(part.module, {})[part.side, part.kind] = tensor
    factors = {module: _pair(module, parts, sides, linears[module]) for module, parts in found.items()}
    return factors, dense


def all_linears(config: Mapping[str, Any]) -> dict[str, LinearShape]:
    """Every projection by name; lm_head too, since a compressor may have factored (and so untied) it."""
    return parse_config({**config, "tie_word_embeddings": False}).linears()


def _pair(
    module: str,
    parts: Mapping[tuple[str, str], LazyTensor],
    sides: tuple[str, str],
    shape: LinearShape,
) -> Factors:
    for side in sides:
        if (side, "weight") not in parts:
            raise CheckpointError(f"{module} lacks its {side} factor", "the checkpoint is incomplete")
    first, second = sides
    in_order = Factors(parts[first, "weight"], parts[second, "weight"], parts.get((second, "bias")))
    swapped = Factors(parts[second, "weight"], parts[first, "weight"], parts.get((first, "bias")))
    chosen = in_order if _fit(in_order, shape) or not _fit(swapped, shape) else swapped
    if ((first if chosen is in_order else second), "bias") in parts:
        # Dobi-SVD's public code does this to models with biases and loses the trained ones.
        raise CheckpointError(
            f"{module} has its bias on the factor that is applied first",
            "the compressor lost the bias; compress the model again with another tool",
        )
    return check_factors(module, chosen, shape)


def check_factors(module: str, factors: Factors, shape: LinearShape) -> Factors:
    """`factors`, if they multiply to the module's [out, in]. Raises CheckpointError otherwise."""
    if not _fit(factors, shape):
        raise CheckpointError(
            f"{module} has factors of shapes {list(factors.factor_in.shape)} and"
            f" {list(factors.factor_out.shape)}, which do not multiply to {list(shape[:2])}",
            "the config belongs to another model; name the right dense model with --base",
        )
    return factors


def _fit(factors: Factors, shape: LinearShape) -> bool:
    factor_in, factor_out = factors.factor_in.shape, factors.factor_out.shape
    return (
        len(factor_in) == len(factor_out) == 2
        and factor_in[0] == factor_out[1] >= 1
        and factor_in[1] == shape.in_features
        and factor_out[0] == shape.out_features
    )
