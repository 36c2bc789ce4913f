"""The decoder: token ids in, logits out. One class for every architecture in `registry`.

Knows nothing about files, requests or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import ModelConfig
from ..kernels import reference as ops
from .batch import ForwardBatch, KVLayer
from .layers import DecoderLayer, DenseLinear, Projection, TensorSource, build_linear
from .rope import RotaryEmbedding


@dataclass(frozen=True, eq=False)
class Decoder:
    """embed_tokens: [vocab_size, hidden_size]. norm: float32 [hidden_size]. lm_head may be the embedding."""

    config: ModelConfig
    embed_tokens: Tensor
    layers: tuple[DecoderLayer, ...]
    norm: Tensor
    lm_head: Projection

    @staticmethod
    def build(config: ModelConfig, get: TensorSource) -> Decoder:
        """Assemble the model.

        `get` is asked once for every tensor that the checkpoint stores, guards excepted; layers that share a
        `factor_in` share the tensor.
        """
        holders = set(config.tied_factors.values())
        shared: dict[str, Tensor] = {}

        def get_shared(name: str) -> Tensor:
            if name not in holders:
                return get(name)
            if name not in shared:
                shared[name] = get(name)
            return shared[name]

        embed_tokens = get("model.embed_tokens.weight")
        rope = RotaryEmbedding.build(config.rope, config.head_dim, embed_tokens.device)
        return Decoder(
            config,
            embed_tokens,
            tuple(
                DecoderLayer.build(config, index, get_shared, rope)
                for index in range(config.num_hidden_layers)
            ),
            get("model.norm.weight").float(),
            DenseLinear(embed_tokens)
            if config.tie_word_embeddings
            else build_linear(config, "lm_head", get_shared),
        )

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, and so of the KV cache."""
        return self.embed_tokens.dtype

    def embed(self, batch: ForwardBatch) -> Tensor:
        """The residual stream before the first layer: float32 [tokens, hidden_size]."""
        return F.embedding(batch.token_ids, self.embed_tokens).float()

    def hidden(self, batch: ForwardBatch, kv_cache: Sequence[KVLayer] | None = None) -> Tensor:
        """The residual stream after the last layer: float32 [tokens, hidden_size]."""
        hidden = self.embed(batch)
        rotation = self.layers[0].rope.rotation(batch.positions)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, batch, None if kv_cache is None else kv_cache[index], rotation)
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        """The final norm and `lm_head`: float32 [rows, hidden_size] -> float32 logits [rows, vocab_size]."""
        return self.lm_head(ops.rms_norm(hidden, self.norm, self.config.rms_norm_eps))

    def __call__(
        self,
        batch: ForwardBatch,
        kv_cache: Sequence[KVLayer] | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """float32 logits [rows, vocab_size].

        kv_cache: one `KVLayer` a layer; needed if and only if the batch is paged. rows: int64 [rows], the
        tokens of the batch whose logits are wanted; None: all.
        """
        hidden = self.hidden(batch, kv_cache)
        return self.head(hidden if rows is None else hidden[rows])
