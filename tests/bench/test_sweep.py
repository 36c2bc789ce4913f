"""The sweep: its rows, its sequence, its mistakes."""

from dataclasses import fields

import pytest
import torch

from thinrank.bench.shapes import random_model
from thinrank.bench.sweep import ROOM, SweepRow, filled_sequence, sweep, with_positions
from thinrank.engine.kv_cache import blocks_for
from thinrank.errors import OptionError

CPU = torch.device("cpu")


def test_what_readers_rely_on() -> None:
    assert [field.name for field in fields(SweepRow)] == [
        "keep_ratio",
        "structure",
        "input_len",
        "ttft_ms",
        "context_len",
        "tpot_ms_p20",
        "tpot_ms_p50",
        "tpot_ms_p80",
        "bytes_per_step",
        "mbu",
    ]


def test_more_positions_than_the_shape_has() -> None:
    model = random_model("tiny", "uniform", 0.5, torch.float32, CPU, 0)
    assert with_positions(model, 40000).config.max_position_embeddings == 40000
    assert with_positions(model, 10).config == model.config


def test_the_sequence_fits_its_blocks() -> None:
    """The step that the last one of a window starts ahead writes the last token that has room."""
    sequence = filled_sequence(64, blocks_for(64 + ROOM))
    assert sequence.num_pending == 64 and sequence.block_table == [0, 1, 2]
    assert sequence.max_len == 64 + ROOM


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": "gpt-2"}, "unknown shape 'gpt-2'"),
        ({"structure": "odd"}, "unknown structure 'odd'"),
        ({"keep_ratios": [0.5, 2]}, "keep_ratio is 2"),
        ({"keep_ratios": []}, "there is no keep_ratio"),
        ({"input_lens": [8, 0]}, "input_len is 0"),
        ({"context_lens": [-1]}, "context_len is -1"),
        ({"num_iters": 0}, "num_iters is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"dtype": "int3"}, "unknown dtype 'int3'"),
        ({}, "bench sweep measures GPU kernels and CUDA graphs, and the device is cpu"),
    ],
)
def test_options_out_of_range(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        sweep(**{"shape": "tiny", "device": "cpu", **options})


@pytest.mark.gpu
def test_a_report(tmp_path) -> None:
    file = tmp_path / "sweep.json"
    report = sweep(
        "tiny",
        keep_ratios=[0.5, 1],
        input_lens=[20],
        context_lens=[100, 33000],  # beyond the shape's positions
        num_iters=2,
        num_iters_warmup=1,
        output_json=file,
    )
    assert file.exists()
    assert [(row.keep_ratio, row.structure) for row in report.rows] == [(0.5, "uniform")] * 3 + [
        (1, "dense")
    ] * 3
    assert [(row.input_len, row.context_len) for row in report.rows[:3]] == [
        (20, None),
        (None, 100),
        (None, 33000),
    ]
    for row in report.rows:
        if row.input_len is not None:
            assert row.ttft_ms > 0 and row.mbu is None
        else:
            assert 0 < row.tpot_ms_p20 <= row.tpot_ms_p50 <= row.tpot_ms_p80
            assert row.bytes_per_step > 0 and 0 < row.mbu < 1
