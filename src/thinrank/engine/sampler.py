"""Chooses the next token of each row of logits, by that row's sampling parameters alone.

Every random number is a function of (seed, index, position), so neither the batch nor the order in which
requests arrive changes a sample. This is the path of prefill, of a CPU, and of what the decode graphs leave to it
(`chosen_on_device`). Knows nothing about the cache or the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ..device import upload
from ..errors import ThinrankError
from ..kernels import reference as ops
from .grammar import TokenConstraint
from .logprobs import TokenLogprob, token_logprobs
from .sequence import Sequence


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
        else token_logprobs(logits[row : row + 1], chosen[row : row + 1], sequence.params.logprobs)[0]
        for row, sequence in enumerate(sequences)
    ]


def undefined_logits() -> ThinrankError:
    """What to raise when a row has no finite maximum."""
    return ThinrankError(
        "the model computed infinite or undefined logits", "try dtype float32, or check the checkpoint"
    )


def chosen_on_device(sequence: Sequence) -> bool:
    """Whether a decode graph can choose the next token, to the same result as `sample`.

    Not with biases, penalties, a grammar, log-probabilities, or an ending that `min_tokens` holds back. Once it can,
    it can for the rest of the sequence.
    """
    return (
        sequence.params.logprobs is None
        and sequence.constraint is None
        and not sequence.params.logit_bias
        and not _has_penalty(sequence)
        and not _holds_endings_back(sequence)
    )


def signed_seed(sequence: Sequence) -> int:
    """The 64 bits of the seed as an int64 holds them."""
    return sequence.seed - 2**64 if sequence.seed >= 2**63 else sequence.seed


def _shape(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Logits after biases, penalties, `min_tokens` and grammars; the same object when no row asks for any."""
    if all(map(_takes_logits_as_they_are, sequences)):
        return logits
    logits = logits.clone()
    for row, sequence in enumerate(sequences):
        if sequence.params.logit_bias:
            token_ids, biases = zip(*sequence.params.logit_bias.items(), strict=True)
            logits[row, upload(token_ids, torch.int64, logits.device)] += _floats(logits, biases)
    penalised = [row for row, sequence in enumerate(sequences) if _has_penalty(sequence)]
    if penalised:
        rows = torch.tensor(penalised, device=logits.device)
        logits[rows] = _penalise(logits[rows], [sequences[row] for row in penalised])
    for row, sequence in enumerate(sequences):
        if _holds_endings_back(sequence):
            ending = [token for token in sequence.ending_token_ids if token < logits.shape[1]]
            logits[row, upload(ending, torch.int64, logits.device)] = float("-inf")
        if sequence.constraint is not None:
            logits[row].masked_fill_(~_allowed(sequence.constraint, logits[row]), float("-inf"))
    return logits


def _takes_logits_as_they_are(sequence: Sequence) -> bool:
    return not (
        sequence.params.logit_bias
        or sequence.constraint is not None
        or _has_penalty(sequence)
        or _holds_endings_back(sequence)
    )


def _allowed(constraint: TokenConstraint, row: Tensor) -> Tensor:
    """bool [vocab_size]: which tokens the grammar allows next."""
    mask = torch.zeros(-(-len(row) // 32), dtype=torch.int32)
    constraint.fill_mask(mask)
    assert bool(mask.any()), "a grammar that allows no token must say that it is finished"
    bits = torch.arange(32, dtype=torch.int32, device=row.device)
    return (mask.to(row.device).unsqueeze(1) >> bits & 1).flatten()[: len(row)].bool()


def _has_penalty(sequence: Sequence) -> bool:
    params = sequence.params
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)


def _holds_endings_back(sequence: Sequence) -> bool:
    # A grammar knows best when it ends.
    return sequence.constraint is None and sequence.num_output_tokens < sequence.params.min_tokens


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


def _floats(like: Tensor, values: Iterable[float]) -> Tensor:
    return upload(list(values), torch.float32, like.device)


def _ints(like: Tensor, values: list[int]) -> Tensor:
    return upload(values, torch.int64, like.device)
