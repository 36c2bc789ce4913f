"""What is explained is what a step asks for, launch by launch; every mix of modules."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from thinrank.bench.shapes import random_model
from thinrank.bench.step_timer import Recorder
from thinrank.engine.kv_cache import allocate_kv_cache
from thinrank.kernels.tuning import OPS, GemvConfig, Launch, LaunchSettings
from thinrank.model.explain import describe_prefill, describe_step, ranges
from thinrank.model.packed_decoder import PackedDecoder

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def packed(structure):
    """Three layers."""
    model = random_model("tiny", structure, 0.5, torch.float32, DEVICE, 0)
    decoder = PackedDecoder.build(model.config, model.get, model.dtype, DEVICE, 256)
    return replace(decoder, launch_settings=LaunchSettings())


@pytest.mark.parametrize("structure", ["uniform", "hetero", "mixed", "shared2", "dense"])
def test_it_is_what_a_step_asks_for(structure):
    decoder = packed(structure)
    recorder = Recorder()
    recording = replace(decoder, launch_settings=recorder)
    cache = allocate_kv_cache(decoder.config, 2, decoder.dtype, DEVICE)
    recording.decode_step(recording.decode_state(1, 1, idle_block=0), cache)

    _, *layers, head, _ = describe_step(decoder)
    assert sorted(index for group in layers for index in group.layers) == [0, 1, 2]
    of_layer = {index: group.launches for group in layers for index in group.layers}
    described = [launch for index in range(3) for launch in of_layer[index]] + list(head.launches)
    assert [(launch.op, launch.settings) for launch in described if launch.op in OPS] == [
        (launch.op, str(decoder.launch_settings.config(launch))) for launch in recorder.launches
    ]


def test_layers_that_launch_the_same_are_one_group():
    assert [group.name for group in describe_step(packed("uniform"))] == [
        "start",
        "layers 0-2",
        "head",
        "more than 8 rows",
    ]
    names = [group.name for group in describe_step(packed("hetero"))]
    assert names == ["start", "layer 0", "layer 1", "layer 2", "head", "more than 8 rows"]


def test_shapes_and_sources():
    """tiny: hidden_size 128, 4 heads and 2 kv heads of 64, intermediate_size 256, 192 tokens; ranks 42, 32 and 42."""
    decoder = packed("uniform")
    table = LaunchSettings({Launch("project", 42, 256): GemvConfig(1, 2, 8, 4)}, "table.json")
    _, layer, head, wide = describe_step(replace(decoder, launch_settings=table))
    lines = [(launch.op, launch.shape, launch.source) for launch in layer.launches]
    assert lines == [
        ("norm_project", "42 x 128 + 32 x 128 + 32 x 128", "rule"),
        ("project_rope", "256 x 64 + 128 x 64 + 128 x 64", "rule"),
        ("decode_attention", "4 heads, 2 kv heads of 64", "rule"),
        ("project", "42 x 256", "table"),
        ("project_residual", "128 x 64", "rule"),
        ("norm_project", "42 x 128 + 42 x 128", "rule"),
        ("project_silu_mul", "256 x 64 + 256 x 64", "rule"),
        ("project", "42 x 256", "table"),
        ("project_residual", "128 x 64", "rule"),
    ]
    assert layer.launches[3].settings == "1 warp, 2 ahead, 8 rows, 4 splits"
    assert [launch.op for launch in head.launches] == ["norm_project", "greedy", "sample"]
    # Twice 132 programs of four warps fill a card: four times that over 2 kv heads and 16, 32 or 64 rows.
    assert [(launch.op, launch.shape, launch.settings) for launch in wide.launches] == [
        ("GEMMs", "projections, as in prefill", ""),
        ("decode_attention", "4 heads, 2 kv heads of 64, 16 rows", "4 warps, 33 splits, units of 16"),
        ("decode_attention", "4 heads, 2 kv heads of 64, 32 rows", "4 warps, 16 splits, units of 16"),
        ("decode_attention", "4 heads, 2 kv heads of 64, 64 rows", "4 warps, 8 splits, units of 16"),
    ]


def test_a_window_and_prefill():
    decoder = packed("dense")
    layers = tuple(replace(layer, sliding_window=40) for layer in decoder.layers)
    _, layer, *_ = describe_step(replace(decoder, layers=layers))
    assert [launch.shape for launch in layer.launches if "heads" in launch.shape] == [
        "4 heads, 2 kv heads of 64, window 40"
    ]
    assert "by prefill_attention (32 queries, 8 warps, 1 stages)" in describe_prefill(decoder)


def test_ranges():
    assert [ranges(numbers) for numbers in ([3], [0, 1, 2, 5], [1, 3, 4], [])] == [
        "3",
        "0-2, 5",
        "1, 3-4",
        "",
    ]
