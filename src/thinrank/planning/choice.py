"""One way to run a model on a card: its bytes, whether it fits, how fast it should be."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..bench.shapes import layer_linears
from ..compression.truncate import rank_for
from ..config import ModelConfig
from ..model import cost
from ..model.tensor_parallel import local_kv_heads, share
from .cards import Card
from .speed import DENSE, LOW_RANK, QUANTIZED, Speed, floor_s

#: Bytes of a 16-bit weight and of an element of the cache.
ITEMSIZE = 2

#: Bytes that are neither weights nor cache. Tensors took up to 0.6 GB beside those (activations of a prefill
#: chunk, workspaces; peak_memory_bytes in benchmarks/results); the rest is for the CUDA context and kernels.
RESERVED_MEMORY = 3 * 2**29
#: What vLLM leaves alone beside those: 1 - its default of --gpu-memory-utilization.
VLLM_UNUSED_MEMORY = 0.08


@dataclass(frozen=True)
class Choice:
    """name: "keep_ratio 0.5", "dense 4-bit". keep_ratio: None for quantised weights. bits: of a weight.

    parameters: stored, of the whole model; of the dense model for quantised weights. All bytes are those of one card,
    of several that share the work each has the same. kv_bytes: keys and values of the planned context;
    low_rank_kv_bytes: if latents were kept instead, None for dense models and on several cards. needed_bytes: weights,
    keys and values, and `Workload.reserved_memory`. longest_context: tokens of each sequence, 0 if not even a block
    fits. step_bytes: what a decode step at the full context must read; weight_step_bytes: its weights. floor_ms: the
    former at the datasheet's bandwidth. sent_bytes: what a card sends to the others for a token of each sequence,
    `tensor_parallel.Share.sent_bytes`. tpot_ms, tokens_per_s: predicted, the second for the whole batch; None on
    several cards. None of the times is known without a bandwidth.
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
    weight_step_bytes: int
    step_bytes: int
    sent_bytes: float
    floor_ms: float | None
    tpot_ms: float | None
    tokens_per_s: float | None


@dataclass(frozen=True)
class Workload:
    """On which card, how many tokens in the cache of each sequence, how many sequences, and on how many such cards:
    on one with thinrank, on more with vLLM."""

    card: Card
    context: int
    batch_size: int
    tensor_parallel_size: int = 1

    @property
    def context_lens(self) -> tuple[int, ...]:
        return (self.context,) * self.batch_size

    @property
    def reserved_memory(self) -> int:
        """Bytes of a card that are neither weights nor cache."""
        unused = VLLM_UNUSED_MEMORY if self.tensor_parallel_size > 1 else 0
        return RESERVED_MEMORY + int(unused * self.card.memory)


def low_rank_choice(dense: ModelConfig, keep_ratio: float, work: Workload) -> Choice:
    """`thinrank compress --keep-ratio`: every projection of the layers at one keep_ratio, `lm_head` dense."""
    ranks = {
        module: rank_for(keep_ratio, shape.out_features, shape.in_features)
        for module, shape in layer_linears(dense).items()
    }
    config = replace(dense, ranks=ranks)
    choice = _choice(f"keep_ratio {keep_ratio:g}", config, work, LOW_RANK)
    if work.tensor_parallel_size > 1:
        return replace(choice, keep_ratio=keep_ratio)
    latent_bytes = cost.latent_kv_bytes_per_token(config, ITEMSIZE)
    tokens = choice.kv_bytes // cost.kv_bytes_per_token(config, ITEMSIZE)
    return replace(choice, keep_ratio=keep_ratio, low_rank_kv_bytes=tokens * latent_bytes)


def dense_choice(dense: ModelConfig, work: Workload) -> Choice:
    return replace(_choice("dense 16-bit", dense, work, DENSE), keep_ratio=1.0)


def quantized_choice(dense: ModelConfig, quantization: cost.Quantization, work: Workload) -> Choice:
    choice = _choice(f"dense {quantization.bits}-bit", dense, work, QUANTIZED, quantization)
    return replace(choice, bits=quantization.bits)


def _choice(
    name: str,
    config: ModelConfig,
    work: Workload,
    speed: Speed,
    quantization: cost.Quantization | None = None,
) -> Choice:
    size = work.tensor_parallel_size
    weight_bytes, weight_step_bytes, sent_bytes = _weights(config, size, quantization)
    local = replace(config, num_key_value_heads=local_kv_heads(config, size))
    step_bytes = weight_step_bytes + cost.cache_step_bytes(local, ITEMSIZE, work.context_lens)
    kv_bytes = cost.kv_cache_bytes(local, ITEMSIZE, work.context, work.batch_size)
    left = work.card.memory - work.reserved_memory - weight_bytes
    floor = seconds = None
    if (bandwidth := work.card.bandwidth) is not None:
        floor = floor_s(step_bytes, bandwidth)
        if size == 1:
            seconds = speed.step_s(step_bytes, config.num_hidden_layers, bandwidth, work.batch_size)
    return Choice(
        name=name,
        keep_ratio=None,
        bits=8 * ITEMSIZE,
        parameters=cost.parameters(config),
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        low_rank_kv_bytes=None,
        needed_bytes=weight_bytes + kv_bytes + work.reserved_memory,
        fits=kv_bytes <= left,
        longest_context=cost.longest_context(local, left, ITEMSIZE, work.batch_size),
        weight_step_bytes=weight_step_bytes,
        step_bytes=step_bytes,
        sent_bytes=work.batch_size * sent_bytes,
        floor_ms=None if floor is None else 1e3 * floor,
        tpot_ms=None if seconds is None else 1e3 * seconds,
        tokens_per_s=None if seconds is None else work.batch_size / seconds,
    )


def _weights(
    config: ModelConfig, size: int, quantization: cost.Quantization | None
) -> tuple[int, int, float]:
    """Of one card: bytes of weights, of those that a step reads, and what it sends for a token."""
    if size > 1:
        part = share(config, size, ITEMSIZE, quantization=quantization)
        return part.weight_bytes, part.step_bytes, part.sent_bytes
    if quantization is None:
        return cost.weight_bytes(config, ITEMSIZE), cost.decode_step_bytes(config, ITEMSIZE), 0.0
    return (
        cost.quantized_weight_bytes(config, ITEMSIZE, quantization),
        cost.quantized_step_bytes(config, ITEMSIZE, quantization),
        0.0,
    )
