"""From what became of each request to the numbers of a serving benchmark, under the keys of `vllm bench serve`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import OptionError, unknown_name

if TYPE_CHECKING:
    from .endpoint import Outcome

#: Metrics that have percentiles, and those of them that a goodput may set limits to.
METRICS = ("ttft", "tpot", "itl", "e2el")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class Statistics:
    """Of one metric in milliseconds. percentiles: by number. None if no request has the metric."""

    mean: float | None
    median: float | None
    std: float | None
    percentiles: Mapping[float, float | None]

    @staticmethod
    def of(seconds: Sequence[float], percentiles: Sequence[float]) -> Statistics:
        if not seconds:
            return Statistics(None, None, None, dict.fromkeys(percentiles))
        values = 1e3 * np.asarray(seconds)
        return Statistics(
            float(values.mean()),
            float(np.median(values)),
            float(values.std()),
            {number: float(np.percentile(values, number)) for number in percentiles},
        )


@dataclass(frozen=True)
class ServingResult:
    """settings: what was asked for, and where. duration: seconds from the first request to the last event.

    request_goodput: requests a second that were within every limit; None without limits. total_cached_tokens: prompt
    tokens that the server's prefix cache had; None if it does not say. max_concurrent_requests: at any moment.
    client_cpu_share: processor time of this process in the duration; near 1, the client is what was measured.
    statistics: by metric. failures: reason -> requests. outcomes: in the order in which the requests were drawn.
    """

    settings: Mapping[str, Any]
    duration: float
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    total_cached_tokens: int | None
    counted: bool
    request_goodput: float | None
    max_concurrent_requests: int
    client_cpu_share: float
    statistics: Mapping[str, Statistics]
    failures: Mapping[str, int]
    outcomes: Sequence[Outcome]

    @property
    def request_throughput(self) -> float:
        return self.completed / self.duration

    @property
    def output_throughput(self) -> float:
        return self.total_output_tokens / self.duration

    @property
    def total_token_throughput(self) -> float:
        return (self.total_input_tokens + self.total_output_tokens) / self.duration

    def to_json(self, detailed: bool = False) -> dict[str, Any]:
        """detailed: also lists with an entry a request, seconds, under vLLM's keys."""
        plain = (
            "duration completed failed total_input_tokens total_output_tokens request_throughput request_goodput "
            "output_throughput total_token_throughput max_concurrent_requests total_cached_tokens client_cpu_share"
        )
        result = {**self.settings, **{name: getattr(self, name) for name in plain.split()}}
        for metric, values in self.statistics.items():
            result |= {f"{name}_{metric}_ms": getattr(values, name) for name in ("mean", "median", "std")}
            result |= {f"p{number:g}_{metric}_ms": value for number, value in values.percentiles.items()}
        result["failures"] = dict(self.failures)
        if detailed:
            outcomes = self.outcomes
            result["input_lens"] = [outcome.prompt_len for outcome in outcomes]
            result["output_lens"] = [outcome.output_len for outcome in outcomes]
            result["start_times"] = [outcome.start for outcome in outcomes]
            result["ttfts"] = [_ttft(outcome) if outcome.error is None else None for outcome in outcomes]
            result["itls"] = [_itls(outcome) for outcome in outcomes]
            result["errors"] = [outcome.error or "" for outcome in outcomes]
        return result


def summarize(
    outcomes: Sequence[Outcome],
    *,
    settings: Mapping[str, Any],
    client_cpu: float,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput: Mapping[str, float],
) -> ServingResult:
    """client_cpu: seconds of processor time. goodput: limits in milliseconds. At least one request has completed."""
    done = [outcome for outcome in outcomes if outcome.error is None]
    begin, end = min(outcome.start for outcome in outcomes), max(outcome.end for outcome in done)
    duration = end - begin
    values = {
        "ttft": [_ttft(outcome) for outcome in done],
        "tpot": [_tpot(outcome) for outcome in done if outcome.output_len > 1],
        "itl": [gap for outcome in done for gap in _itls(outcome)],
        "e2el": [outcome.end - outcome.start for outcome in done],
    }
    cached = [outcome.cached_len for outcome in done if outcome.cached_len is not None]
    return ServingResult(
        settings=settings,
        duration=duration,
        completed=len(done),
        failed=len(outcomes) - len(done),
        total_input_tokens=sum(outcome.prompt_len for outcome in done),
        total_output_tokens=sum(outcome.output_len for outcome in done),
        total_cached_tokens=sum(cached) if cached else None,
        counted=all(outcome.counted for outcome in done),
        request_goodput=sum(_is_good(outcome, goodput) for outcome in done) / duration if goodput else None,
        max_concurrent_requests=_most_at_once(done),
        client_cpu_share=client_cpu / duration,
        statistics={metric: Statistics.of(values[metric], percentiles) for metric in metrics},
        failures=dict(
            Counter(outcome.error for outcome in outcomes if outcome.error is not None).most_common()
        ),
        outcomes=outcomes,
    )


def parse_goodput(limits: Sequence[str]) -> dict[str, float]:
    """Milliseconds by metric, of "ttft:200" each. Raises OptionError."""
    parsed = {}
    for limit in limits:
        name, _, value = limit.partition(":")
        if name not in GOODPUT_METRICS:
            raise unknown_name("goodput metric", name, list(GOODPUT_METRICS))
        try:
            parsed[name] = float(value)
        except ValueError as error:
            raise OptionError(f"goodput is {limit!r}", "give milliseconds, such as ttft:200") from error
    return parsed


def _ttft(outcome: Outcome) -> float:
    return outcome.times[0] - outcome.start


def _tpot(outcome: Outcome) -> float:
    """Seconds a token after the first; 0 if there is none."""
    return (
        (outcome.times[-1] - outcome.times[0]) / (outcome.output_len - 1) if outcome.output_len > 1 else 0.0
    )


def _itls(outcome: Outcome) -> list[float]:
    return [after - before for before, after in pairwise(outcome.times)]


def _is_good(outcome: Outcome, goodput: Mapping[str, float]) -> bool:
    seconds = {"ttft": _ttft(outcome), "tpot": _tpot(outcome), "e2el": outcome.end - outcome.start}
    return all(1e3 * seconds[name] <= limit for name, limit in goodput.items())


def _most_at_once(outcomes: Sequence[Outcome]) -> int:
    # At equal times an end comes first: its place was free.
    changes = sorted([(o.start, 1) for o in outcomes] + [(o.end, -1) for o in outcomes])
    return int(np.cumsum([change for _, change in changes]).max())
