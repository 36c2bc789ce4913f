"""What a model costs: parameters, bytes that a decode step must read, KV bytes, FLOPs; dense quantised too.

Computed from the config and the size of a weight alone; no tensor is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil, prod

from ..config import BLOCK_SIZE, LinearShape, ModelConfig


@dataclass(frozen=True)
class Quantization:
    """How the matrices of a dense model are stored in few bits.

    bits: of a weight. group: neighbouring inputs of one output that share `constants` 16-bit numbers (scale,
    offset); None: all inputs of it do.
    """

    bits: int
    group: int | None
    constants: int

    def matrix_bytes(self, out_features: int, in_features: int) -> int:
        groups = 1 if self.group is None else ceil(in_features / self.group)
        return out_features * (ceil(in_features * self.bits / 8) + 2 * self.constants * groups)


#: As gpt-fast stores them: a scale for every output; a scale and an offset for every 128 inputs of an output.
INT8 = Quantization(bits=8, group=None, constants=1)
INT4 = Quantization(bits=4, group=128, constants=2)


def dense_config(config: ModelConfig) -> ModelConfig:
    """The model before compression: the same architecture without ranks."""
    return replace(config, ranks={}, tied_factors={})


def module_parameters(config: ModelConfig) -> dict[str, int]:
    """Weights and biases of each projection; a factor that several share counts in the one that stores it."""
    tied = {name.removesuffix(".factor_in.weight") for name in config.tied_factors}
    return {
        module: _linear_parameters(shape, config.ranks.get(module), owns_factor_in=module not in tied)
        for module, shape in config.linears().items()
    }


def linear_parameters(config: ModelConfig) -> int:
    """Weights and biases of all projections; a factor that several modules share counts once."""
    return sum(module_parameters(config).values())


def parameters(config: ModelConfig) -> int:
    """All stored parameters: projections, embedding and norms. A tied `lm_head` is the embedding."""
    return linear_parameters(config) + sum(map(prod, config.other_tensors().values()))


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of all stored parameters at `itemsize` bytes each."""
    return parameters(config) * itemsize


def quantized_weight_bytes(config: ModelConfig, itemsize: int, quantization: Quantization) -> int:
    """Bytes of a dense model whose projections are quantised, `lm_head` included; the rest at `itemsize`.

    A tied `lm_head` is stored beside the embedding table, because a row of that is looked up at `itemsize`.
    """
    dense = sum(shape.out_features * shape.in_features for shape in config.linears().values())
    return weight_bytes(config, itemsize) - dense * itemsize + _quantized_bytes(config, quantization)


def decode_step_bytes(config: ModelConfig, itemsize: int, context_lens: Iterable[int] = ()) -> int:
    """Bytes that one decode step must read, at `itemsize` bytes a weight and a cache element.

    Every weight once, whatever the batch: not the embedding table, of which a step reads only a row a
    sequence, unless it is the `lm_head` as well. context_lens: tokens in the cache of each sequence, of which
    a layer with a sliding window reads the window.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    weights = parameters(config) - (0 if config.tie_word_embeddings else vocab * hidden)
    return weights * itemsize + cache_step_bytes(config, itemsize, context_lens)


def cache_step_bytes(config: ModelConfig, itemsize: int, context_lens: Iterable[int]) -> int:
    """Bytes of keys and values that one decode step must read, as in `decode_step_bytes`."""
    cached = sum(
        min(length, window or length) for length in context_lens for window in config.sliding_windows
    )
    return cached * _kv_elements_per_layer(config) * itemsize


def quantized_step_bytes(
    config: ModelConfig, itemsize: int, quantization: Quantization, context_lens: Iterable[int] = ()
) -> int:
    """`decode_step_bytes` of the model of `quantized_weight_bytes`; keys and values at `itemsize`."""
    dense = sum(map(prod, _matrices(config)))
    step = decode_step_bytes(config, itemsize, context_lens)
    return step - dense * itemsize + _quantized_bytes(config, quantization)


def kv_bytes_per_token(config: ModelConfig, itemsize: int) -> int:
    """Bytes of keys and values that one token occupies in the cache, all layers together."""
    return _kv_elements_per_layer(config) * config.num_hidden_layers * itemsize


def latent_kv_bytes_per_token(config: ModelConfig, itemsize: int) -> int:
    """Bytes of a token in a cache that keeps the latents of k and v instead of keys and values.

    No path of ours does; it is what dense keys and values are to be compared with. With the same rank r in
    all layers that is r / (num_key_value_heads * head_dim) of `kv_bytes_per_token`. A dense k or v has no
    latent and counts in full.
    """
    return itemsize * sum(
        config.ranks.get(module, shape.out_features)
        for module, shape in config.linears().items()
        if module.endswith((".k_proj", ".v_proj"))
    )


def kv_cache_bytes(config: ModelConfig, itemsize: int, context_len: int, batch_size: int = 1) -> int:
    """Bytes of the blocks that hold `context_len` tokens of each of `batch_size` sequences."""
    blocks = ceil(context_len / BLOCK_SIZE)
    return batch_size * blocks * BLOCK_SIZE * kv_bytes_per_token(config, itemsize)


def longest_context(config: ModelConfig, memory: int, itemsize: int, batch_size: int = 1) -> int:
    """Tokens of each of `batch_size` sequences whose keys and values fit into `memory` bytes.

    Whole blocks, and at most the model's positions; 0 when the memory is less than a block a sequence.
    """
    blocks = max(0, memory) // kv_cache_bytes(config, itemsize, BLOCK_SIZE, batch_size)
    return min(blocks * BLOCK_SIZE, config.max_position_embeddings)


def flops_per_token(config: ModelConfig, context_len: int = 0) -> int:
    """Floating-point operations to compute one token's logits.

    Two per weight, plus attention to `context_len` tokens (two GEMVs a head). Norms, activations and the
    embedding look-up are left out.
    """
    weights = sum(
        shape.out_features * shape.in_features
        if (rank := config.ranks.get(module)) is None
        else rank * (shape.out_features + shape.in_features)
        for module, shape in config.linears().items()
    )
    if config.tie_word_embeddings:
        weights += config.vocab_size * config.hidden_size
    attended = sum(min(context_len, window or context_len) for window in config.sliding_windows)
    return 2 * weights + 4 * config.num_attention_heads * config.head_dim * attended


def _linear_parameters(shape: LinearShape, rank: int | None, owns_factor_in: bool) -> int:
    bias = shape.out_features if shape.bias else 0
    if rank is None:
        return shape.out_features * shape.in_features + bias
    return rank * shape.out_features + (rank * shape.in_features if owns_factor_in else 0) + bias


def _kv_elements_per_layer(config: ModelConfig) -> int:
    return 2 * config.num_key_value_heads * config.head_dim


def _matrices(config: ModelConfig) -> list[tuple[int, int]]:
    """[out, in] of every matrix that a step of the dense model multiplies by, a tied `lm_head` included."""
    shapes = [(shape.out_features, shape.in_features) for shape in config.linears().values()]
    return shapes + [(config.vocab_size, config.hidden_size)] * config.tie_word_embeddings


def _quantized_bytes(config: ModelConfig, quantization: Quantization) -> int:
    return sum(quantization.matrix_bytes(*shape) for shape in _matrices(config))
