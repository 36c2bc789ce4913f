"""The load of a serving benchmark: seeded random prompts, the times at which they are sent, and sending them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import asdict, dataclass
from math import inf, isfinite
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from ..errors import OptionError

T = TypeVar("T")
Result = TypeVar("Result")


@dataclass(frozen=True)
class RandomLoad:
    """Requests with random prompts; names are the options of `vllm bench serve`.

    random_input_len, random_output_len: tokens, give or take random_range_ratio of it. random_prefix_len: tokens before
    them that all prompts share. request_rate: requests a second in a Poisson process; infinite sends all at once, as
    max_concurrency allows. num_warmups: requests before, with prompts of their own.

    Raises OptionError for a value out of range.
    """

    random_input_len: int = 1024
    random_output_len: int = 128
    random_prefix_len: int = 0
    random_range_ratio: float = 0.0
    num_prompts: int = 1000
    request_rate: float = inf
    max_concurrency: int | None = None
    num_warmups: int = 1
    temperature: float = 0.0
    ignore_eos: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, valid, accepted in (
            ("random_input_len", self.random_input_len >= 1, "at least 1"),
            ("random_output_len", self.random_output_len >= 1, "at least 1"),
            ("random_prefix_len", self.random_prefix_len >= 0, "0 or more"),
            ("random_range_ratio", 0 <= self.random_range_ratio < 1, "0 or more, and less than 1"),
            ("num_prompts", self.num_prompts >= 1, "at least 1"),
            ("request_rate", self.request_rate > 0, "above 0, or inf"),
            ("max_concurrency", self.max_concurrency is None or self.max_concurrency >= 1, "at least 1"),
            ("num_warmups", self.num_warmups >= 0, "0 or more"),
            ("temperature", self.temperature >= 0, "0 or more"),
            ("seed", self.seed >= 0, "0 or more"),
        ):
            if not valid:
                raise OptionError(f"{name} is {getattr(self, name)}", f"it must be {accepted}")

    @property
    def max_len(self) -> int:
        """Tokens that a prompt and its output have together at most."""
        lengths = (self.random_input_len, self.random_output_len)
        return self.random_prefix_len + sum(self._bounds(length)[1] for length in lengths)

    def to_json(self) -> dict[str, Any]:
        """JSON has no infinity; vLLM writes a text."""
        rate = self.request_rate if isfinite(self.request_rate) else "inf"
        return asdict(self) | {"request_rate": rate}

    def prompts(self, token_ids: Sequence[int]) -> Iterator[tuple[list[int], int]]:
        """Prompts, each with how many tokens to generate; equal seeds give equal ones, without end.

        token_ids: what they are drawn from, each different one as often as the others.
        """
        random, vocabulary = np.random.default_rng(self.seed), np.unique(token_ids)
        prefix = random.choice(vocabulary, self.random_prefix_len).tolist()
        while True:
            input_len, output_len = (
                int(random.integers(*self._bounds(length), endpoint=True))
                for length in (self.random_input_len, self.random_output_len)
            )
            yield prefix + random.choice(vocabulary, input_len).tolist(), output_len

    def arrivals(self) -> list[float]:
        """Seconds after the first request at which each one is sent."""
        if self.request_rate == inf:
            return [0.0] * self.num_prompts
        gaps = np.random.default_rng(self.seed).exponential(1 / self.request_rate, self.num_prompts - 1)
        return [0.0, *np.cumsum(gaps).tolist()]

    def _bounds(self, length: int) -> tuple[int, int]:
        spread = self.random_range_ratio * length
        return max(1, round(length - spread)), round(length + spread)


async def send(
    samples: Sequence[T],
    arrivals: Sequence[float],
    max_concurrency: int | None,
    request: Callable[[T], Awaitable[Result]],
) -> list[Result]:
    """Make a request for every sample, so many seconds after now, but never more than `max_concurrency` at once.

    A request that has to wait for its turn begins when it gets it.
    """
    started = perf_counter()
    place: AbstractAsyncContextManager[object] = (
        nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    )

    async def one(sample: T, arrival: float) -> Result:
        await asyncio.sleep(arrival - (perf_counter() - started))
        async with place:
            return await request(sample)

    tasks = [asyncio.create_task(one(*each)) for each in zip(samples, arrivals, strict=True)]
    return await asyncio.gather(*tasks)
