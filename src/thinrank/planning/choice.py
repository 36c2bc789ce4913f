"""One way to run a model on a card: its bytes, whether it fits, how fast it should be."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..bench.shapes import layer_linears
from ..compression.truncate import rank_for
from ..config import ModelConfig
from ..model import cost
from .cards import Card
from .speed import DENSE, LOW_RANK, QUANTIZED, Speed, floor_s

#: Bytes of a 16-bit weight and of an element of the cache.
ITEMSIZE = 2

#: Bytes that are neither weights nor cache. Tensors took up to 0.6 GB beside those (activations of a prefill
#: chunk, workspaces; peak_memory_bytes in benchmarks/results); the rest is for the CUDA context and kernels.
RESERVED_MEMORY = 3 * 2**29


@dataclass(frozen=True)
class Choice:
    """name: "keep_ratio 0.5", "dense 4-bit". keep_ratio: None for quantised weights. bits: of a weight.

    parameters: stored; of the dense model for quantised weights. kv_bytes: keys and values of the planned
    context; low_rank_kv_bytes: if latents were kept instead, None for dense models. needed_bytes: weights, keys
    and values, and `RESERVED_MEMORY`. longest_context: tokens of each sequence, 0 if not even a block fits.
    step_bytes: what a decode step at the full context must read. floor_ms: that at the datasheet's bandwidth.
    ms_per_token, tokens_per_s: predicted, the second for the whole batch. None without a bandwidth.
    """

    name: str
    keep_ratio: float | None
    bits: int
    parameters: int
    weight_bytes: int
    kv_bytes: int
    low_rank_kv_bytes: int | None
    needed_bytes: int
    fits: bool
    longest_context: int
    step_bytes: int
    floor_ms: float | None
    ms_per_token: float | None
    tokens_per_s: float | None


@dataclass(frozen=True)
class Workload:
    """On which card, how many tokens in the cache of each sequence, how many sequences."""

    card: Card
    context: int
    batch_size: int

    @property
    def context_lens(self) -> tuple[int, ...]:
        return (self.context,) * self.batch_size


def low_rank_choice(dense: ModelConfig, keep_ratio: float, work: Workload) -> Choice:
    """`thinrank compress --keep-ratio`: every projection of the layers at one keep_ratio, `lm_head` dense."""
    ranks = {
        module: rank_for(keep_ratio, shape.out_features, shape.in_features)
        for module, shape in layer_linears(dense).items()
    }
    config = replace(dense, ranks=ranks)
    latent_bytes = cost.latent_kv_bytes_per_token(config, ITEMSIZE)
    kv_bytes = cost.kv_cache_bytes(config, ITEMSIZE, work.context, work.batch_size)
    choice = _choice(
        f"keep_ratio {keep_ratio:g}",
        config,
        work,
        cost.weight_bytes(config, ITEMSIZE),
        cost.decode_step_bytes(config, ITEMSIZE, work.context_lens),
        LOW_RANK,
    )
    return replace(
        choice,
        keep_ratio=keep_ratio,
        low_rank_kv_bytes=kv_bytes // cost.kv_bytes_per_token(config, ITEMSIZE) * latent_bytes,
    )


def dense_choice(dense: ModelConfig, work: Workload) -> Choice:
    step_bytes = cost.decode_step_bytes(dense, ITEMSIZE, work.context_lens)
    weight_bytes = cost.weight_bytes(dense, ITEMSIZE)
    return replace(_choice("dense 16-bit", dense, work, weight_bytes, step_bytes, DENSE), keep_ratio=1.0)


def quantized_choice(dense: ModelConfig, quantization: cost.Quantization, work: Workload) -> Choice:
    choice = _choice(
        f"dense {quantization.bits}-bit",
        dense,
        work,
        cost.quantized_weight_bytes(dense, ITEMSIZE, quantization),
        cost.quantized_step_bytes(dense, ITEMSIZE, quantization, work.context_lens),
        QUANTIZED,
    )
    return replace(choice, bits=quantization.bits)


def _choice(
    name: str, config: ModelConfig, work: Workload, weight_bytes: int, step_bytes: int, speed: Speed
) -> Choice:
    left = work.card.memory - RESERVED_MEMORY - weight_bytes
    kv_bytes = cost.kv_cache_bytes(config, ITEMSIZE, work.context, work.batch_size)
    floor = seconds = None
    if (bandwidth := work.card.bandwidth) is not None:
        floor = floor_s(step_bytes, bandwidth)
        seconds = speed.step_s(step_bytes, config.num_hidden_layers, bandwidth, work.batch_size)
    return Choice(
        name=name,
        keep_ratio=None,
        bits=8 * ITEMSIZE,
        parameters=cost.parameters(config),
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        low_rank_kv_bytes=None,
        needed_bytes=weight_bytes + kv_bytes + RESERVED_MEMORY,
        fits=kv_bytes <= left,
        longest_context=cost.longest_context(config, left, ITEMSIZE, work.batch_size),
        step_bytes=step_bytes,
        floor_ms=None if floor is None else 1e3 * floor,
        ms_per_token=None if seconds is None else 1e3 * seconds,
        tokens_per_s=None if seconds is None else work.batch_size / seconds,
    )
