"""Correct first: our systems' logits against the float32 reference on the same stored weights.

No number is printed for a system that computes something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..config import BLOCK_SIZE, SamplingParams
from ..engine.engine import Engine
from ..engine.sequence import TokenOutput
from ..errors import ThinrankError
from ..model.batch import ForwardBatch
from ..model.decoder import Decoder
from .engine_system import engine_config
from .shapes import BenchModel, fast_decoder, plain_decoder, reference_decoder

if TYPE_CHECKING:
    from ..model.packed_decoder import PackedDecoder

#: Allowed ||logits - reference|| / ||reference||. Rounding a GEMM's inputs to 8 significant bits (bfloat16)
#: costs 0.2 to 0.4 % of its output; the projections of a layer run one after another and all layers add
#: theirs to the residual stream, which gives 1 to 2 % at the end of 28 to 40 layers of random weights.
#: Twice that catches a factor that is read wrongly, a norm that is left out, a position that is off by one.
#: float16 has 3 bits more; float32 differs by the order of summation only.
BOUNDS = {torch.bfloat16: 4e-2, torch.float16: 5e-3, torch.float32: 1e-4}
#: Compressed checkpoints can have factors so ill-conditioned that 16 bits cost more (svd-llm at a keep_ratio
#: of 0.95: 4 %). So an error is also allowed if plain PyTorch on the same weights is half as far off.
PLAIN_FACTOR = 2
#: A greedy choice may miss the reference's by what two logits may be wrong, in the tail of their errors.
GREEDY_FACTOR = 4

#: The decode steps cross the end of a block.
PROMPT_LEN = BLOCK_SIZE - 4
OUTPUT_LEN = 8
#: Prompts in one batch get shorter by this, eight times, so that neighbours differ in everything.
STAGGER = 5
LENGTHS = 8
#: As many as the largest graph has rows.
MAX_SEQUENCES = 64
#: The most that a request may ask for.
LOGPROBS = 20


@dataclass(frozen=True)
class Check:
    """One comparison with a reference. error: relative to the reference's norm or standard deviation."""

    system: str
    check: str
    error: float
    bound: float
    reference: str = "float32"

    @property
    def passed(self) -> bool:
        return self.error <= self.bound  # not NaN

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


@torch.inference_mode()
def check_system(name: str, model: BenchModel, batch_size: int) -> list[Check]:
    """Compare the engine's prefill and decode steps with the reference, `batch_size` (up to 64) sequences.

    Raises ThinrankError for the first that is outside its bound.
    """
    prompts = _prompts(model, min(batch_size, MAX_SEQUENCES))
    prefilled, reported, greedy = _run(model, prompts)
    # The engine's own choices are forced on the others: all have seen the same tokens at every step. One
    # decoder is in memory at a time.
    sequences = [*zip(prompts, reported, strict=True), *zip(prompts, greedy, strict=True)]
    plain_prefilled, plain = _force(plain_decoder(model), sequences)
    expected_prefilled, expected = _force(reference_decoder(model), sequences)

    count = len(prompts)
    ours = [_logprob_error(_reported(out), out, row) for out, row in zip(reported, expected, strict=False)]
    plains = [
        _logprob_error(_logprobs_at(logits, out), out, row)
        for logits, out, row in zip(plain, reported, expected, strict=False)
    ]
    missed = [_shortfall(out, row) for out, row in zip(greedy, expected[count:], strict=True)]
    bound = BOUNDS[model.dtype]
    prefill_bound = max(bound, PLAIN_FACTOR * _relative_error(plain_prefilled, expected_prefilled))
    decode_bound = max(bound, PLAIN_FACTOR * max(plains))
    checks = [
        Check(name, "prefill logits", _relative_error(prefilled, expected_prefilled), prefill_bound),
        Check(name, "decode logits", _worst(ours), decode_bound),
        # What is timed: without log-probabilities.
        Check(name, "greedy choices", _worst(missed), GREEDY_FACTOR * decode_bound),
    ]
    for check in checks:
        if not check.passed:
            raise ThinrankError(
                f"{name} is wrong: its {check.check} differ from the float32 reference by {check.error:.2g}, "
                f"allowed are {check.bound:.2g}",
                "this is a bug of thinrank or of this installation's kernels; no time is reported",
            )
    return checks


def _run(
    model: BenchModel, prompts: list[list[int]]
) -> tuple[Tensor, list[list[TokenOutput]], list[list[TokenOutput]]]:
    """Ours: logits of the first prompt without a cache, outputs with log-probabilities, outputs without."""
    decoder = fast_decoder(model)
    engine = Engine(decoder, engine_config(model, len(prompts), PROMPT_LEN + OUTPUT_LEN))
    return (
        _whole(decoder, prompts[0]),
        _generate(engine, prompts, logprobs=LOGPROBS),
        _generate(engine, prompts, logprobs=None),
    )


def _force(
    decoder: Decoder, sequences: Sequence[tuple[list[int], list[TokenOutput]]]
) -> tuple[Tensor, list[Tensor]]:
    """Logits of the first prompt, and of each sequence where its output tokens were chosen.

    float32 [tokens, vocab_size] each.
    """
    forced = []
    for prompt, output in sequences:
        ids = [*prompt, *(token.token_id for token in output[:-1])]
        forced.append(_whole(decoder, ids)[len(prompt) - 1 :])
    return _whole(decoder, sequences[0][0]), forced


def _prompts(model: BenchModel, count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(model.seed)
    ids = torch.randint(model.config.vocab_size, (count, PROMPT_LEN), generator=generator).tolist()
    return [row[: PROMPT_LEN - STAGGER * (index % LENGTHS)] for index, row in enumerate(ids)]


def _whole(decoder: Decoder | PackedDecoder, token_ids: Sequence[int]) -> Tensor:
    """float32 logits [tokens, vocab_size] of one sequence without a cache."""
    return decoder(ForwardBatch.whole_sequences([torch.tensor(token_ids)], decoder.device))


def _generate(engine: Engine, prompts: list[list[int]], logprobs: int | None) -> list[list[TokenOutput]]:
    """Greedy outputs of each prompt, all in one batch."""
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True, logprobs=logprobs)
    outputs: dict[str, list[TokenOutput]] = {engine.add(prompt, params): [] for prompt in prompts}
    while engine.has_unfinished:
        for token in engine.step():
            outputs[token.request_id].append(token)
    return list(outputs.values())


def _relative_error(logits: Tensor, reference: Tensor) -> float:
    return float((logits - reference).norm() / reference.norm())


def _reported(output: list[TokenOutput]) -> list[float]:
    """Every log-probability that the engine reports of an output."""
    return [item.logprob for token in output for item in token.logprobs or ()]


def _logprobs_at(logits: Tensor, output: list[TokenOutput]) -> list[float]:
    """The same ones from logits [tokens, vocab_size]."""
    logprobs = logits.log_softmax(-1)
    return [
        float(row[item.token_id])
        for row, token in zip(logprobs, output, strict=True)
        for item in token.logprobs or ()
    ]


def _logprob_error(values: list[float], output: list[TokenOutput], reference: Tensor) -> float:
    """Root mean square of the differences from the reference's log-probabilities.

    In units of the standard deviation of its logits [tokens, vocab_size], so that it is comparable to a
    relative error of logits.
    """
    expected = torch.tensor(_logprobs_at(reference, output))
    return float((torch.tensor(values) - expected).square().mean().sqrt() / reference.std())


def _shortfall(output: list[TokenOutput], reference: Tensor) -> float:
    """By how much the reference's best logit exceeds that of the chosen token at most, in the same units."""
    chosen = torch.tensor([token.token_id for token in output], device=reference.device)
    missed = reference.amax(-1) - reference.gather(-1, chosen.unsqueeze(1)).squeeze(1)
    return float(missed.max() / reference.std())


def _worst(errors: list[float]) -> float:
    """The largest; NaN if any is."""
    return float(torch.tensor(errors).max())
