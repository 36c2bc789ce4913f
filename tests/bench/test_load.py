"""Prompts, the times at which they are sent, and how many at once."""

import asyncio
from itertools import islice
from math import inf
from time import perf_counter

import numpy as np
import pytest

from thinrank.bench.load import RandomLoad, send
from thinrank.errors import OptionError

IDS = [*range(100, 400), *range(100, 200)]


def drawn(load: RandomLoad, count: int = 20) -> list[tuple[list[int], int]]:
    return list(islice(load.prompts(IDS), count))


def test_prompts_have_their_lengths_and_share_their_prefix() -> None:
    load = RandomLoad(random_input_len=10, random_output_len=7, random_prefix_len=5)
    prompts = drawn(load)
    assert {(len(prompt), output_len) for prompt, output_len in prompts} == {(15, 7)} and load.max_len == 22
    assert len({tuple(prompt[:5]) for prompt, _ in prompts}) == 1
    assert len({tuple(prompt[5:]) for prompt, _ in prompts}) == 20
    assert {token for prompt, _ in prompts for token in prompt} <= set(IDS)


def test_equal_seeds_give_equal_prompts() -> None:
    assert drawn(RandomLoad(seed=1)) == drawn(RandomLoad(seed=1)) != drawn(RandomLoad(seed=2))


def test_lengths_vary() -> None:
    load = RandomLoad(random_input_len=10, random_output_len=1, random_range_ratio=0.5)
    prompts = drawn(load, 200)
    assert {len(prompt) for prompt, _ in prompts} == set(range(5, 16))
    assert {output_len for _, output_len in prompts} == {1, 2} and load.max_len == 17


def test_arrivals_are_a_poisson_process() -> None:
    """Gaps of a mean of 1/rate, and a standard deviation as large; 4 % is four standard errors of 10,000."""
    assert RandomLoad(num_prompts=3).arrivals() == [0, 0, 0]
    times = RandomLoad(num_prompts=10001, request_rate=50).arrivals()
    gaps = np.diff(times)
    assert times[0] == 0 and (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(0.02, rel=0.04) and gaps.std() == pytest.approx(0.02, rel=0.04)


@pytest.mark.parametrize("limit", [1, 3, None])
def test_no_more_than_max_concurrency_at_once(limit: int | None) -> None:
    running = most = 0

    async def request(sample: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return sample

    assert asyncio.run(send(range(10), [0.0] * 10, limit, request)) == list(range(10))
    assert most == (limit or 10)


def test_requests_wait_for_their_time() -> None:
    started = perf_counter()

    async def request(sample: int) -> float:
        return perf_counter() - started

    times = asyncio.run(send(range(3), [0.0, 0.02, 0.05], None, request))
    assert times[1] >= 0.02 and times[2] >= 0.05


@pytest.mark.parametrize(
    "options",
    [
        {"random_input_len": 0},
        {"random_output_len": 0},
        {"random_prefix_len": -1},
        {"random_range_ratio": 1.0},
        {"num_prompts": 0},
        {"request_rate": 0.0},
        {"request_rate": float("nan")},
        {"max_concurrency": 0},
        {"num_warmups": -1},
        {"temperature": -0.1},
        {"seed": -1},
    ],
    ids=str,
)
def test_values_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        RandomLoad(**options)  # type: ignore[arg-type]


def test_json_has_no_infinity() -> None:
    assert RandomLoad().to_json()["request_rate"] == "inf"
    assert RandomLoad(request_rate=2.5).to_json()["request_rate"] == 2.5
    assert RandomLoad().request_rate == inf
