"""The sampler: reproducible, independent of the neighbours, and faithful to the distribution."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from thinrank.config import SamplingParams
from thinrank.engine.sampler import chosen_on_device, sample
from thinrank.engine.sequence import Sequence

VOCAB = 23


def sequence(prompt: list[int] = [1], output: list[int] = [], seed: int = 0, index: int = 0, **settings: Any):  # noqa: B006
    params = SamplingParams(max_tokens=2000, **settings)
    made = Sequence("r", index, list(prompt), params, frozenset([2]), 2000, seed)
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
    probs = (row[0] / settings.get("temperature", 1)).softmax(0)
    order = probs.argsort(descending=True)
    keep = torch.ones(VOCAB, dtype=torch.bool)
    if "top_k" in settings:
        keep = probs >= probs[order[3]]
    if "top_p" in settings:
        keep[order] = probs[order].cumsum(0) - probs[order] < 0.7
    if "min_p" in settings:
        keep = probs >= 0.1 * probs.max()
    probs = torch.where(keep, probs, 0.0) / probs[keep].sum()
    counts = Counter(tokens)
    for token in range(VOCAB):
        p = float(probs[token])
        assert counts[token] / n == pytest.approx(p, abs=5 * (p * (1 - p) / n) ** 0.5), token


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
        ({"min_tokens": 2}, True),  # two tokens are there
    ],
)
def test_what_the_device_can_choose(settings: dict[str, Any], expected: bool) -> None:
    assert chosen_on_device(sequence([1], [5, 6], **settings)) == expected
