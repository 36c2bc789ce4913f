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
    dense, half = choices["dense 16-bit"].tpot_ms, choices["keep_ratio 0.5"].tpot_ms
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


def test_several_cards_that_hold_the_dense_model() -> None:
    text = advice(gpu="A10G", tensor_parallel_size=2)
    assert text.startswith(
        "Dense 16-bit fits on 2 cards at 4,096 tokens and loses nothing. A step reads 4.19 GiB"
    )
    assert "less than dense (6.15 GiB); so do keep_ratio 0.6, keep_ratio 0.7." in text
    assert "keep_ratio 0.9 fits on one card, in thinrank's own engine: 2 copies" in text


def test_several_cards_on_which_low_rank_reads_more() -> None:
    text = advice(gpu="A10G", tensor_parallel_size=4)
    assert "3.14 GiB of weights in each of 4 cards at keep_ratio 0.5, more than dense (3.08 GiB)" in text


def test_several_cards_that_hold_only_low_rank() -> None:
    text = advice("llama-13b", memory=15 * GIB, tensor_parallel_size=2)
    assert text.startswith(
        "Dense 16-bit does not fit on 2 cards at 4,096 tokens. What does: keep_ratio 0.6, keep"
    )
    assert "keep_ratio 0.5, dense 8-bit, dense 4-bit." in text
    assert "one card" not in text, "not even keep_ratio 0.5 fits on one"


def test_several_cards_that_hold_too_little() -> None:
    assert advice("llama-13b", memory=3 * GIB, tensor_parallel_size=2).startswith(
        "Nothing fits at 4,096 tokens on 2 cards"
    )
    planned = plan(shape="llama-13b", memory=9 * GIB, tensor_parallel_size=2, keep_ratios=(0.3, 0.5))
    fitting = [choice.name for choice in planned.choices if choice.fits]
    assert fitting == ["keep_ratio 0.3", "dense 4-bit"]
