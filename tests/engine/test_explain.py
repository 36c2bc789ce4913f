"""What an engine says of itself."""

import re
from dataclasses import replace

import pytest
import torch

from thinrank.bench.shapes import plain_decoder, random_model
from thinrank.config import EngineConfig
from thinrank.engine.engine import Engine
from thinrank.engine.explain import explain
from thinrank.kernels.tuning import GemvConfig, Launch, LaunchSettings

CPU = torch.device("cpu")
MODEL = random_model("tiny", "uniform", 0.5, torch.float32, CPU, 0)


def test_the_reference_decoder():
    block_bytes = 3 * 2 * 2 * 64 * 4 * 64  # layers, keys and values, kv heads, head_dim, bytes, tokens
    engine = Engine(plain_decoder(MODEL), EngineConfig(5 * block_bytes, max_model_len=256))
    explanation = explain(engine)
    assert (explanation.decoder, explanation.graphs, explanation.groups) == ("reference", (), ())
    assert explanation.lines() == [
        "decoder    reference: the kernels of the packed decoder need an NVIDIA GPU",
        "device     cpu, float32",
        "KV cache   5 blocks of 64 tokens; up to 256 tokens a sequence",
        "graphs     none",
        "prefill    PyTorch's operations, as decode",
    ]


def test_the_packed_decoder():
    pytest.importorskip("triton")
    from thinrank.model.packed_decoder import PackedDecoder

    decoder = PackedDecoder.build(MODEL.config, MODEL.get, MODEL.dtype, CPU, 256)
    table = LaunchSettings({Launch("project", 42, 256): GemvConfig(1, 2, 8, 4)}, "/some/table.json")
    engine = Engine(replace(decoder, launch_settings=table, pdl=True), EngineConfig(max_model_len=256))
    explanation = explain(engine)
    assert explanation.pdl and explanation.table == "/some/table.json"
    lines = explanation.lines()
    assert lines[0] == "decoder    packed: the device is cpu"
    assert "launch     programmatic dependent launch on" in lines
    assert "table      /some/table.json" in lines
    layer = lines.index("layers 0-2")
    cells = ["project", "42 x 256", "1 warp, 2 ahead, 8 rows, 4 splits", "table"]
    assert re.split(" {2,}", lines[layer + 4].strip()) == cells
    assert {line.rindex("  ") for line in lines[layer + 1 : layer + 10]} == {lines[layer + 4].rindex("  ")}
    sample = lines[lines.index("more than 8 rows") - 1]
    assert re.split(" {2,}", sample.strip()) == [
        "sample",
        "in a graph of its own, when a row has a temperature",
    ]


@pytest.mark.gpu
def test_on_a_gpu():
    model = random_model("tiny", "uniform", 0.5, torch.bfloat16, torch.device("cuda"), 0)
    from thinrank.bench.shapes import fast_decoder

    explanation = explain(Engine(fast_decoder(model), EngineConfig(max_model_len=256, max_num_seqs=3)))
    assert (explanation.decoder, explanation.reason) == ("packed", "the device is cuda")
    assert explanation.graphs == (1, 2, 4)
    assert explanation.prompt_graphs == (64, 128, 256)
    sizes = "a decode step at batch 1, 2, 4; prompts of up to 64, 128, 256 tokens"
    assert f"graphs     {sizes}" in explanation.lines()
    assert explanation.device == torch.cuda.get_device_name()
