"""y = factor_out @ (factor_in @ x) + bias in vLLM's linear layers, fused and tensor parallel ones included.

Column parallel layers have all of factor_in and some rows of factor_out, so they exchange nothing. Row parallel layers
have some columns of factor_in and all of factor_out: their processes add up latents, rank wide, where vLLM would add up
outputs.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed import get_pp_group, tensor_model_parallel_all_reduce
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearMethodBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from ...checkpoint.format import LowRankSection, factor_bias_name, factor_in_name, factor_out_name, guard_name
from ...errors import CheckpointError, UnsupportedModelError
from ...model.tensor_parallel import RANK_MULTIPLE, padded
from .packing import Factors, Shard, ShardId

#: One of vLLM's, whose attributes its base class does not declare.
Layer: TypeAlias = Any


class LowRankLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """The weights of one of vLLM's layers, which holds one projection or several, some of which may be dense.

    modules: the projections' names in the checkpoint. Ranks are padded to `RANK_MULTIPLE` with zeros.
    Raises CheckpointError when a factor is missing, unexpected or has the wrong shape.
    """

    def __init__(self, section: LowRankSection, factors: Factors, modules: list[str]):
        self.section = section
        self.factors = factors
        self.modules = modules

    def create_weights(
        self,
        layer: Layer,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        ids = shard_ids(layer)
        if len(ids) != len(self.modules):
            raise UnsupportedModelError(
                f"vLLM takes {self.modules[0]} for {len(ids)} projections",
                "thinrank's plugin knows architectures that store them one by one",
            )
        start = layer.tp_rank * input_size_per_partition if isinstance(layer, RowParallelLinear) else 0
        columns = (start, start + input_size_per_partition)
        dense: dict[ShardId, Shard] = {}
        factor_in: dict[ShardId, Shard] = {}
        factor_out: dict[ShardId, Shard] = {}
        bias: dict[ShardId, Shard] = {}
        for shard_id, module, size in zip(ids, self.modules, output_partition_sizes, strict=True):
            out_features, rows = output_rows(layer, shard_id, size)
            rank = self.section.ranks.get(module)
            if rank is None:
                dense[shard_id] = Shard(
                    f"{module}.weight",
                    (out_features, input_size),
                    (rows, columns),
                    (size, input_size_per_partition),
                )
                continue
            packed_rank = padded(rank, RANK_MULTIPLE)
            name = factor_in_name(module)
            dense[shard_id] = Shard(guard_name(module), (0,), ((0, 0),), (0,))
            factor_in[shard_id] = Shard(
                self.section.tied_factors.get(name, name),
                (rank, input_size),
                ((0, rank), columns),
                (packed_rank, input_size_per_partition),
            )
            factor_out[shard_id] = Shard(
                factor_out_name(module), (out_features, rank), (rows, (0, rank)), (size, packed_rank)
            )
            if layer.has_bias:
                bias[shard_id] = Shard(factor_bias_name(module), (out_features,), (rows,), (size,))
        self.output_sizes = output_partition_sizes
        self.dense, self.factor_in, self.factor_out, self.bias = (
            self.factors.pack(shards, params_dtype, layer.prefix)
            for shards in (dense, factor_in, factor_out, bias)
        )
        layer.register_parameter("weight", self.dense.parameter)
        layer.factor_in, layer.factor_out = nn.Module(), nn.Module()
        layer.factor_in.weight = self.factor_in.parameter
        layer.factor_out.weight = self.factor_out.parameter
        layer.factor_out.bias = self.bias.parameter
        self._take_over_reduction(layer)

    def process_weights_after_loading(self, layer: Layer) -> None:
        packings = (self.dense, self.factor_in, self.factor_out, self.bias)
        missing = [name for packing in packings for name in packing.missing()]
        if missing:
            raise CheckpointError(
                f"the checkpoint lacks {'tensor' if len(missing) == 1 else 'tensors'} {', '.join(missing)}",
                "it is incomplete or its config belongs to another model"
                if get_pp_group().world_size == 1
                else "it is incomplete, or layers that share a factor are on different pipeline stages",
            )
        if layer.bias is not None:
            own = dict(zip(self.dense.shards, layer.bias.data.split(self.output_sizes), strict=True))
            for shard_id, view in self.bias.views(self.bias.parameter.data).items():
                own[shard_id].copy_(view)

    def apply(self, layer: Layer, x: Tensor, bias: Tensor | None = None) -> Tensor:
        latent = F.linear(x, layer.factor_in.weight.view(-1, x.shape[-1]))
        if self.reduces_latents:
            latent = tensor_model_parallel_all_reduce(latent)
            # The outputs are whole in every process; vLLM gives the bias, meant for a sum, to the first one alone.
            bias = None if layer.skip_bias_add else layer.bias
        widths = [shard.packed[0] for shard in self.factor_in.shards.values()]
        latents = dict(zip(self.factor_in.shards, latent.split(widths, -1), strict=True))
        biases = [None] * len(self.modules) if bias is None else bias.split(self.output_sizes)
        dense, factor_out = self.dense.views(layer.weight), self.factor_out.views(layer.factor_out.weight)
        outputs = [
            F.linear(latents[shard_id], factor_out[shard_id], part)
            if shard_id in latents
            else F.linear(x, dense[shard_id], part)
            for shard_id, part in zip(dense, biases, strict=True)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    def _take_over_reduction(self, layer: Layer) -> None:
        """A row parallel layer that would add up its outputs adds up its latents, in `apply`.

        One that would not, because whoever uses it does so, keeps to that: sums of partial latents, multiplied by
        factor_out, are partial outputs.
        """
        self.reduces_latents = (
            isinstance(layer, RowParallelLinear) and layer.reduce_results and layer.tp_size > 1
        )
        if not self.reduces_latents:
            return
        layer.reduce_results = False
        config = get_current_vllm_config_or_none()
        if config is not None and config.lora_config is not None:
            raise UnsupportedModelError(
                "vLLM's LoRA adds up what low-rank layers add up themselves",
                "merge the adapter, or leave out tensor parallelism",
            )


def shard_ids(layer: Layer) -> list[ShardId]:
    """How vLLM names the projections of a layer."""
    if isinstance(layer, QKVParallelLinear):
        return ["q", "k", "v"]
    if isinstance(layer, MergedColumnParallelLinear):
        return list(range(len(layer.output_sizes)))
    return [None]


def output_rows(layer: Layer, shard_id: ShardId, size: int) -> tuple[int, tuple[int, int]]:
    """Of a projection of which this process has `size` rows: all its rows, and [start, stop) of those here."""
    if isinstance(layer, VocabParallelEmbedding):  # the last process has fewer rows than `size`
        indices = layer.shard_indices
        return layer.org_vocab_size, (indices.org_vocab_start_index, indices.org_vocab_end_index)
    if not isinstance(layer, ColumnParallelLinear):
        return size, (0, size)
    # More processes than key-value heads: several have the same one.
    copies = layer.num_kv_head_replicas if shard_id in ("k", "v") else 1
    index = layer.tp_rank // copies
    return size * (layer.tp_size // copies), (index * size, (index + 1) * size)
