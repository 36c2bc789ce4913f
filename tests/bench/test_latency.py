"""The report: its rows, its file, and the gate before it."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from thinrank.bench import gate, timing
from thinrank.bench.gate import Check, check_system
from thinrank.bench.latency import LatencyRow, latency
from thinrank.bench.shapes import BenchModel, fast_decoder, random_model
from thinrank.bench.timing import Nvml, Percentiles, energy, read_bandwidth
from thinrank.errors import OptionError, OutputError, ThinrankError
from thinrank.model.cost import decode_step_bytes

CPU = torch.device("cpu")
#: What readers of the file rely on.
ROW_KEYS = [
    "system",
    "shape",
    "structure",
    "keep_ratio",
    "batch_size",
    "input_len",
    "output_len",
    "temperature",
    "graph",
    "ttft_ms",
    "tpot_ms_p20",
    "tpot_ms_p50",
    "tpot_ms_p80",
    "launches_per_token",
    "bytes_per_step",
    "mbu",
    "load_s",
    "warmup_s",
    "peak_memory_bytes",
    "joules_per_token",
]


@pytest.fixture(autouse=True)
def small_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(timing.BANDWIDTH_BYTES, "cpu", 2**20)


def tiny(dtype: torch.dtype = torch.float32, structure: str = "uniform") -> BenchModel:
    return random_model("tiny", structure, 0.5, dtype, CPU, 0)


def test_rows_header_and_file(tmp_path: Path) -> None:
    told: list[str] = []
    file = tmp_path / "latency.json"
    report = latency(
        shape="tiny",
        structure="hetero",
        input_len=8,
        output_len=4,
        batch_size=2,
        num_iters=2,
        num_iters_warmup=1,
        baseline=["densekv", "thinrank-dense"],
        device="cpu",
        output_json=file,
        command="thinrank bench latency",
        on_progress=told.append,
    )
    assert [field.name for field in fields(LatencyRow)] == ROW_KEYS
    assert [row.system for row in report.rows] == ["thinrank", "thinrank-dense", "densekv"]
    assert json.loads(file.read_text()) == json.loads(json.dumps(report.to_json(), allow_nan=False))
    low_rank, dense, _ = report.rows
    assert (low_rank.structure, low_rank.keep_ratio) == ("hetero", 0.5)
    assert (dense.structure, dense.keep_ratio) == ("dense", 1.0)
    config = random_model("tiny", "hetero", 0.5, torch.bfloat16, CPU, 0).config
    # steps attend to 9, 10 and 11 tokens
    assert low_rank.bytes_per_step == decode_step_bytes(config, 2, [10, 10])
    for row in report.rows:
        assert 0 < row.tpot_ms_p20 <= row.tpot_ms_p50 <= row.tpot_ms_p80
        bandwidth = report.header["read_bandwidth_bytes_per_s"]
        assert row.mbu == pytest.approx(row.bytes_per_step / row.tpot_ms_p50 * 1e3 / bandwidth)
        assert row.graph is row.launches_per_token is row.peak_memory_bytes is row.joules_per_token is None
    for key in ("device", "driver", "torch", "triton", "transformers", "commit", "command", "date"):
        assert key in report.header
    assert told[0] == "checking thinrank" and told[-1] == "measuring densekv"
    assert {check.system for check in report.checks} == {"thinrank", "thinrank-dense"}


def test_ours_sample_and_baselines_are_greedy() -> None:
    report = latency(
        shape="tiny",
        input_len=8,
        output_len=3,
        temperature=0.7,
        num_iters=1,
        num_iters_warmup=0,
        baseline=["densekv", "thinrank-dense"],
        device="cpu",
    )
    assert {row.system: row.temperature for row in report.rows} == {
        "thinrank": 0.7,
        "thinrank-dense": 0.7,
        "densekv": 0.0,
    }


def test_verify_measures_nothing() -> None:
    report = latency(shape="tiny", device="cpu", verify=True, baseline=[])
    assert report.rows == ()
    assert [check.check for check in report.checks] == ["prefill logits", "decode logits", "greedy choices"]
    assert all(check.passed for check in report.checks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("structure", ["uniform", "hetero", "shared2", "mixed", "dense"])
def test_the_gate_lets_the_right_model_pass(dtype: torch.dtype, structure: str) -> None:
    assert all(check.passed for check in check_system("thinrank", tiny(dtype, structure), batch_size=3))


def broken_norm(model: BenchModel):
    decoder = fast_decoder(model)
    return replace(decoder, norm=decoder.norm.roll(1))


def broken_factor(model: BenchModel):
    """One module of one layer reads another's latent."""
    decoder = fast_decoder(model)
    layer = decoder.layers[1]
    up_proj = replace(layer.up_proj, factor_in=layer.up_proj.factor_in.roll(1, 0))
    return replace(decoder, layers=(decoder.layers[0], replace(layer, up_proj=up_proj), *decoder.layers[2:]))


def undefined(model: BenchModel):
    decoder = fast_decoder(model)
    return replace(decoder, norm=decoder.norm * float("nan"))


@pytest.mark.parametrize("broken", [broken_norm, broken_factor, undefined])
def test_the_gate_stops_a_broken_decoder(broken, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gate, "fast_decoder", broken)
    with pytest.raises(ThinrankError, match=r"thinrank is wrong: its .* differ|infinite or undefined"):
        latency(shape="tiny", device="cpu", baseline=[], output_json=tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()


def test_the_gate_sees_a_wrong_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode alone is wrong: prefill without a cache is right."""
    from thinrank.kernels import reference as ops

    write_kv = ops.write_kv

    def forgetful(k, v, key_cache, value_cache, slots) -> None:
        write_kv(k, v * (slots % 8 != 0)[:, None, None], key_cache, value_cache, slots)

    monkeypatch.setattr(ops, "write_kv", forgetful)
    with pytest.raises(ThinrankError, match="decode logits"):
        check_system("thinrank", tiny(torch.bfloat16), 1)


def test_undefined_numbers_never_pass() -> None:
    assert not Check("thinrank", "prefill logits", float("nan"), 1.0).passed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "there is no model"),
        ({"shape": "tiny", "model": "x"}, "both MODEL and --shape"),
        ({"shape": "tiny", "output_len": 1}, "output_len is 1: it must be at least 2"),
        ({"shape": "tiny", "input_len": 0}, "input_len is 0"),
        ({"shape": "tiny", "batch_size": 0}, "batch_size is 0"),
        ({"shape": "tiny", "num_iters": 0}, "num_iters is 0"),
        ({"shape": "tiny", "num_iters_warmup": -1}, "num_iters_warmup is -1"),
        ({"shape": "tiny", "seed": -1}, "seed is -1"),
        ({"shape": "tiny", "temperature": -0.5}, "temperature is -0.5"),
        ({"shape": "tiny", "input_len": 32768}, "32800 tokens together"),
        ({"shape": "tiny", "dtype": "int3"}, "unknown dtype 'int3'"),
    ],
)
def test_options_out_of_range(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        latency(**{"device": "cpu", **options})


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot write"):
        latency(shape="tiny", device="cpu", output_json=tmp_path / "no" / "out.json")


def test_percentiles() -> None:
    assert Percentiles.of([4, 1, 2, 3, 5, 6]) == Percentiles(2, 3.5, 5)


def test_bandwidth_is_plausible() -> None:
    assert 1e8 < read_bandwidth(CPU) < 1e13


def test_without_nvml_there_is_no_energy() -> None:
    nvml = Nvml(CPU)
    assert nvml.driver() is None and nvml.joules() is None
    assert energy(lambda: None, nvml) is None


def test_energy_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Nvml(CPU)
    readings = iter([10.0, 16.0])
    monkeypatch.setattr(meter, "joules", lambda: next(readings))
    used = energy(lambda: None, meter, seconds=1e-3)
    assert used is not None
    assert used[0] == 6.0 and used[1] >= 1
