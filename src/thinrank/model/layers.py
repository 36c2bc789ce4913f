"""Projections and the decoder layer that is made of them.

A projection is any callable [tokens, in] -> float32 [tokens, out], so that a caller can replace one by a
wrapper that watches its input (`dataclasses.replace`). Knows nothing about files or requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..config import ModelConfig
from ..kernels import reference as ops
from .batch import ForwardBatch, KVLayer
from .rope import RotaryEmbedding

Projection = Callable[[Tensor], Tensor]
#: Returns the tensor stored under a checkpoint name, on the device and in the dtype to compute with.
TensorSource = Callable[[str], Tensor]
#: cos and sin of each token: float32 [tokens, head_dim/2].
Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class DenseLinear:
    """weight [out, in], bias [out] or None."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)


@dataclass(frozen=True, eq=False)
class LowRankLinear:
    """factor_in [rank, in], factor_out [out, rank], bias [out] or None."""

    factor_in: Tensor
    factor_out: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return ops.low_rank_linear(x, self.factor_in, self.factor_out, self.bias)


def build_linear(config: ModelConfig, module: str, get: TensorSource) -> DenseLinear | LowRankLinear:
    """The projection of a module: low-rank if the config gives it a rank, else dense."""
    has_bias = config.linears()[module].bias
    low_rank = module in config.ranks
    weight = get(f"{module}.factor_out.weight" if low_rank else f"{module}.weight")
    bias = get(f"{module}.factor_out.bias" if low_rank else f"{module}.bias") if has_bias else None
    if bias is not None:
        bias = bias.to(weight.dtype)  # a checkpoint may store them differently; a GEMM takes one dtype
    if not low_rank:
        return DenseLinear(weight, bias)
    factor_in = f"{module}.factor_in.weight"
    return LowRankLinear(get(config.tied_factors.get(factor_in, factor_in)), weight, bias)


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """One transformer layer: attention, then the MLP, each after a norm and added to the residual stream.

    Norm weights are float32: [hidden_size], q_norm and k_norm [head_dim]. kv_dtype: the dtype keys, values
    and queries are rounded to for attention. sliding_window: as in `ops.attention`.
    """

    q_proj: Projection
    k_proj: Projection
    v_proj: Projection
    o_proj: Projection
    gate_proj: Projection
    up_proj: Projection
    down_proj: Projection
    input_layernorm: Tensor
    post_attention_layernorm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    rope: RotaryEmbedding
    rms_norm_eps: float
    head_dim: int
    sliding_window: int | None
    kv_dtype: torch.dtype
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", self.head_dim**-0.5)

    @staticmethod
    def build(
        config: ModelConfig, layer_index: int, get: TensorSource, rope: RotaryEmbedding | None = None
    ) -> DecoderLayer:
        """One layer from its tensors. rope: shared between layers; None: built here."""
        prefix = f"model.layers.{layer_index}"

        def projection(name: str) -> DenseLinear | LowRankLinear:
            return build_linear(config, f"{prefix}.{name}", get)

        def norm(name: str) -> Tensor:
            return get(f"{prefix}.{name}.weight").float()

        q_proj = projection("self_attn.q_proj")
        weight = q_proj.weight if isinstance(q_proj, DenseLinear) else q_proj.factor_in
        return DecoderLayer(
            q_proj=q_proj,
            k_proj=projection("self_attn.k_proj"),
            v_proj=projection("self_attn.v_proj"),
            o_proj=projection("self_attn.o_proj"),
            gate_proj=projection("mlp.gate_proj"),
            up_proj=projection("mlp.up_proj"),
            down_proj=projection("mlp.down_proj"),
            input_layernorm=norm("input_layernorm"),
            post_attention_layernorm=norm("post_attention_layernorm"),
            q_norm=norm("self_attn.q_norm") if config.qk_norm else None,
            k_norm=norm("self_attn.k_norm") if config.qk_norm else None,
            rope=rope or RotaryEmbedding.build(config.rope, config.head_dim, weight.device),
            rms_norm_eps=config.rms_norm_eps,
            head_dim=config.head_dim,
            sliding_window=config.sliding_windows[layer_index],
            kv_dtype=weight.dtype,
        )

    def __call__(
        self,
        hidden: Tensor,
        batch: ForwardBatch,
        cache: KVLayer | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """float32 [tokens, hidden_size] -> the same.

        cache: this layer's blocks, needed if and only if the batch is paged. rotation: `rope.rotation` of the
        batch's positions, which a caller of several layers computes once; None: computed here.
        """
        rotation = rotation or self.rope.rotation(batch.positions)
        hidden = hidden + self._attention(
            ops.rms_norm(hidden, self.input_layernorm, self.rms_norm_eps), batch, cache, rotation
        )
        x = ops.rms_norm(hidden, self.post_attention_layernorm, self.rms_norm_eps)
        return hidden + self.down_proj(ops.silu_mul(self.gate_proj(x), self.up_proj(x)))

    def _attention(self, x: Tensor, batch: ForwardBatch, cache: KVLayer | None, rotation: Rotation) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # [tokens, heads, head_dim]
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # [tokens, kv_heads, head_dim]
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q = ops.rms_norm(q, self.q_norm, self.rms_norm_eps)
            k = ops.rms_norm(k, self.k_norm, self.rms_norm_eps)
        q, k = ops.apply_rope(q, *rotation), ops.apply_rope(k, *rotation)
        if batch.paged is None:
            k, v = k.to(self.kv_dtype), v.to(self.kv_dtype)
            out = ops.attention(q, k, v, batch.query_lens, self.scale, self.sliding_window)
        else:
            assert cache is not None, "a paged batch needs the cache that its slots refer to"
            paged = batch.paged
            ops.write_kv(k, v, cache.keys, cache.values, paged.slots)
            out = ops.paged_attention(
                q,
                cache.keys,
                cache.values,
                paged.block_tables,
                batch.query_lens,
                paged.context_lens,
                self.scale,
                self.sliding_window,
            )
        return self.o_proj(out.flatten(1))
