"""What a checkpoint is, how large it is and what it needs to run, from its headers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median_low
from typing import Any

from ..config import ModelConfig
from ..model import cost
from .load import open_checkpoint

#: Bytes of a weight and of a cache element at run time.
ITEMSIZE = 2

#: Memory of common GPUs, in bytes.
COMMON_MEMORY = tuple(size * 2**30 for size in (8, 16, 24, 48, 80))


@dataclass(frozen=True)
class RankSummary:
    """Ranks of one projection over the layers in which it is low-rank."""

    modules: int
    min: int
    median: int
    max: int


@dataclass(frozen=True)
class MemoryFit:
    """max_context: tokens of one sequence that fit beside the weights, at most what the model was trained
    for; 0 when the weights do not fit. Activations are left out."""

    memory: int
    max_context: int


@dataclass(frozen=True)
class Inspection:
    """Facts about one checkpoint.

    source: what its conversion recorded (family, keep_ratio, tool, base_model); empty for a dense model.
    ranks: projection ("q_proj") -> its ranks. parameters: as stored; dense_parameters: of the same model
    without factors. dtypes: dtype -> stored parameters. disk_bytes: of all files; weight_bytes: of the
    tensors. kv_bytes_per_token and decode_step_bytes (batch 1, empty cache) are those of 16-bit weights.
    """

    path: str
    model_type: str
    num_hidden_layers: int
    max_position_embeddings: int
    source: dict[str, Any]
    low_rank_modules: int
    dense_modules: int
    tied_factors: int
    ranks: dict[str, RankSummary]
    parameters: int
    dense_parameters: int
    dtypes: dict[str, int]
    disk_bytes: int
    weight_bytes: int
    kv_bytes_per_token: int
    decode_step_bytes: int
    dense_decode_step_bytes: int
    fits: list[MemoryFit]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def inspect(path: str | Path, memory: Sequence[int] = COMMON_MEMORY) -> Inspection:
    """Describe a checkpoint folder. memory: sizes in bytes to say the longest context for.

    Raises what `open_checkpoint` raises.
    """
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    dense = cost.dense_config(config)
    dtypes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        if tensor.numel:  # guards are empty
            dtypes[str(tensor.dtype).removeprefix("torch.")] += tensor.numel
    return Inspection(
        path=str(checkpoint.path),
        model_type=config.model_type,
        num_hidden_layers=config.num_hidden_layers,
        max_position_embeddings=config.max_position_embeddings,
        source=dict(checkpoint.section.source) if checkpoint.section else {},
        low_rank_modules=len(config.ranks),
        dense_modules=len(config.linears()) - len(config.ranks),
        tied_factors=len(config.tied_factors),
        ranks=_summarise(config),
        parameters=cost.parameters(config),
        dense_parameters=cost.parameters(dense),
        dtypes=dict(dtypes.most_common()),
        disk_bytes=sum(file.stat().st_size for file in checkpoint.path.iterdir() if file.is_file()),
        weight_bytes=sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
        kv_bytes_per_token=cost.kv_bytes_per_token(config, ITEMSIZE),
        decode_step_bytes=cost.decode_step_bytes(config, ITEMSIZE),
        dense_decode_step_bytes=cost.decode_step_bytes(dense, ITEMSIZE),
        fits=[MemoryFit(size, max_context(config, size)) for size in memory],
    )


def max_context(config: ModelConfig, memory: int) -> int:
    """See `MemoryFit`; whole cache blocks."""
    return cost.longest_context(config, memory - cost.weight_bytes(config, ITEMSIZE), ITEMSIZE)


def _summarise(config: ModelConfig) -> dict[str, RankSummary]:
    ranks: dict[str, list[int]] = {}
    for module, rank in config.ranks.items():
        ranks.setdefault(module.rpartition(".")[2], []).append(rank)
    return {
        name: RankSummary(len(values), min(values), median_low(values), max(values))
        for name, values in ranks.items()
    }
