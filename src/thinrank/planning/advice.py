"""What to do, in sentences. The rules are those of docs/planning.md, in the same order."""

from __future__ import annotations

from collections.abc import Sequence

from .choice import Choice

#: The least that the literature evaluates as a usable model; below, every public method has lost most of it.
LOWEST_SENSIBLE_KEEP_RATIO = 0.5

QUALITY = (
    "Bytes say nothing about quality: before you rely on any of this, run thinrank compress, compare with "
    "thinrank eval perplexity DENSE LOWRANK, and measure a quantised model in its own runtime."
)
_OTHER_RUNTIMES = "thinrank does not run quantised weights; llama.cpp, vLLM and gpt-fast do."


def advise(
    dense: Choice, eight_bit: Choice, four_bit: Choice, low_rank: Sequence[Choice], context: int
) -> tuple[str, ...]:
    """Sentences, the verdict first. low_rank: by rising keep_ratio, below 1; may be empty."""
    every = [*low_rank, dense, eight_bit, four_bit]
    sensible = [c for c in low_rank if _ratio(c) >= LOWEST_SENSIBLE_KEEP_RATIO]
    fitting = [choice for choice in sensible if choice.fits]

    if not any(choice.fits for choice in every):
        return (_nothing_fits(max(every, key=lambda choice: choice.longest_context), context),)
    if four_bit.fits and sensible and _smaller_and_faster(four_bit, sensible[0]):
        return (*_use_four_bit(dense, four_bit, sensible[0], context), _OTHER_RUNTIMES, QUALITY)
    if dense.fits:
        return (*_dense_fits(dense, four_bit, fitting, context), QUALITY)
    if fitting:
        return (*_low_rank_fits(fitting[-1], eight_bit, four_bit, context), _OTHER_RUNTIMES, QUALITY)
    if eight_bit.fits or four_bit.fits:
        return (*_only_quantized_fits(eight_bit, four_bit, context), _OTHER_RUNTIMES, QUALITY)
    most = max((choice for choice in low_rank if choice.fits), key=_ratio)
    return (
        f"At {context:,} tokens only {most.name} and less fit, which hardly leaves a usable model: shorten the "
        "context or take a larger card.",
        QUALITY,
    )


def _nothing_fits(closest: Choice, context: int) -> str:
    if closest.longest_context:
        return (
            f"Nothing fits at {context:,} tokens. The longest context is that of {closest.name}, "
            f"{closest.longest_context:,} tokens: shorten the context, lower the batch size or take a larger card."
        )
    return "Nothing fits, not even the weights and one block of the cache: take a larger card or a smaller model."


def _use_four_bit(dense: Choice, four_bit: Choice, lowest: Choice, context: int) -> list[str]:
    use = "Use 4-bit dense instead"
    sentences = []
    if dense.fits:
        sentences.append(
            f"Dense 16-bit fits at {context:,} tokens and loses nothing: keep it if {_speed(dense)} is fast enough."
        )
        use = "If it is not, use 4-bit dense instead of low-rank"
    return [
        *sentences,
        f"{use}: it is smaller than {lowest.name} ({four_bit.weight_bytes / lowest.weight_bytes:.0%} of its "
        f"weights) and predicted faster ({_speed(four_bit)} against {_speed(lowest)}).",
    ]


def _dense_fits(dense: Choice, four_bit: Choice, fitting: list[Choice], context: int) -> list[str]:
    sentences = [f"Dense 16-bit fits at {context:,} tokens and loses nothing{_in_brackets(dense)}."]
    if dense.tpot_ms is None:
        return [*sentences, "Name the card or its bandwidth to see what low-rank would buy in speed."]
    faster = [choice for choice in fitting if _gain(dense, choice) > 0]
    if not faster:
        return [*sentences, "No keep_ratio of 0.5 or more is predicted to be faster: stay dense."]
    ends = faster[-1:] if len(faster) == 1 else [faster[-1], faster[0]]
    gains = ", ".join(f"{_gain(dense, c):.0%} more tokens/s at {c.name} ({_speed(c)})" for c in ends)
    sentences.append(f"Low-rank gives up quality for a predicted {gains}.")
    if four_bit.fits:
        sentences.append(
            f"Compare 4-bit dense, with fewer bytes{_in_brackets(four_bit)}: that is gpt-fast's speed, and a "
            f"better runtime may come nearer to its floor of {four_bit.floor_ms:.2f} ms."
        )
    return sentences


def _low_rank_fits(most: Choice, eight_bit: Choice, four_bit: Choice, context: int) -> list[str]:
    sentences = [
        f"Dense 16-bit does not fit at {context:,} tokens; of low-rank, {most.name} is the most that does"
        f"{_in_brackets(most)}."
    ]
    rivals = [choice for choice in (eight_bit, four_bit) if choice.fits]
    if rivals:
        names = " and ".join(f"{rival.name}{_in_brackets(rival)}" for rival in rivals)
        sentences.append(f"So {'do' if len(rivals) > 1 else 'does'} {names}: compare their quality first.")
    return sentences


def _only_quantized_fits(eight_bit: Choice, four_bit: Choice, context: int) -> list[str]:
    best = eight_bit if eight_bit.fits else four_bit
    return [
        f"Use {best.bits}-bit dense instead: at {context:,} tokens neither 16-bit dense nor a keep_ratio of "
        f"{LOWEST_SENSIBLE_KEEP_RATIO} or more fits{_in_brackets(best)}."
    ]


def _ratio(choice: Choice) -> float:
    return choice.keep_ratio or 0.0


def _smaller_and_faster(one: Choice, other: Choice) -> bool:
    if one.tpot_ms is None or other.tpot_ms is None:
        return False
    return one.weight_bytes < other.weight_bytes and one.tpot_ms < other.tpot_ms


def _gain(slow: Choice, fast: Choice) -> float:
    return (slow.tpot_ms or 0.0) / (fast.tpot_ms or float("inf")) - 1


def _speed(choice: Choice) -> str:
    return "its speed" if choice.tpot_ms is None else f"{choice.tpot_ms:.2f} ms/token"


def _in_brackets(choice: Choice) -> str:
    return "" if choice.tpot_ms is None else f" ({_speed(choice)})"
