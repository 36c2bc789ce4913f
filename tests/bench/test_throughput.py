"""Many streams in one engine: rows, and what they are made of."""

import json
from typing import Any

import pytest

from thinrank.bench import timing
from thinrank.bench.report import Report
from thinrank.bench.throughput import ThroughputRow, _Timeline, throughput
from thinrank.errors import OptionError

TINY: dict[str, Any] = {
    "shape": "tiny",
    "device": "cpu",
    "dtype": "float32",
    "num_iters": 1,
    "num_iters_warmup": 0,
}


@pytest.fixture(autouse=True)
def small_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(timing.BANDWIDTH_BYTES, "cpu", 2**20)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report[ThroughputRow]:
    file = tmp_path_factory.mktemp("throughput") / "out.json"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(timing.BANDWIDTH_BYTES, "cpu", 2**20)
        report = throughput(
            streams=(1, 3), input_len=70, output_len=8, prefix_len=256, output_json=file, **TINY
        )
    assert json.loads(file.read_text()) == json.loads(json.dumps(report.to_json(), allow_nan=False))
    return report


def test_rows(report: Report[ThroughputRow]) -> None:
    systems = {"thinrank": 0.5, "thinrank-dense": 1.0}
    assert [
        (row.system, row.streams, row.input_len, row.output_len, row.cached_len) for row in report.rows
    ] == [
        (system, *sizes)
        for system in systems
        for sizes in [(1, 70, 8, 0), (3, 70, 8, 0), (1, 256, 1, 0), (1, 256, 1, 192)]
    ]
    for row in report.rows:
        assert row.keep_ratio == systems[row.system] and row.ttft_ms > 0
        of_streams = (row.tpot_ms, row.itl_ms_p99, row.decode_tokens_per_s, row.output_tokens_per_s)
        assert all(
            (value is not None and value > 0) if row.output_len > 1 else value is None for value in of_streams
        )
    assert report.header["benchmark"] == "throughput"
    assert {check.system for check in report.checks} == {
        f"{system} x{streams}" for system in systems for streams in (1, 3)
    }


def test_times() -> None:
    """Two streams, one of which begins when the other has two tokens: both decode from 2 to 5 s."""
    run = _Timeline([[1.0, 2.0, 3.0, 5.0], [2.0, 3.0, 5.0, 6.0]], 0)
    assert run.first == [1.0, 2.0]
    assert run.per_token == [4 / 3, 4 / 3]
    assert run.gaps == [1, 1, 2, 1, 2, 1]
    assert run.decode_rate == 4 / 3
    assert run.output_rate == 8 / 6
    assert _Timeline([[1.0, 2.0], [2.0, 3.0]], 0).decode_rate is None


def test_a_dense_model_alone() -> None:
    report = throughput(structure="dense", streams=(2,), input_len=4, output_len=2, prefix_len=0, **TINY)
    assert [(row.system, row.structure) for row in report.rows] == [("thinrank", "dense")]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"streams": ()}, "there is no number of streams"),
        ({"streams": (0,)}, "streams is 0"),
        ({"output_len": 1}, "output_len is 1: it must be at least 2"),
        ({"prefix_len": 100}, "prefix_len is 100: it must be at least 128"),
        ({"input_len": 40000}, "a request has up to 40128 tokens"),
        ({"num_iters": 0}, "num_iters is 0"),
    ],
    ids=str,
)
def test_mistakes(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(OptionError, match=expected):
        throughput(**TINY | options)
