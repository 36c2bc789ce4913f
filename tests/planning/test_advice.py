"""The rules of docs/planning.md, one after the other, on plans that meet them."""

import pytest

from thinrank.planning import plan
from thinrank.planning.advice import advise

GIB = 2**30


def advice(shape: str = "llama-7b", **arguments: object) -> str:
    return " ".join(plan(shape=shape, **arguments).advice)  # type: ignore[arg-type]


def test_nothing_fits() -> None:
    text = advice(memory=4 * GIB)
    assert text.startswith("Nothing fits, not even")
    text = advice(memory=6 * GIB)
    assert text.startswith("Nothing fits at 4,096 tokens.")
    longest = max(choice.longest_context for choice in plan(shape="llama-7b", memory=6 * GIB).choices)
    assert f"dense 4-bit, {longest:,} tokens" in text
    assert longest > 0


def test_four_bits_where_they_are_smaller_and_faster() -> None:
    text = advice(memory=12 * GIB, bandwidth=400e9)
    assert text.startswith("Use 4-bit dense instead: it is smaller than keep_ratio 0.5")
    text = advice(gpu="RTX 4090")
    assert text.startswith("Dense 16-bit fits at 4,096 tokens and loses nothing: keep it if")
    assert "use 4-bit dense instead of low-rank" in text
    assert "thinrank does not run quantised weights" in text


def test_dense_fits_and_low_rank_is_faster() -> None:
    text = advice(gpu="H200")
    assert text.startswith("Dense 16-bit fits at 4,096 tokens and loses nothing")
    choices = {choice.name: choice for choice in plan(shape="llama-7b", gpu="H200").choices}
    dense, half = choices["dense 16-bit"].ms_per_token, choices["keep_ratio 0.5"].ms_per_token
    assert dense is not None
    assert half is not None
    assert f"{dense / half - 1:.0%} more tokens/s at keep_ratio 0.5 ({half:.2f} ms/token)" in text
    assert "keep_ratio 0.9" not in text, "it is predicted slower than dense"
    assert "instead" not in text


def test_dense_fits_and_nothing_is_faster() -> None:
    """A model so small that launches are all that a step costs."""
    text = advice("tiny", gpu="H200", context=64)
    assert text.startswith("Dense 16-bit fits")
    assert "stay dense" in text


def test_dense_fits_and_the_speed_is_not_known() -> None:
    assert "Name the card or its bandwidth" in advice(memory=80 * GIB)


def test_low_rank_fits_where_dense_does_not() -> None:
    text = advice(memory=15 * GIB, bandwidth=4800e9)
    assert text.startswith(
        "Dense 16-bit does not fit at 4,096 tokens; of low-rank, keep_ratio 0.9 is the most"
    )
    assert "So do dense 8-bit" in text


def test_only_quantised_weights_fit() -> None:
    assert advice(memory=8 * GIB).startswith("Use 4-bit dense instead: at 4,096 tokens neither")


def test_only_low_keep_ratios_fit() -> None:
    """Never so with real shapes: 4 bits are smaller than a keep_ratio of 0.4."""
    planned = plan(shape="llama-7b", memory=8 * GIB, keep_ratios=(0.3, 0.5))
    low, half, dense, eight_bit, four_bit = planned.choices
    no_room = plan(shape="llama-7b", memory=4 * GIB).choices[-1]
    text = " ".join(advise(dense, eight_bit, no_room, [low, half], 4096))
    assert four_bit.fits
    assert text.startswith("At 4,096 tokens only keep_ratio 0.3 and less fit")


@pytest.mark.parametrize("memory", [8, 15, 24, 80])
@pytest.mark.parametrize("bandwidth", [None, 300e9, 4800e9])
def test_no_advice_without_a_word_on_quality(memory: int, bandwidth: float | None) -> None:
    assert "thinrank eval perplexity" in advice(memory=memory * GIB, bandwidth=bandwidth)
