"""What a model costs: parameters, bytes that a decode step must read, KV bytes, FLOPs.

Computed from the config and the size of a weight alone; no tensor is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod

from ..config import LinearShape, ModelConfig


def dense_config(config: ModelConfig) -> ModelConfig:
    """The model before compression: the same architecture without ranks."""
    return replace(config, ranks={}, tied_factors={})


def linear_parameters(config: ModelConfig) -> int:
    """Weights and biases of all projections; a factor that several modules share counts once."""
    tied = {name.removesuffix(".factor_in.weight") for name in config.tied_factors}
    return sum(
        _linear_parameters(shape, config.ranks.get(module), owns_factor_in=module not in tied)
        for module, shape in config.linears().items()
    )


def parameters(config: ModelConfig) -> int:
    """All stored parameters: projections, embedding and norms. A tied `lm_head` is the embedding."""
    return linear_parameters(config) + sum(map(prod, config.other_tensors().values()))


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of all stored parameters at `itemsize` bytes each."""
    return parameters(config) * itemsize


def decode_step_bytes(config: ModelConfig, itemsize: int, context_lens: Iterable[int] = ()) -> int:
    """Bytes that one decode step must read, at `itemsize` bytes a weight and a cache element.

    Every weight once, whatever the batch: not the embedding table, of which a step reads only a row a
    sequence, unless it is the `lm_head` as well. context_lens: tokens in the cache of each sequence, of which
    a layer with a sliding window reads the window.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    weights = parameters(config) - (0 if config.tie_word_embeddings else vocab * hidden)
    per_layer = _kv_elements_per_layer(config)
    cached = sum(
        min(length, window or length) for length in context_lens for window in config.sliding_windows
    )
    return (weights + cached * per_layer) * itemsize


def kv_bytes_per_token(config: ModelConfig, itemsize: int) -> int:
    """Bytes of keys and values that one token occupies in the cache, all layers together."""
    return _kv_elements_per_layer(config) * config.num_hidden_layers * itemsize


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
