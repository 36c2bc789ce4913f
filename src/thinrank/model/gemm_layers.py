"""The packed decoder's layers over many rows: GEMMs with one fused kernel between two of them.

Prefill has a row for each token of its prompts, a wide decode step one for each sequence; what differs is where rows
stand and how they attend (`prefill`, `prompt_step`, `wide_step`). Knows nothing about requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..config import ModelConfig
from ..kernels.add_rms_norm import add_rms_norm
from ..kernels.rope_write_kv import rope_write_kv
from ..kernels.silu_mul import silu_mul
from .batch import KVLayer
from .gemms import Gemms
from .packing import PackedLayer


@dataclass(frozen=True, eq=False)
class GemmLayer:
    """One decoder layer; fields as in `PackedLayer`."""

    qkv: Gemms
    o: Gemms
    gate_up: Gemms
    down: Gemms
    input_layernorm: Tensor
    post_attention_layernorm: Tensor
    qk_norm: Tensor | None
    sliding_window: int | None

    @staticmethod
    def of(layer: PackedLayer, arena: Tensor) -> GemmLayer:
        return GemmLayer(
            qkv=Gemms.of(layer.qkv, arena),
            o=Gemms.of(layer.o, arena),
            gate_up=Gemms.of(layer.gate_up, arena),
            down=Gemms.of(layer.down, arena),
            input_layernorm=layer.input_layernorm,
            post_attention_layernorm=layer.post_attention_layernorm,
            qk_norm=layer.qk_norm,
            sliding_window=layer.sliding_window,
        )


class Rows(Protocol):
    """What the layers ask about their rows.

    positions: int64 or int32 [rows]. slots: int64 [rows], where keys and values go; None without a cache.
    """

    @property
    def positions(self) -> Tensor: ...

    @property
    def slots(self) -> Tensor | None: ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: KVLayer | None, window: int | None) -> Tensor:
        """q, k, v: [rows, heads * head_dim], k and v in the cache as well if there is one. window: as in
        `ops.attention`. Returns [rows, heads * head_dim] in their dtype."""


def run_layers(
    config: ModelConfig,
    layers: Sequence[GemmLayer],
    rotation: Tensor,
    hidden: Tensor,
    rows: Rows,
    kv_cache: Sequence[KVLayer] | None,
    dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None]:
    """Take the residual stream, float32 [rows, hidden_size], through the layers, in place.

    rotation: float32 [positions, 2, head_dim/2], cos and sin. kv_cache: one `KVLayer` a layer; needed if and only if
    the rows have slots. dtype: the weights'. Returns what the residual stream still lacks: what the last layer adds,
    and the bias of that.
    """
    eps = config.rms_norm_eps
    assert rows.slots is None or kv_cache is not None, "slots refer to a cache"
    normed = torch.empty(hidden.shape, dtype=dtype, device=hidden.device)
    projection, bias = None, None
    for index, layer in enumerate(layers):
        cache = None if rows.slots is None or kv_cache is None else kv_cache[index]
        add_rms_norm(hidden, projection, bias, layer.input_layernorm, eps, normed)
        q, k, v = layer.qkv(normed)
        keys, values = (None, None) if cache is None else cache
        rope_write_kv(
            q, k, v, layer.qkv.bias, layer.qk_norm, eps, rotation, rows.positions, keys, values, rows.slots
        )
        projection = layer.o(rows.attend(q, k, v, cache, layer.sliding_window))[0]
        add_rms_norm(hidden, projection, layer.o.bias, layer.post_attention_layernorm, eps, normed)
        gate, up = layer.gate_up(normed)
        silu_mul(gate, up, layer.gate_up.bias, out=gate)
        projection, bias = layer.down(gate)[0], layer.down.bias
    return projection, bias


def add_last(hidden: Tensor, projection: Tensor | None, bias: Tensor | None) -> None:
    """Give the residual stream what `run_layers` says that it lacks."""
    if projection is not None:
        hidden += projection
    if bias is not None:
        hidden += bias
