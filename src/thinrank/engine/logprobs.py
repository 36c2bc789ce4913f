"""Log-probabilities of tokens under the model, before penalties, masks and temperature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..device import upload

#: Rows of logits that exist at a time while a prompt's log-probabilities are computed: 32 MiB for 128k tokens.
ROWS_AT_A_TIME = 64


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probability of a token under the model, before penalties and temperature.

    rank: 1 for the most likely token of the vocabulary.
    """

    token_id: int
    logprob: float
    rank: int


def token_logprobs(logits: Tensor, token_ids: list[int], count: int) -> list[tuple[TokenLogprob, ...]]:
    """For each row its token, then the `count` most likely ones. logits: float32 [rows, vocab_size]."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, upload(token_ids, torch.int64, logits.device).unsqueeze(1))
    ranks = (logprobs > chosen).sum(1) + 1
    top = logprobs.topk(min(count, logprobs.shape[1]))
    # One transfer each, not one a row.
    columns = (chosen[:, 0].tolist(), ranks.tolist(), top.indices.tolist(), top.values.tolist())
    return [
        (TokenLogprob(token_id, value, rank), *map(TokenLogprob, top_ids, top_values, range(1, count + 1)))
        for token_id, value, rank, top_ids, top_values in zip(token_ids, *columns, strict=True)
    ]


def logprobs_of_prompt(
    hidden: Tensor, head: Callable[[Tensor], Tensor], token_ids: list[int], count: int
) -> list[tuple[TokenLogprob, ...]]:
    """`token_logprobs` of the tokens that follow rows of the residual stream, without all their logits at once.

    hidden: float32 [rows, hidden_size]. head: from there to logits. token_ids: one a row.
    """
    found: list[tuple[TokenLogprob, ...]] = []
    for start in range(0, len(token_ids), ROWS_AT_A_TIME):
        rows = slice(start, start + ROWS_AT_A_TIME)
        found += token_logprobs(head(hidden[rows]), token_ids[rows], count)
    return found
