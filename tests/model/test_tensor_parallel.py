"""What a process keeps, reads and sends, by hand and against the whole. A running vLLM is compared with it in
tests/vllm_plugin."""

from dataclasses import replace
from math import prod

import pytest

from thinrank.bench.shapes import SHAPES, STRUCTURES
from thinrank.config import ModelConfig
from thinrank.errors import OptionError
from thinrank.model import cost
from thinrank.model.registry import parse_config
from thinrank.model.tensor_parallel import WHOLE, Layout, share
from tiny_low_rank_models import MODELS

LAYOUTS = {
    "whole": WHOLE,
    "latents": Layout(True),
    "outputs": Layout(False, True),
    "both": Layout(True, True),
}


def shape(name: str, structure: str = "dense", keep_ratio: float = 0.5) -> ModelConfig:
    dense = parse_config(SHAPES[name])
    ranks, ties = STRUCTURES[structure](dense, keep_ratio, 0)
    return replace(dense, ranks=ranks, tied_factors=ties)


def tiny(name: str) -> ModelConfig:
    config, ranks, ties = MODELS[name]
    return parse_config(config, ranks=ranks, tied_factors=ties)


def test_a_tiny_model_by_hand() -> None:
    """hidden 128, MLP 256, 4 heads and 2 KV heads of 64, 3 layers, vocabulary 192. At keep_ratio 0.5 ranks are 42,
    padded to 48, and 32 for k and v, which are square."""
    half = share(shape("tiny", "uniform"), size=2, itemsize=2)
    factor_in = 128 * (48 + 32 + 32) + 128 * 48 + 128 * (48 + 48) + 128 * 48  # o, down: half of 256 inputs
    factor_out = (128 * 48 + 64 * 32 + 64 * 32) + 128 * 48 + (128 * 48 + 128 * 48) + 128 * 48
    norms, table = 7 * 128, 96 * 128
    assert half.step_bytes == 2 * (3 * (factor_in + factor_out) + norms + table)
    assert half.weight_bytes == half.step_bytes + 2 * table
    # embedding, o and down of each layer are added up; logits are gathered
    assert half.sent_bytes == 2 * (128 + 3 * (48 + 48)) + 192
    assert half.exchanges == 1 + 2 * 3 + 1

    both = share(shape("tiny", "uniform"), 2, 2, Layout(True, True))
    # Half of each rank is 21, 16, 21, ..., padded to 24 and 16.
    factor_in = 128 * (24 + 16 + 16) + 128 * 48 + 128 * (24 + 24) + 128 * 48
    factor_out = (128 * 48 + 64 * 32 + 64 * 32) + 64 * 48 + (128 * 48 + 128 * 48) + 64 * 48
    assert both.step_bytes == 2 * (3 * (factor_in + factor_out) + norms + table)
    gathered = (48 + 32 + 32) + 128 + (48 + 48) + 128
    assert both.sent_bytes == half.sent_bytes + 3 * gathered
    assert both.exchanges == half.exchanges + 4 * 3


@pytest.mark.parametrize("name", SHAPES)
def test_one_process_has_the_whole_model(name: str) -> None:
    """Dense, so that no rank is padded; vLLM pads these vocabularies to themselves."""
    config = shape(name)
    whole = share(config, 1, 2)
    assert whole.weight_bytes == cost.weight_bytes(config, 2)
    assert whole.step_bytes == cost.decode_step_bytes(config, 2)
    assert (whole.sent_bytes, whole.exchanges) == (0, 0)
    for quantization in (cost.INT8, cost.INT4):
        whole = share(config, 1, 2, quantization=quantization)
        assert whole.weight_bytes == cost.quantized_weight_bytes(config, 2, quantization)
        assert whole.step_bytes == cost.quantized_step_bytes(config, 2, quantization)


@pytest.mark.parametrize("name", ["llama-7b", "llama3-8b", "qwen2.5-7b"])
@pytest.mark.parametrize("size", [2, 4])
def test_all_of_a_dense_model_is_divided_but_norms_and_biases(name: str, size: int) -> None:
    config = shape(name)
    vectors = sum(prod(extent) for tensor, extent in config.other_tensors().items() if "embed" not in tensor)
    linears = config.linears().values()
    vectors += sum(linear.out_features for linear in linears if linear.bias)
    excess = size * share(config, size, 2).weight_bytes - cost.weight_bytes(config, 2)
    assert 0 <= excess <= 2 * (size - 1) * vectors


@pytest.mark.parametrize("name", MODELS)
def test_dividing_more_reads_less_and_exchanges_more(name: str) -> None:
    config = tiny(name)
    parts = {layout: share(config, 4, 4, kind) for layout, kind in LAYOUTS.items()}
    assert parts["both"].step_bytes <= min(parts["latents"].step_bytes, parts["outputs"].step_bytes)
    assert max(parts["latents"].step_bytes, parts["outputs"].step_bytes) <= parts["whole"].step_bytes
    assert parts["whole"].sent_bytes <= min(parts["latents"].sent_bytes, parts["outputs"].sent_bytes)
    assert len({share(config, 1, 4, kind) for kind in LAYOUTS.values()}) == 1


def test_more_processes_than_key_value_heads_repeat_them() -> None:
    """llama3-8b has 8: of 16 processes, two have the same."""
    eight, sixteen = (share(shape("llama3-8b"), size, 2) for size in (8, 16))
    norms = 65 * 4096
    matrices = [2 * part.weight_bytes / 4 - norms for part in (eight, sixteen)]
    repeated = 32 * 2 * 128 * 4096  # k and v of one head, 32 layers
    assert matrices[1] - repeated == (matrices[0] - repeated) / 2


def test_shared_factors_are_in_memory_once_and_read_by_each_layer() -> None:
    config = tiny("tied")
    tied, untied = (share(c, 2, 4) for c in (config, replace(config, tied_factors={})))
    assert tied.step_bytes == untied.step_bytes
    # q, k and v are one parameter of both layers, as are the 96 columns of down; up without gate is not.
    assert untied.weight_bytes - tied.weight_bytes == 4 * (3 * 24 * 128 + 24 * 96)


@pytest.mark.parametrize(
    ("name", "size", "sizes"),
    [("llama-7b", 3, "1, 2, 4, 8, 16, 32"), ("qwen2.5-7b", 8, "1, 2, 4"), ("smollm2-135m", 9, "1, 3")],
)
def test_sizes_that_do_not_divide_the_model(name: str, size: int, sizes: str) -> None:
    with pytest.raises(OptionError, match=f"can be divided by {sizes}$"):
        share(shape(name), size, 2)
    with pytest.raises(OptionError):
        share(shape(name), 0, 2)
