"""A plain decoder in the style of gpt-fast: 16-bit throughout, a static dense KV cache, nothing of ours.

Under torch.compile it is what the strongest general compiler gives; run eagerly it is dense-KV attention
without packing and graphs. A dense model has q, k and v in one matrix, and may have int4 weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from ..model.rope import RotaryEmbedding
from .huggingface import Parameters, linear, low_rank_or_dense
from .shapes import BenchModel
from .system import StaticCacheSystem

#: Turns a Linear into what replaces it.
Transform = Callable[[nn.Linear], nn.Module]


def keep(module: nn.Linear) -> nn.Module:
    return module


class StaticDecoder(nn.Module):
    """token ids in, logits out. `allocate` comes first."""

    def __init__(self, model: BenchModel, transform: Transform = keep):
        super().__init__()
        config, get = model.config, Parameters(model)

        def projection(name: str) -> nn.Module:
            module = low_rank_or_dense(config, name, get)
            return transform(module) if isinstance(module, nn.Linear) else module

        self.config = config
        self.embed_tokens = get("model.embed_tokens.weight")
        self.layers = nn.ModuleList(
            StaticLayer(config, index, get, projection, transform)
            for index in range(config.num_hidden_layers)
        )
        self.norm = get("model.norm.weight")
        self.lm_head = (
            transform(linear(self.embed_tokens, None))
            if config.tie_word_embeddings
            else projection("lm_head")
        )
        self._rope = RotaryEmbedding.build(config.rope, config.head_dim, model.device)

    def allocate(self, batch_size: int, length: int) -> None:
        """An empty cache for `length` tokens of each sequence, and cos and sin of every position."""
        device, dtype = self.embed_tokens.device, self.embed_tokens.dtype
        cos, sin = self._rope.rotation(torch.arange(length, device=device))
        self.register_buffer("cos", cos.to(dtype))
        self.register_buffer("sin", sin.to(dtype))
        shape = (batch_size, self.config.num_key_value_heads, length, self.config.head_dim)
        for layer in self.layers:
            layer.register_buffer("keys", torch.zeros(shape, dtype=dtype, device=device))
            layer.register_buffer("values", torch.zeros(shape, dtype=dtype, device=device))

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """int64 [batch, tokens] at int64 [tokens] -> logits of the last token, [batch, vocab_size].

        Several tokens are a prompt: their positions count from 0.
        """
        hidden = F.embedding(token_ids, self.embed_tokens)
        rotation = self.cos[positions], self.sin[positions]  # type: ignore[index]
        for layer in self.layers:
            hidden = layer(hidden, positions, rotation)
        logits: Tensor = self.lm_head(rms_norm(hidden[:, -1], self.norm, self.config.rms_norm_eps))
        return logits

    def decode(self, token: Tensor, position: Tensor) -> Tensor:
        """int64 [batch, 1] at int64 [1] -> the most likely next token, int64 [batch, 1]."""
        return self(token, position).argmax(-1, keepdim=True)  # type: ignore[no-any-return]


class StaticLayer(nn.Module):
    keys: Tensor
    values: Tensor

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        get: Parameters,
        projection: Callable[[str], nn.Module],
        transform: Transform,
    ):
        super().__init__()
        prefix = f"model.layers.{index}"
        qkv = [f"{prefix}.self_attn.{name}_proj" for name in "qkv"]
        if any(name in config.ranks for name in qkv):
            self.qkv: nn.Module = SideBySide([projection(name) for name in qkv])
        else:
            self.qkv = transform(concatenated(config, qkv, get))
        self.o_proj = projection(f"{prefix}.self_attn.o_proj")
        self.gate_proj = projection(f"{prefix}.mlp.gate_proj")
        self.up_proj = projection(f"{prefix}.mlp.up_proj")
        self.down_proj = projection(f"{prefix}.mlp.down_proj")
        self.input_layernorm = get(f"{prefix}.input_layernorm.weight")
        self.post_attention_layernorm = get(f"{prefix}.post_attention_layernorm.weight")
        self.q_norm = get(f"{prefix}.self_attn.q_norm.weight") if config.qk_norm else None
        self.k_norm = get(f"{prefix}.self_attn.k_norm.weight") if config.qk_norm else None
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.window = config.sliding_windows[index]

    def forward(self, hidden: Tensor, positions: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """[batch, tokens, hidden_size] -> the same."""
        x = rms_norm(hidden, self.input_layernorm, self.eps)
        hidden = hidden + self._attention(x, positions, rotation)
        x = rms_norm(hidden, self.post_attention_layernorm, self.eps)
        out: Tensor = hidden + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out

    def _attention(self, x: Tensor, positions: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rms_norm(q, self.q_norm, self.eps), rms_norm(k, self.k_norm, self.eps)
        q, k = rotate(q, *rotation), rotate(k, *rotation)
        self.keys[:, :, positions] = k
        self.values[:, :, positions] = v
        whole_prompt = q.shape[2] > 1
        mask = None
        if not whole_prompt:
            k, v = self.keys, self.values
        if not whole_prompt or (self.window is not None and self.window < q.shape[2]):
            distance = positions.unsqueeze(1) - torch.arange(k.shape[2], device=k.device)
            mask = distance >= 0
            if self.window is not None:
                mask = mask & (distance < self.window)
        if self.kv_heads != self.heads:
            k, v = (tensor.repeat_interleave(self.heads // self.kv_heads, dim=1) for tensor in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected


class SideBySide(nn.Module):
    """Several projections of one input, their outputs one after the other."""

    def __init__(self, parts: list[nn.Module]):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


def concatenated(config: ModelConfig, names: list[str], get: Parameters) -> nn.Linear:
    """Dense projections of one input as a single Linear."""
    weight = torch.cat([get(f"{name}.weight") for name in names])
    bias = (
        nn.Parameter(torch.cat([get(f"{name}.bias") for name in names]), requires_grad=False)
        if config.linears()[names[0]].bias
        else None
    )
    return linear(nn.Parameter(weight, requires_grad=False), bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In float32 inside, x's dtype outside."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the "half" layout. x: [..., tokens, head_dim]; cos, sin: [tokens, head_dim/2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class StaticDecoderSystem(StaticCacheSystem):
    """`StaticDecoder`, eager or with the decode step compiled into one CUDA graph; prefill is eager."""

    def __init__(self, model: BenchModel, compiled: bool = True, transform: Transform = keep):
        super().__init__(model)
        self.decoder = StaticDecoder(model, transform)
        self._compiled = compiled
        self._step: Any = self.decoder.decode

    def _allocate(self, batch_size: int, length: int) -> None:
        self.decoder.allocate(batch_size, length)
        if self._compiled:
            # mode="reduce-overhead" is the first option; the second is what gpt-fast adds to it.
            options: dict[str, Any] = {"triton.cudagraphs": True, "coordinate_descent_tuning": True}
            self._step = torch.compile(self.decoder.decode, fullgraph=True, options=options)

    def _empty(self) -> None:
        pass  # a mask hides what lies beyond the position

    def _truncate(self, length: int) -> None:
        pass

    def _prefill(self, token_ids: Tensor) -> Tensor:
        return self.decoder(token_ids, torch.arange(token_ids.shape[1], device=token_ids.device))  # type: ignore[no-any-return]

    def _decode(self, token: Tensor, position: Tensor) -> Tensor:
        if self._compiled:
            torch.compiler.cudagraph_mark_step_begin()
        next_token: Tensor = self._step(token, position)
        return next_token
