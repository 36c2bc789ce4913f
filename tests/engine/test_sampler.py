"""The sampler: reproducible, independent of the neighbours, and faithful to the distribution."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sampling_distribution import assert_drawn_from
from thinrank.config import SamplingParams
from thinrank.engine.grammar import TokenConstraint
from thinrank.engine.sampler import chosen_on_device, sample
from thinrank.engine.sequence import Sequence
from thinrank.errors import OptionError

VOCAB = 23


def sequence(
    prompt: list[int] = [1],  # noqa: B006
    output: list[int] = [],  # noqa: B006
    seed: int = 0,
    index: int = 0,
    constraint: TokenConstraint | None = None,
    **settings: Any,
) -> Sequence:
    params = SamplingParams(max_tokens=2000, **settings)
    made = Sequence("r", index, list(prompt), params, frozenset([2]), 2000, seed, "", constraint)
    made.token_ids += output
    return made


def logits(rows: int = 1, seed: int = 0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def pick(row: Tensor, *args: Any, **settings: Any) -> int:
    return sample(row, [sequence(*args, **settings)])[0][0]


def test_greedy_and_its_disguises() -> None:
    best = int(logits().argmax())
    for settings in ({"temperature": 0}, {"top_k": 1}, {"temperature": 1e-7}, {"top_p": 1e-9}, {"min_p": 1}):
        assert [pick(logits(), seed=seed, **settings) for seed in range(20)] == [best] * 20, settings


def test_seed_index_and_position_determine_the_sample() -> None:
    def draws(**settings: Any) -> list[int]:
        return [pick(logits(), output=[5] * n, **settings) for n in range(30)]

    assert draws(seed=7) == draws(seed=7)
    assert draws(seed=7) != draws(seed=8)
    assert draws(seed=7) != draws(seed=7, index=1)
    assert draws(seed=2**64 - 1) == draws(seed=2**64 - 1)


def test_neighbours_do_not_matter() -> None:
    rows = logits(6)
    made = [
        sequence(seed=1),
        sequence(seed=2, top_p=0.5),
        sequence(temperature=0),
        sequence(seed=3, repetition_penalty=1.9, prompt=[4, 5, 6]),
        sequence(seed=4, top_k=3, temperature=2.0),
        sequence(seed=5, min_tokens=4, logprobs=2),
    ]
    alone = [sample(rows[i : i + 1], made[i : i + 1])[0][0] for i in range(6)]
    assert sample(rows, made)[0] == alone
    assert sample(rows.flip(0), made[::-1])[0] == alone[::-1]


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.1}])
def test_frequencies_follow_the_distribution(settings: dict[str, Any]) -> None:
    row, n = logits(), 4000
    tokens, _ = sample(row.expand(n, -1), [sequence(seed=seed, **settings) for seed in range(n)])
    assert_drawn_from(tokens, row[0], settings)


def test_penalties_count_prompt_and_output() -> None:
    row = logits()
    first, second, third = row[0].topk(3).indices.tolist()
    assert pick(row, temperature=0, prompt=[first], repetition_penalty=2.0) != first
    assert pick(row, temperature=0, prompt=[first], presence_penalty=2.0, frequency_penalty=2.0) == first
    assert pick(row, [1], [first], temperature=0, presence_penalty=2.0) == second
    assert pick(row, [1], [first, second], temperature=0, frequency_penalty=2.0) == third


def test_min_tokens_holds_the_endings_back() -> None:
    row = torch.zeros(1, VOCAB)
    row[0, 2], row[0, 9], row[0, 4] = 9.0, 8.0, 7.0
    held = {"temperature": 0, "min_tokens": 1, "stop_token_ids": [9, 10**6]}
    assert pick(row, **held) == 4
    assert pick(row, [1], [5], **held) == 2
    assert pick(row, **held, ignore_eos=True) == 2  # EOS does not end this one
    assert row[0, 2] == 9.0, "the caller's logits are not changed"


def test_logit_bias() -> None:
    row = logits()
    first, second, third = row[0].topk(3).indices.tolist()
    assert pick(row, temperature=0, logit_bias={first: -100}) == second
    assert pick(row, temperature=0, logit_bias={third: 100.0, first: -1}) == third
    gap = float(row[0, first] - row[0, second])
    assert pick(row, temperature=0, logit_bias={second: gap - 1e-3}) == first
    assert pick(row, temperature=0, logit_bias={second: gap + 1e-3}) == second
    assert {pick(row, seed=seed, logit_bias={first: 100}) for seed in range(9)} == {first}
    assert pick(row, [first], temperature=0, logit_bias={first: 100}, repetition_penalty=2.0) == first
    # its neighbour is as it was, and the report is of the model, not of what was made of it
    made = [sequence(temperature=0, logit_bias={third: 100}, logprobs=0), sequence(temperature=0)]
    tokens, (report, _) = sample(row.expand(2, -1), made)
    assert tokens == [third, first] and report is not None and report[0].rank == 3
    for bias in (100.5, -101, float("nan")):
        with pytest.raises(OptionError, match="logit_bias of token 4"):
            SamplingParams(logit_bias={4: bias})


class Only:
    """Allows a few tokens, and is finished after some."""

    def __init__(self, *allowed: int, count: int = 2):
        self.allowed, self.left, self.seen = allowed, count, list[int]()

    @property
    def finished(self) -> bool:
        return self.left == 0

    def fill_mask(self, mask: Tensor) -> None:
        assert mask.dtype == torch.int32 and mask.shape == (-(-VOCAB // 32),) and not mask.any()
        for token in self.allowed:
            # the top bit makes an int32 negative
            mask[token // 32] |= torch.tensor(1 << token % 32, dtype=torch.int64).int()

    def accept(self, token_id: int) -> None:
        self.seen.append(token_id)
        self.left -= 1


def test_a_grammar_masks_its_row_alone() -> None:
    row = logits()
    first, *_, last = row[0].argsort(descending=True).tolist()
    made = [sequence(temperature=0, constraint=Only(last)), sequence(temperature=0)]
    assert sample(row.expand(2, -1), made)[0] == [last, first]
    hot = {pick(row, seed=seed, constraint=Only(3, 7), temperature=50.0) for seed in range(30)}
    assert hot == {3, 7}
    # above all other wishes
    assert pick(row, constraint=Only(last), logit_bias={last: -100}, temperature=0) == last
    assert pick(row, constraint=Only(2), min_tokens=5, temperature=0) == 2
    with pytest.raises(AssertionError, match="allows no token"):
        pick(row, constraint=Only())


def test_the_highest_bit_of_a_mask_counts() -> None:
    wide = torch.zeros(1, 40)
    wide[0, 39], wide[0, 31] = 3.0, 1.0

    class Bits(Only):
        def fill_mask(self, mask: Tensor) -> None:
            mask[0] = -(2**31)  # token 31
            mask[1] = 1  # token 32

    assert pick(wide, constraint=Bits(), temperature=0) == 31


def test_a_grammar_ends_its_sequence() -> None:
    grammar = Only(5, 6)
    made = sequence(constraint=grammar, ignore_eos=True)
    assert made.append(5) == (None, None)
    assert made.append(6) == ("stop", None) and grammar.seen == [5, 6]


def test_logprobs_are_the_models_own() -> None:
    row = logits()
    _, (found,) = sample(row, [sequence(temperature=0, logprobs=3, prompt=[3], repetition_penalty=2.0)])
    expected = row[0].log_softmax(0)
    assert found is not None and len(found) == 4
    chosen, *best = found
    assert chosen.logprob == pytest.approx(float(expected[chosen.token_id]), abs=1e-6)
    assert [entry.token_id for entry in best] == expected.topk(3).indices.tolist()
    assert [entry.rank for entry in best] == [1, 2, 3]
    assert chosen.rank == int((expected > expected[chosen.token_id]).sum()) + 1
    assert sample(row, [sequence()])[1] == [None]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1}, True),
        ({"logprobs": 0}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": -0.1}, False),
        ({"min_tokens": 3}, False),
        ({"logit_bias": {4: 1.0}}, False),
        ({"constraint": Only(4)}, False),
        ({"logit_bias": {}}, True),
        ({"min_tokens": 2}, True),  # two tokens are there
    ],
)
def test_what_the_device_can_choose(settings: dict[str, Any], expected: bool) -> None:
    assert chosen_on_device(sequence([1], [5, 6], **settings)) == expected
