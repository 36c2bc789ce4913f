"""Predictions against what was measured: every latency file of benchmarks/results, and gpt-fast's figures."""

import json
from pathlib import Path
from typing import Any

import pytest

from thinrank.bench.engine_system import MIN_OUTPUT
from thinrank.bench.latency import Workload
from thinrank.bench.shapes import SHAPES
from thinrank.errors import OptionError
from thinrank.planning import plan
from thinrank.planning.cards import find_card
from thinrank.planning.choice import RESERVED_MEMORY, Choice
from thinrank.planning.speed import MAX_BATCH_SIZE, QUANTIZED, TOLERANCE

#: Output tokens from which on the first step, which is the host's start as well, no longer counts.
STEADY_STEPS = 16
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
#: System -> the choice that predicts it. Ranks spread by a structure read the same bytes as uniform ones, but
#: their launches are of other sizes: `uniform` is what is planned.
PREDICTED = {"thinrank": "keep_ratio", "thinrank-dense": "dense 16-bit", "int4-dense": "dense 4-bit"}


def measured_rows() -> list[Any]:
    rows = []
    for path in sorted(RESULTS.glob("*.json")):
        report = json.loads(path.read_text())
        header = report.get("header", {}) if isinstance(report, dict) else {}
        if header.get("benchmark") != "latency" or header.get("dtype") not in ("bfloat16", "float16"):
            continue
        try:
            find_card(header["device"])
        except OptionError:
            continue  # a CPU, or a card that plan does not know
        for number, row in enumerate(report["rows"]):
            planned = row["system"] in PREDICTED and row["structure"] in ("uniform", "dense")
            steady = row["output_len"] >= STEADY_STEPS
            if planned and steady and row["shape"] in SHAPES and row["batch_size"] <= MAX_BATCH_SIZE:
                rows.append(pytest.param(header["device"], row, id=f"{path.stem}-{number}"))
    return rows


def predicted(device: str, row: dict[str, Any], context: int) -> Choice:
    keep_ratios = (row["keep_ratio"],) if row["keep_ratio"] < 1 else ()
    planned = plan(
        shape=row["shape"],
        gpu=device,
        context=context,
        batch_size=row["batch_size"],
        keep_ratios=keep_ratios,
    )
    if row["system"] == "thinrank" and keep_ratios:
        return planned.choices[0]
    name = "dense 16-bit" if row["system"] == "thinrank" else PREDICTED[row["system"]]
    return next(choice for choice in planned.choices if choice.name == name)


def test_there_is_evidence() -> None:
    systems = {parameter.values[1]["system"] for parameter in measured_rows()}
    assert {"thinrank", "thinrank-dense"} <= systems


@pytest.mark.parametrize(("device", "row"), measured_rows())
def test_time_and_bytes_of_a_measured_step(device: str, row: dict[str, Any]) -> None:
    work = Workload(row["batch_size"], row["input_len"], row["output_len"])
    choice = predicted(device, row, work.mean_context_len)
    assert choice.step_bytes == pytest.approx(row["bytes_per_step"], rel=0.01)
    assert choice.tpot_ms == pytest.approx(row["tpot_ms_p50"], rel=TOLERANCE)
    assert choice.floor_ms is not None
    assert choice.floor_ms < row["tpot_ms_p50"]


@pytest.mark.parametrize(("device", "row"), measured_rows())
def test_the_reserve_covers_what_was_used(device: str, row: dict[str, Any]) -> None:
    if row["system"] not in ("thinrank", "thinrank-dense"):
        pytest.skip("another runtime's memory")
    length = max(row["input_len"] + row["output_len"], row["input_len"] + MIN_OUTPUT)
    choice = predicted(device, row, length)
    assert row["peak_memory_bytes"] < choice.needed_bytes
    assert row["peak_memory_bytes"] > choice.needed_bytes - RESERVED_MEMORY


@pytest.mark.parametrize(
    ("card", "layers", "gigabytes", "milliseconds"),
    [
        # LLaMA-7B, int8 and int4 (group 128), 512 tokens of context, torch 2.11
        ("H200", 32, 6.61 + 0.27, 5.19),
        ("H200", 32, 3.51 + 0.27, 3.51),
        # gpt-fast's README: GB/s over tok/s are the bytes; Llama-2-7B and 70B, int8 and int4 (group 32)
        ("A100 80GB", 32, 1069.20 / 155.58, 1000 / 155.58),
        ("A100 80GB", 32, 862.69 / 196.80, 1000 / 196.80),
        ("A100 80GB", 80, 1322.58 / 19.13, 1000 / 19.13),
        ("A100 80GB", 80, 1097.66 / 25.25, 1000 / 25.25),
    ],
)
def test_quantised_steps_of_gpt_fast(card: str, layers: int, gigabytes: float, milliseconds: float) -> None:
    bandwidth = find_card(card).bandwidth
    assert bandwidth is not None
    step_ms = 1e3 * QUANTIZED.step_s(int(gigabytes * 1e9), layers, bandwidth)
    assert step_ms == pytest.approx(milliseconds, rel=TOLERANCE)
