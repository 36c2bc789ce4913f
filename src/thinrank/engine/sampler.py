"""Chooses the next token of each row of logits, by that row's sampling parameters alone.

Every random number is a function of (seed, index, position), so neither the batch nor the order in which
requests arrive changes a sample. This is the path of prefill, of a CPU, and of what the decode graphs leave to it
(`chosen_on_device`). Knows nothing about the cache or the model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import ThinrankError
from ..kernels import reference as ops
from .sequence import Sequence, TokenLogprob


def sample(
    logits: Tensor, sequences: list[Sequence]
) -> tuple[list[int], list[tuple[TokenLogprob, ...] | None]]:
    """The next token of each sequence, and its log-probabilities where they are asked for.

    logits: float32 [sequences, vocab_size]. Raises ThinrankError when a row has no finite maximum.
    """
    best, token_ids = logits.max(-1)
    if not bool(best.isfinite().all()):
        raise undefined_logits()
    shaped = _shape(logits, sequences)
    if shaped is not logits:
        token_ids = shaped.argmax(-1)
    random_rows = [row for row, sequence in enumerate(sequences) if sequence.params.temperature > 0]
    if random_rows:
        rows = torch.tensor(random_rows, device=logits.device)
        token_ids[rows] = _draw(shaped[rows], [sequences[row] for row in random_rows])
    chosen = token_ids.tolist()
    return chosen, [
        None
        if sequence.params.logprobs is None
        else _logprobs(logits[row], chosen[row], sequence.params.logprobs)
        for row, sequence in enumerate(sequences)
    ]


def undefined_logits() -> ThinrankError:
    """What to raise when a row has no finite maximum."""
    return ThinrankError(
        "the model computed infinite or undefined logits", "try dtype float32, or check the checkpoint"
    )


def chosen_on_device(sequence: Sequence) -> bool:
    """Whether a decode graph can choose the next token, to the same result as `sample`.

    Not with penalties, log-probabilities, or an ending that `min_tokens` holds back. Once it can, it can for the
    rest of the sequence.
    """
    return (
        sequence.params.logprobs is None and not _has_penalty(sequence) and not _holds_endings_back(sequence)
    )


def signed_seed(sequence: Sequence) -> int:
    """The 64 bits of the seed as an int64 holds them."""
    return sequence.seed - 2**64 if sequence.seed >= 2**63 else sequence.seed


def _shape(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Logits after penalties and `min_tokens`; the same object when no row asks for either."""
    penalised = [row for row, sequence in enumerate(sequences) if _has_penalty(sequence)]
    held = [row for row, sequence in enumerate(sequences) if _holds_endings_back(sequence)]
    if not penalised and not held:
        return logits
    logits = logits.clone()
    if penalised:
        rows = torch.tensor(penalised, device=logits.device)
        logits[rows] = _penalise(logits[rows], [sequences[row] for row in penalised])
    for row in held:
        ending = [token for token in sequences[row].ending_token_ids if token < logits.shape[1]]
        logits[row, torch.tensor(ending, dtype=torch.int64, device=logits.device)] = float("-inf")
    return logits


def _has_penalty(sequence: Sequence) -> bool:
    params = sequence.params
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)


def _holds_endings_back(sequence: Sequence) -> bool:
    return sequence.num_output_tokens < sequence.params.min_tokens


def _penalise(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    def counts(tokens: Callable[[Sequence], list[int]]) -> Tensor:
        return torch.stack(
            [
                torch.tensor(tokens(s), dtype=torch.int64, device=logits.device).bincount(
                    minlength=logits.shape[1]
                )
                for s in sequences
            ]
        )

    return ops.apply_penalties(
        logits,
        counts(lambda s: s.token_ids[: s.num_prompt_tokens]),
        counts(lambda s: s.token_ids[s.num_prompt_tokens :]),
        _floats(logits, [s.params.repetition_penalty for s in sequences]),
        _floats(logits, [s.params.presence_penalty for s in sequences]),
        _floats(logits, [s.params.frequency_penalty for s in sequences]),
    )


def _draw(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Temperature, filters and one uniform number a row: int64 [rows]."""
    logits = ops.apply_temperature(logits, _floats(logits, [s.params.temperature for s in sequences]))
    # Sorting the vocabulary is the expensive part; it changes nothing for rows without a filter.
    filtered = [
        row
        for row, s in enumerate(sequences)
        if s.params.top_k > 0 or s.params.top_p < 1 or s.params.min_p > 0
    ]
    if filtered:
        rows = torch.tensor(filtered, device=logits.device)
        params = [sequences[row].params for row in filtered]
        logits[rows] = ops.filter_logits(
            logits[rows],
            torch.tensor([p.top_k for p in params], device=logits.device),
            _floats(logits, [p.top_p for p in params]),
            _floats(logits, [p.min_p for p in params]),
        )
    uniform = ops.philox_uniform(
        _ints(logits, [signed_seed(s) for s in sequences]),
        _ints(logits, [s.index for s in sequences]),
        _ints(logits, [len(s.token_ids) for s in sequences]),
    )
    return ops.sample(logits, uniform)


def _logprobs(logits: Tensor, token_id: int, count: int) -> tuple[TokenLogprob, ...]:
    """The chosen token, then the `count` most likely ones."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs[token_id]
    rank = int((logprobs > chosen).sum()) + 1
    top_values, top_ids = logprobs.topk(min(count, logprobs.shape[0]))
    return (
        TokenLogprob(token_id, float(chosen), rank),
        *(
            TokenLogprob(token, value, rank)
            for rank, (token, value) in enumerate(
                zip(top_ids.tolist(), top_values.tolist(), strict=True), start=1
            )
        ),
    )


def _floats(like: Tensor, values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)


def _ints(like: Tensor, values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)
