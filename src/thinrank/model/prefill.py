"""The packed decoder's layers over many tokens: GEMMs with one fused kernel between two of them.

A low-rank layer of LLaMA's shape is eleven GEMMs, four kernels and attention; a short prompt takes as long as the host
needs to launch them. Knows nothing about decoding or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..config import ModelConfig
from ..kernels import reference as ops
from ..kernels.add_rms_norm import add_rms_norm
from ..kernels.prefill_attention import prefill_attention
from ..kernels.rope_write_kv import rope_write_kv
from ..kernels.silu_mul import silu_mul
from .batch import ForwardBatch, KVLayer
from .gemms import Gemms
from .packing import PackedLayer

#: All but cuDNN's, which plans anew for every length of a prompt.
_SDPA_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, eq=False)
class PrefillLayer:
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
    def of(layer: PackedLayer, arena: Tensor) -> PrefillLayer:
        return PrefillLayer(
            qkv=Gemms.of(layer.qkv, arena),
            o=Gemms.of(layer.o, arena),
            gate_up=Gemms.of(layer.gate_up, arena),
            down=Gemms.of(layer.down, arena),
            input_layernorm=layer.input_layernorm,
            post_attention_layernorm=layer.post_attention_layernorm,
            qk_norm=layer.qk_norm,
            sliding_window=layer.sliding_window,
        )


def prefill(
    config: ModelConfig,
    layers: Sequence[PrefillLayer],
    rotation: Tensor,
    hidden: Tensor,
    batch: ForwardBatch,
    kv_cache: Sequence[KVLayer] | None,
    dtype: torch.dtype,
) -> None:
    """Take the residual stream, float32 [tokens, hidden_size], through the layers, in place.

    rotation: float32 [positions, 2, head_dim/2], cos and sin. kv_cache: one `KVLayer` a layer; needed if and only if
    the batch is paged. dtype: the weights'.
    """
    eps, paged, context = config.rms_norm_eps, batch.paged, _Context(batch, rotation, config)
    normed = torch.empty(hidden.shape, dtype=dtype, device=hidden.device)
    projection, bias = None, None  # what the residual stream still lacks
    with sdpa_kernel(_SDPA_BACKENDS):
        for index, layer in enumerate(layers):
            assert paged is None or kv_cache is not None, (
                "a paged batch needs the cache that its slots refer to"
            )
            cache = None if paged is None or kv_cache is None else kv_cache[index]
            add_rms_norm(hidden, projection, bias, layer.input_layernorm, eps, normed)
            projection = context.attention(normed, layer, cache)
            add_rms_norm(hidden, projection, layer.o.bias, layer.post_attention_layernorm, eps, normed)
            projection, bias = _mlp(normed, layer), layer.down.bias
    if projection is not None:
        hidden += projection
    if bias is not None:
        hidden += bias


def _mlp(normed: Tensor, layer: PrefillLayer) -> Tensor:
    """[tokens, hidden_size] -> the same, without the last bias."""
    gate, up = layer.gate_up(normed)
    silu_mul(gate, up, layer.gate_up.bias, out=gate)
    return layer.down(gate)[0]


class _Context:
    """Attention of a batch's tokens, and what it needs to know of the batch, found out once for all layers."""

    def __init__(self, batch: ForwardBatch, rotation: Tensor, config: ModelConfig):
        self.batch, self.rotation = batch, rotation
        self.head_dim, self.eps, self.scale = config.head_dim, config.rms_norm_eps, config.head_dim**-0.5
        lens = batch.query_lens
        #: Sequences without history and of equal length run as a batch of one call of PyTorch's attention.
        self.regular = len(set(lens)) == 1 and (batch.paged is None or batch.paged.context_lens == lens)

    def attention(self, normed: Tensor, layer: PrefillLayer, cache: KVLayer | None) -> Tensor:
        """[tokens, hidden_size] -> the same, without the last bias; keys and values into the cache."""
        q, k, v = layer.qkv(normed)
        keys, values = (None, None) if cache is None else cache
        rope_write_kv(
            q, k, v, layer.qkv.bias, layer.qk_norm, self.eps, self.rotation, self.batch.positions,
            keys, values, None if self.batch.paged is None else self.batch.paged.slots,
        )  # fmt: skip
        return layer.o(self._attend(q, k, v, cache, layer.sliding_window))[0]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, cache: KVLayer | None, window: int | None) -> Tensor:
        """q, k, v: [tokens, heads * head_dim], k and v in the cache as well if there is one. window: as in
        `ops.attention`. Returns [tokens, heads * head_dim] in their dtype."""
        lens, tokens = self.batch.query_lens, len(q)
        if self.regular and (window is None or window >= lens[0]):
            q, k, v = (x.view(len(lens), lens[0], -1, self.head_dim).transpose(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            return out.transpose(1, 2).reshape(tokens, -1)
        q, k, v = (x.view(tokens, -1, self.head_dim) for x in (q, k, v))
        if cache is None:
            return ops.attention(q, k, v, lens, self.scale, window).flatten(1).to(q.dtype)
        tables, query_start, context_lens = self._paged
        return prefill_attention(
            q, cache.keys, cache.values, tables, query_start, context_lens, max_query_len=max(lens),
            scale=self.scale, window=window, out=torch.empty(q.shape, dtype=q.dtype, device=q.device).flatten(1),
        )  # fmt: skip

    @cached_property
    def _paged(self) -> tuple[Tensor, Tensor, Tensor]:
        """Block tables, starts and context lengths as `prefill_attention` takes them."""
        paged = self.batch.paged
        assert paged is not None
        query_start, context_lens = (
            torch.tensor(numbers, dtype=torch.int32, device=paged.block_tables.device)
            for numbers in ([0, *accumulate(self.batch.query_lens)], paged.context_lens)
        )
        return paged.block_tables.int(), query_start, context_lens
