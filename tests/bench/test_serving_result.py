"""Numbers from outcomes that are written down."""

import json

import pytest

from thinrank.bench.endpoint import Outcome
from thinrank.bench.serving_result import ServingResult, parse_goodput, summarize
from thinrank.errors import OptionError

#: What readers of vLLM's files rely on.
KEYS = {
    *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"),
    *("request_goodput", "output_throughput", "total_token_throughput", "max_concurrent_requests"),
    *("mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p50_ttft_ms", "p99.9_ttft_ms"),
    *("mean_tpot_ms", "mean_itl_ms", "mean_e2el_ms", "p99.9_e2el_ms"),
}


def outcome(start: float, times: list[float], output_len: int, **more: object) -> Outcome:
    fields = {"counted": True, "end": times[-1]} | more
    return Outcome(10, start, output_len, times=times, **fields)  # type: ignore[arg-type]


OUTCOMES = [
    outcome(100.0, [100.5, 101.0, 102.5], 5, cached_len=4),  # TTFT 0.5, TPOT 0.5, gaps 0.5 and 1.5
    outcome(101.0, [102.0], 1, cached_len=0),  # TTFT 1, no TPOT
    Outcome(10, 102.0, error="HTTP 429: busy"),
    Outcome(10, 102.1, error="HTTP 429: busy"),
    Outcome(10, 102.2, error="ReadError"),
    outcome(102.0, [102.0 + 0.1, 104.0], 3),  # TTFT 0.1, TPOT 0.95
]


def summary(**options: object) -> ServingResult:
    defaults = {
        "settings": {"model_id": "m"},
        "client_cpu": 1.0,
        "metrics": ("ttft", "tpot", "itl", "e2el"),
        "percentiles": (50.0, 99.9),
        "goodput": {},
    }
    return summarize(OUTCOMES, **(defaults | options))  # type: ignore[arg-type]


def test_counts_and_rates() -> None:
    result = summary()
    assert (result.duration, result.completed, result.failed) == (4.0, 3, 3)
    assert (result.total_input_tokens, result.total_output_tokens, result.total_cached_tokens) == (30, 9, 4)
    assert (result.request_throughput, result.output_throughput) == (3 / 4, 9 / 4)
    assert result.total_token_throughput == 39 / 4
    assert result.client_cpu_share == 0.25
    assert result.failures == {"HTTP 429: busy": 2, "ReadError": 1}
    assert next(iter(result.failures)) == "HTTP 429: busy"
    assert result.max_concurrent_requests == 2  # the last one starts when the second ends
    assert result.request_goodput is None


def test_statistics_in_milliseconds() -> None:
    statistics = summary().statistics
    assert statistics["ttft"].median == pytest.approx(500)
    assert statistics["ttft"].mean == pytest.approx(1600 / 3)
    assert statistics["ttft"].percentiles[50.0] == statistics["ttft"].median
    assert statistics["tpot"].mean == pytest.approx((500 + 950) / 2)
    assert statistics["tpot"].std == pytest.approx((950 - 500) / 2)
    assert statistics["itl"].mean == pytest.approx((500 + 1500 + 1900) / 3)
    assert statistics["e2el"].mean == pytest.approx((2500 + 1000 + 2000) / 3)


@pytest.mark.parametrize(
    ("goodput", "good"),
    [({"ttft": 500.0}, 2), ({"ttft": 99.0}, 0), ({"ttft": 1000.0, "tpot": 500.0}, 2), ({"e2el": 2000.0}, 2)],
    ids=str,
)
def test_goodput(goodput: dict[str, float], good: int) -> None:
    assert summary(goodput=goodput).request_goodput == pytest.approx(good / 4)


def test_json() -> None:
    plain = json.loads(json.dumps(summary().to_json(), allow_nan=False))
    assert set(plain) >= KEYS | {"model_id", "failures", "total_cached_tokens"} and "ttfts" not in plain
    detailed = summary().to_json(detailed=True)
    assert detailed["output_lens"] == [5, 1, 0, 0, 0, 3]
    assert detailed["ttfts"][2] is None and detailed["ttfts"][1] == 1.0
    assert detailed["itls"][0] == [0.5, 1.5] and detailed["errors"][4] == "ReadError"


def test_fewer_metrics() -> None:
    assert set(summary(metrics=("itl",)).statistics) == {"itl"}


def test_a_metric_that_no_request_has() -> None:
    result = summarize(
        [OUTCOMES[1]], settings={}, client_cpu=0, metrics=("tpot",), percentiles=(99.0,), goodput={}
    ).to_json()
    assert result["mean_tpot_ms"] is result["p99_tpot_ms"] is None


def test_limits_of_goodput() -> None:
    assert parse_goodput(["ttft:200", "tpot:50.5"]) == {"ttft": 200, "tpot": 50.5}
    with pytest.raises(OptionError, match="unknown goodput metric 'itl': known: e2el, tpot, ttft"):
        parse_goodput(["itl:3"])
    for text in ("ttft", "ttft:fast"):
        with pytest.raises(OptionError, match="give milliseconds"):
            parse_goodput([text])
