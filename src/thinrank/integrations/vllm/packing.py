"""Matrices of several projections in one parameter, each process with its own part of them.

vLLM fuses q, k and v (or gate and up) into one layer, and loads that layer's parameters shard by shard. Ours are flat,
because their shards differ in rank. They are filled with NaN and keep account of what was loaded: vLLM does not look
for missing weights in a model that it takes for quantised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn import Parameter

from ...errors import CheckpointError

#: vLLM's name of a projection in a fused layer: "q", "k", "v", or 0, 1; None where a layer is one projection.
ShardId = str | int | None


@dataclass(frozen=True)
class Shard:
    """A tensor of the checkpoint, and the part of it that this process keeps.

    name: where it is stored. shape: of the whole tensor. kept: [start, stop) of each dimension. packed: the shape here;
    what lies outside of kept is zero.
    """

    name: str
    shape: tuple[int, ...]
    kept: tuple[tuple[int, int], ...]
    packed: tuple[int, ...]

    @property
    def source(self) -> tuple[slice, ...]:
        return tuple(slice(start, stop) for start, stop in self.kept)

    @property
    def destination(self) -> tuple[slice, ...]:
        return tuple(slice(stop - start) for start, stop in self.kept)


class Packing:
    """Shards one after another in `parameter`, [sum of their sizes]."""

    def __init__(self, shards: Mapping[ShardId, Shard], dtype: torch.dtype, factors: Factors, layer: str):
        self.shards = dict(shards)
        self.factors = factors
        self.layer = layer
        self.sizes = [prod(shard.packed) for shard in self.shards.values()]
        self.loaded: set[ShardId] = set()
        self.parameter = Parameter(torch.zeros(sum(self.sizes), dtype=dtype), requires_grad=False)
        self.parameter.weight_loader = self.load  # type: ignore[attr-defined]
        for shard_id, view in self.views(self.parameter).items():
            view[self.shards[shard_id].destination] = torch.nan

    def views(self, parameter: Tensor) -> dict[ShardId, Tensor]:
        """The shards in a parameter packed like this one, each in its packed shape."""
        parts = zip(self.shards.items(), parameter.split(self.sizes), strict=True)
        return {shard_id: part.view(shard.packed) for (shard_id, shard), part in parts}

    def load(self, parameter: Parameter, tensor: Tensor, shard_id: ShardId = None) -> None:
        """vLLM's hook: a tensor of the checkpoint for this shard, and for all that are tied to it."""
        if shard_id not in self.shards:
            raise CheckpointError(
                f"the checkpoint has an unexpected tensor {list(tensor.shape)} for {self.layer}"
                + ("" if shard_id is None else f" ({shard_id})"),
                "its config belongs to another model",
            )
        for packing, each in self.factors.waiting[self.shards[shard_id].name]:
            packing.fill(each, tensor)

    def fill(self, shard_id: ShardId, tensor: Tensor) -> None:
        """Take this process's part of a whole tensor."""
        shard = self.shards[shard_id]
        if tuple(tensor.shape) != shard.shape:
            raise CheckpointError(
                f"the checkpoint has the wrong shape for {shard.name}"
                f" ({list(tensor.shape)}, the config says {list(shard.shape)})",
                "the checkpoint is incomplete or its config belongs to another model",
            )
        if shard_id in self.loaded:
            raise CheckpointError(
                f"the checkpoint holds {shard.name} twice, or a factor that is tied to it",
                "remove weight files that the index does not name",
            )
        self.loaded.add(shard_id)
        self.views(self.parameter.data)[shard_id][shard.destination].copy_(tensor[shard.source])

    def missing(self) -> Iterator[str]:
        """Names of the tensors that have not been loaded."""
        for shard_id, shard in self.shards.items():
            if shard_id not in self.loaded:
                yield shard.name


class Factors:
    """All packings of one model in one process."""

    def __init__(self) -> None:
        #: Name of a stored tensor -> the shards that take their part of it; several if it is tied.
        self.waiting: dict[str, list[tuple[Packing, ShardId]]] = {}
        self._packings: dict[tuple[object, ...], Packing] = {}

    def pack(self, shards: Mapping[ShardId, Shard], dtype: torch.dtype, layer: str) -> Packing:
        """A packing of these shards; another layer's, where all are tied to its, so that they are in memory once."""
        if not shards:
            return Packing(shards, dtype, self, layer)
        key = (dtype, *shards.items())
        if key not in self._packings:
            self._packings[key] = packing = Packing(shards, dtype, self, layer)
            for shard_id, shard in shards.items():
                self.waiting.setdefault(shard.name, []).append((packing, shard_id))
        return self._packings[key]
