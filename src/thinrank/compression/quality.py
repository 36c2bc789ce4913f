"""The model's loss on sequences, one decoder layer in memory at a time: for a dense or a low-rank checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ..config import ModelConfig
from ..errors import OptionError
from ..model.decoder import Decoder
from ..model.layers import DecoderLayer, DenseLinear, TensorSource
from .statistics import BATCH_TOKENS, batch_of, batches


def head_of(config: ModelConfig, get: TensorSource) -> Decoder:
    """A decoder without layers: the embedding, the final norm and `lm_head`. `lm_head` must be dense."""
    embed_tokens = get("model.embed_tokens.weight")
    lm_head = embed_tokens if config.tie_word_embeddings else get("lm_head.weight")
    return Decoder(config, embed_tokens, (), get("model.norm.weight").float(), DenseLinear(lm_head))


def check_predictions(sequences: Tensor) -> None:
    """Raise OptionError when sequences, int64 [samples, length], have no token to predict."""
    if sequences.shape[1] < 2:
        raise OptionError(
            "a sample of one token has no next one, whose loss could be measured",
            "raise --calibration-length",
        )


@torch.no_grad()
def mean_loss(config: ModelConfig, get: TensorSource, sequences: Tensor) -> float:
    """Mean negative log-likelihood a token, in nats; exp of it is the perplexity.

    sequences: int64 [samples, length], each on its own; its first token is not scored. get: tensors by
    name; the model may be low-rank.
    """
    head = head_of(config, get)
    ids = sequences.to(head.device)
    # [tokens, hidden_size] of all sequences; callers pass few of them.
    hidden = head.embed_tokens[ids.flatten()].float()
    for index in range(config.num_hidden_layers):
        layer = DecoderLayer.build(config, index, get)
        for start, part in batches(ids, BATCH_TOKENS):
            rows = slice(start, start + part.numel())
            hidden[rows] = layer(hidden[rows], batch_of(part, head.device))
    total = 0.0
    for row, states in zip(ids, hidden.split(ids.shape[1]), strict=True):
        total += cross_entropy(head.head(states[:-1]), row[1:], reduction="sum").double().item()
    return total / (ids.shape[0] * (ids.shape[1] - 1))
