"""Plans: bytes by hand, the longest context at its very boundary, and every mistake named."""

import json
from pathlib import Path

import pytest

from thinrank.bench.shapes import SHAPES
from thinrank.config import BLOCK_SIZE
from thinrank.errors import CheckpointError, OptionError, UnsupportedModelError
from thinrank.model.cost import INT8
from thinrank.model.registry import parse_config
from thinrank.model.tensor_parallel import share
from thinrank.planning import KEEP_RATIOS, Plan, plan
from thinrank.planning.choice import RESERVED_MEMORY, Choice

ROOMY = 200 * 2**30


def by_name(planned: Plan) -> dict[str, Choice]:
    return {choice.name: choice for choice in planned.choices}


def test_bytes_of_a_tiny_model_by_hand() -> None:
    # vocab 192, hidden 128, MLP 256, 3 layers, 4 heads and 2 KV heads of 64: q and o are [256, 128], k and v
    # [128, 128], gate and up [256, 128], down [128, 256].
    choices = by_name(plan(shape="tiny", memory=ROOMY, context=100, keep_ratios=(0.5,)))
    other = 2 * 192 * 128 + (2 * 3 + 1) * 128  # embedding and lm_head; norms
    layers = 3 * (2 * 256 * 128 + 2 * 128 * 128 + 3 * 256 * 128)
    assert choices["dense 16-bit"].parameters == layers + other
    assert choices["dense 16-bit"].weight_bytes == 2 * (layers + other)
    # rank = floor(0.5 * in * out / (in + out)): 42 for 256x128, 32 for 128x128
    factors = 3 * (5 * 42 * (256 + 128) + 2 * 32 * (128 + 128))
    assert choices["keep_ratio 0.5"].parameters == factors + other
    # 8 bits and 2 bytes an output; 4 bits and 4 bytes for 128 inputs; lm_head as well
    kept = 2 * (192 * 128 + 7 * 128)  # embedding and norms
    outputs = 3 * (256 + 128 + 128 + 128 + 256 + 256 + 128) + 192
    groups = outputs + 3 * (128 + 128)  # o and down have two groups of 128 inputs
    assert choices["dense 8-bit"].weight_bytes == kept + layers + 192 * 128 + 2 * outputs
    assert choices["dense 4-bit"].weight_bytes == kept + (layers + 192 * 128) // 2 + 4 * groups
    # 100 tokens are two blocks; keys and values of 2 heads of 64, 3 layers, 2 bytes
    assert choices["dense 4-bit"].kv_bytes == 128 * 2 * 2 * 64 * 3 * 2
    assert choices["keep_ratio 0.5"].kv_bytes == choices["dense 4-bit"].kv_bytes
    assert choices["keep_ratio 0.5"].low_rank_kv_bytes == 128 * (32 + 32) * 3 * 2
    assert choices["dense 16-bit"].low_rank_kv_bytes is None
    # a step reads all but the embedding table, and the 100 tokens
    step = 2 * (layers + 192 * 128 + 7 * 128) + 100 * 2 * 2 * 64 * 3 * 2
    assert choices["dense 16-bit"].step_bytes == step
    assert choices["dense 8-bit"].step_bytes == step - layers - 192 * 128 + 2 * outputs


def test_dense_and_low_rank_cache_of_llama_7b() -> None:
    """Dense: 2 * heads * head_dim * layers * T * 2 = 524,288 T bytes. Low-rank: rho times that."""
    choices = by_name(plan(shape="llama-7b", memory=ROOMY, context=4096, keep_ratios=(0.5,)))
    low_rank = choices["keep_ratio 0.5"]
    assert low_rank.kv_bytes == 524_288 * 4096
    rho = 1024 / 4096  # the rank of a 4096 x 4096 matrix at keep_ratio 0.5
    assert low_rank.low_rank_kv_bytes == rho * low_rank.kv_bytes


def test_four_bits_of_llama_7b_are_those_of_gpt_fast() -> None:
    four_bit = by_name(plan(shape="llama-7b", memory=ROOMY, context=1))["dense 4-bit"]
    assert four_bit.step_bytes / 1e9 == pytest.approx(3.51, abs=0.005)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("name", ["keep_ratio 0.5", "dense 16-bit", "dense 8-bit", "dense 4-bit"])
def test_the_longest_context_fits_and_one_token_more_does_not(name: str, batch_size: int) -> None:
    blocks = 5
    needed = by_name(plan(shape="tiny", memory=ROOMY, context=blocks * BLOCK_SIZE, batch_size=batch_size))[
        name
    ]
    for memory, longest in ((needed.needed_bytes, 5 * BLOCK_SIZE), (needed.needed_bytes - 1, 4 * BLOCK_SIZE)):

        def at(context: int, memory: int = memory) -> Choice:
            return by_name(plan(shape="tiny", memory=memory, context=context, batch_size=batch_size))[name]

        assert at(1).longest_context == longest
        assert at(longest).fits
        assert not at(longest + 1).fits


def test_the_longest_context_is_at_most_the_positions() -> None:
    assert {choice.longest_context for choice in plan(shape="tiny", memory=ROOMY).choices} == {32768}


def test_weights_that_do_not_fit_leave_no_context() -> None:
    planned = plan(shape="tiny", memory=RESERVED_MEMORY, context=1)
    assert not any(choice.fits or choice.longest_context for choice in planned.choices)


def test_numbers_of_one_of_several_cards() -> None:
    arguments = {"shape": "llama3-8b", "gpu": "A100 80GB", "context": 64 * 100, "batch_size": 2}
    one, four = plan(**arguments), plan(**arguments, tensor_parallel_size=4)
    assert (one.tensor_parallel_size, four.tensor_parallel_size) == (1, 4)
    assert four.reserved_memory == RESERVED_MEMORY + int(0.08 * four.card.memory)
    dense = parse_config(SHAPES["llama3-8b"])
    for alone, part in zip(one.choices, four.choices, strict=True):
        assert (alone.name, alone.parameters) == (part.name, part.parameters)
        assert part.kv_bytes == alone.kv_bytes / 4  # two of eight heads
        assert part.step_bytes - part.weight_step_bytes == (alone.step_bytes - alone.weight_step_bytes) / 4
        assert part.needed_bytes == part.weight_bytes + part.kv_bytes + four.reserved_memory
        assert (part.tpot_ms, part.tokens_per_s, part.low_rank_kv_bytes) == (None, None, None)
        assert part.floor_ms == pytest.approx(part.step_bytes / 2039e6)
        assert alone.sent_bytes == 0
    assert by_name(four)["dense 16-bit"].weight_bytes == share(dense, 4, 2).weight_bytes
    assert by_name(four)["dense 16-bit"].sent_bytes == 2 * share(dense, 4, 2).sent_bytes
    eight_bit = share(dense, 4, 2, quantization=INT8)
    assert by_name(four)["dense 8-bit"].weight_step_bytes == eight_bit.step_bytes
    json.dumps(four.to_json(), allow_nan=False)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_longest_context_on_several_cards(batch_size: int) -> None:
    arguments = {"shape": "tiny", "batch_size": batch_size, "tensor_parallel_size": 2}
    for name, choice in by_name(plan(**arguments, memory=ROOMY, context=5 * BLOCK_SIZE)).items():
        weights_and_cache = choice.weight_bytes + choice.kv_bytes
        memory = -(-(weights_and_cache + RESERVED_MEMORY) * 100 // 92)
        assert (
            by_name(plan(**arguments, memory=memory + 2, context=1))[name].longest_context == 5 * BLOCK_SIZE
        )
        assert (
            by_name(plan(**arguments, memory=memory - 2, context=1))[name].longest_context == 4 * BLOCK_SIZE
        )


def test_times() -> None:
    numbers = by_name(plan(shape="llama-7b", memory=ROOMY, bandwidth=1e12, batch_size=2))
    for choice in numbers.values():
        assert choice.floor_ms == pytest.approx(choice.step_bytes / 1e9)
        assert choice.tpot_ms is not None
        assert choice.tpot_ms > choice.floor_ms
        assert choice.tokens_per_s == pytest.approx(2000 / choice.tpot_ms)
    assert all(choice.tpot_ms is None for choice in plan(shape="llama-7b", memory=ROOMY).choices)


def test_a_config_is_enough_and_a_compressed_one_is_planned_as_its_dense_original(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPES["tiny"]))
    expected = plan(shape="tiny", gpu="H200").choices
    assert plan(tmp_path, gpu="H200").choices == plan(path, gpu="H200").choices == expected
    section = {
        "quant_method": "thinrank",
        "format_version": 1,
        "modules": {"model.layers.0.mlp.up_proj": {"rank": 8}},
        "tied_factors": {},
    }
    path.write_text(json.dumps(SHAPES["tiny"] | {"quantization_config": section}))
    assert plan(tmp_path, gpu="H200").choices == expected


def test_what_is_planned_by_default() -> None:
    planned = plan(shape="llama-7b", gpu="H200")
    assert (planned.context, planned.batch_size) == (4096, 1)
    assert [choice.keep_ratio for choice in planned.choices] == [*KEEP_RATIOS, 1.0, None, None]
    assert [choice.bits for choice in planned.choices][-3:] == [16, 8, 4]
    json.dumps(planned.to_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"gpu": "H200"}, "SRC"),
        ({"source": "x", "shape": "tiny", "gpu": "H200"}, "both SRC and --shape"),
        ({"shape": "tinny", "gpu": "H200"}, "tiny"),
        ({"shape": "tiny", "gpu": "H2000"}, "RTX 4090"),
        ({"shape": "tiny", "gpu": "H200", "memory": 1}, "--gpu"),
        ({"shape": "tiny", "bandwidth": 1e12}, "--memory"),
        ({"shape": "tiny", "memory": 0}, "memory is 0"),
        ({"shape": "tiny", "memory": 1, "bandwidth": 0.0}, "bandwidth is 0"),
        ({"shape": "tiny", "memory": 1, "bandwidth": float("nan")}, "bandwidth is nan"),
        ({"shape": "tiny", "gpu": "H200", "context": 0}, "1 to 32768"),
        ({"shape": "tiny", "gpu": "H200", "context": 32769}, "1 to 32768"),
        ({"shape": "tiny", "gpu": "H200", "batch_size": 9}, "1 to 8"),
        ({"shape": "tiny", "gpu": "H200", "keep_ratios": (1.0,)}, "below 1"),
        ({"shape": "tiny", "gpu": "H200", "tensor_parallel_size": 3}, "divided by 1, 2, 4"),
        ({"shape": "tiny", "gpu": "H200", "tensor_parallel_size": 0}, "divided by 1, 2, 4"),
    ],
)
def test_mistakes(arguments: dict, part: str) -> None:
    with pytest.raises(OptionError, match=part):
        plan(**arguments)


def test_configs_that_cannot_be_planned(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"is no folder and no config\.json: thinrank convert"):
        plan(model)
    with pytest.raises(CheckpointError, match="cannot read"):
        plan(tmp_path, gpu="H200")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPES["tiny"] | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(UnsupportedModelError, match="gptq"):
        plan(tmp_path, gpu="H200")
