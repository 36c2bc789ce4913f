"""What to do with several cards, in sentences: what fits, whether dividing low-rank pays, whether one card would do."""

from __future__ import annotations

from collections.abc import Sequence

from .advice import LOWEST_SENSIBLE_KEEP_RATIO, QUALITY
from .choice import Choice, Workload


def advise_parallel(
    dense: Choice,
    eight_bit: Choice,
    four_bit: Choice,
    low_rank: Sequence[Choice],
    alone: Sequence[Choice],
    work: Workload,
) -> tuple[str, ...]:
    """Sentences, what fits first. low_rank: by rising keep_ratio, below 1; alone: the same ones on one card."""
    every = [*low_rank, dense, eight_bit, four_bit]
    if not any(choice.fits for choice in every):
        return (
            f"Nothing fits at {work.context:,} tokens on {work.tensor_parallel_size} cards: shorten the context, lower "
            "the batch size, or take more or larger cards.",
        )
    sensible, alone = (
        [choice for choice in choices if (choice.keep_ratio or 0.0) >= LOWEST_SENSIBLE_KEEP_RATIO]
        for choices in (low_rank, alone)
    )
    return (
        _what_fits(dense, eight_bit, four_bit, sensible, work),
        *_reads(dense, sensible, work),
        *_one_card(sensible, alone, work),
        QUALITY,
    )


def _what_fits(
    dense: Choice, eight_bit: Choice, four_bit: Choice, sensible: Sequence[Choice], work: Workload
) -> str:
    cards = f"on {work.tensor_parallel_size} cards at {work.context:,} tokens"
    if dense.fits:
        return f"Dense 16-bit fits {cards} and loses nothing."
    names = [choice.name for choice in (*sensible[::-1], eight_bit, four_bit) if choice.fits]
    if not names:
        return (
            f"Of what is left of the model, only keep_ratios below {LOWEST_SENSIBLE_KEEP_RATIO} fit {cards}."
        )
    return f"Dense 16-bit does not fit {cards}. What does: {', '.join(names)}."


def _reads(dense: Choice, sensible: Sequence[Choice], work: Workload) -> list[str]:
    """What dividing does to the advantage of low-rank."""
    if not sensible:
        return []
    half = sensible[0]
    less = [choice.name for choice in sensible if choice.weight_step_bytes < dense.weight_step_bytes]
    verdict = f"so do {', '.join(less[1:])}" if less[1:] else "no larger keep_ratio does"
    cards = f"{work.tensor_parallel_size} cards"
    read, dense_read = _gibibytes(half.weight_step_bytes), _gibibytes(dense.weight_step_bytes)
    if half.name in less:
        return [
            f"A step reads {read} of weights in each of {cards} at {half.name}, less than dense ({dense_read}); "
            f"{verdict}."
        ]
    return [
        f"A step reads {read} of weights in each of {cards} at {half.name}, more than dense ({dense_read}): one factor "
        "of every module is whole in each card."
    ]


def _one_card(sensible: Sequence[Choice], alone: Sequence[Choice], work: Workload) -> list[str]:
    """The largest keep_ratio that needs no division."""
    fitting = [(one, part) for one, part in zip(alone, sensible, strict=True) if one.fits]
    if not fitting:
        return []
    one, part = fitting[-1]
    return [
        f"{one.name} fits on one card, in thinrank's own engine: {work.tensor_parallel_size} copies, one a card, "
        f"exchange nothing, and read {_gibibytes(one.weight_step_bytes)} of weights a step instead of "
        f"{_gibibytes(part.weight_step_bytes)}. docs/scale.md has commands for both."
    ]


def _gibibytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
