"""The baselines compute the same function on the same weights, so that times compare."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from thinrank.bench.engine_system import EngineSystem
from thinrank.bench.huggingface import HuggingFaceSystem
from thinrank.bench.int4 import Int4Linear, Int4System, quantize
from thinrank.bench.shapes import BenchModel, random_model, reference_decoder
from thinrank.bench.static_decoder import StaticDecoderSystem
from thinrank.bench.system import StaticCacheSystem, System, model_step_bytes
from thinrank.bench.systems import BASELINES, SYSTEMS, selected_systems
from thinrank.errors import OptionError
from thinrank.model.batch import ForwardBatch
from thinrank.model.cost import parameters

CPU = torch.device("cpu")
PROMPTS = torch.randint(192, (2, 9), generator=torch.Generator().manual_seed(0))


def tiny(structure: str = "uniform", dtype: torch.dtype = torch.float32) -> BenchModel:
    return random_model("tiny", structure, 0.5, dtype, CPU, 0)


def static_systems(model: BenchModel) -> list[StaticCacheSystem]:
    return [HuggingFaceSystem(model), StaticDecoderSystem(model, compiled=False)]


def reference_logits(model: BenchModel, ids: torch.Tensor) -> torch.Tensor:
    """[sequences, vocab]: after the last token of each row."""
    logits = reference_decoder(model)(ForwardBatch.whole_sequences(list(ids), CPU))
    return logits.unflatten(0, ids.shape)[:, -1]


@torch.inference_mode()
def greedy(model: BenchModel, ids: torch.Tensor, count: int) -> torch.Tensor:
    for _ in range(count):
        ids = torch.cat((ids, reference_logits(model, ids).argmax(-1, keepdim=True)), dim=1)
    return ids


@pytest.mark.parametrize("structure", ["uniform", "hetero", "shared2", "mixed", "dense"])
@pytest.mark.parametrize("index", [0, 1], ids=["hf", "static"])
@torch.inference_mode()
def test_logits_of_the_static_caches(structure: str, index: int) -> None:
    model = tiny(structure)
    system = static_systems(model)[index]
    system.prepare(PROMPTS, 8)
    prefilled = system._prefill(PROMPTS)
    # float32 throughout: only the order of summation differs
    torch.testing.assert_close(prefilled, reference_logits(model, PROMPTS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("index", [0, 1], ids=["hf", "static"])
def test_decode_steps_and_rewind(index: int) -> None:
    model = tiny("shared2")
    system = static_systems(model)[index]
    expected = greedy(model, PROMPTS, 7)
    system.prepare(PROMPTS, 7)
    for _ in range(2):
        system.prefill()
        for _ in range(2):
            assert torch.equal(system._token[:, 0], expected[:, 9])
            for column in range(10, 16):
                system.decode_steps(1)
                assert torch.equal(system._token[:, 0], expected[:, column])
            system.rewind()


def test_a_window_and_biases_in_the_static_decoder() -> None:
    model = random_model("tiny", "mixed", 0.5, torch.float32, CPU, 0)
    config = replace(model.config, sliding_windows=(4, None, 3))
    model = replace(model, config=config)
    system = StaticDecoderSystem(model, compiled=False)
    system.prepare(PROMPTS, 6)
    system.prefill()
    system.decode_steps(5)
    assert torch.equal(system._token[:, 0], greedy(model, PROMPTS, 6)[:, -1])


def test_the_engine_runs_all_prompts_and_starts_over() -> None:
    system = EngineSystem(tiny())
    system.prepare(PROMPTS, 5)
    for _ in range(2):
        system.prefill()
        assert set(system._tokens.values()) == {1}
        system.decode_steps(4)
        assert set(system._tokens.values()) == {5}
    assert system.room >= 4


def test_the_engine_samples_at_a_temperature() -> None:
    """Seeded, so that two runs are the same; the requests differ from greedy ones in nothing else."""

    def tokens(temperature: float) -> list[list[int]]:
        system = EngineSystem(tiny(), temperature)
        system.prepare(PROMPTS, 12)
        system.prefill()
        system.decode_steps(11)
        assert system.engine is not None
        return [sequence.token_ids for sequence in system.engine.scheduler.running]

    assert tokens(1.0) == tokens(1.0)
    assert tokens(1.0) != tokens(0.0)


def test_huggingface_holds_every_weight_once() -> None:
    model = tiny("shared2")
    hf = HuggingFaceSystem(model).hf
    assert sum(parameter.numel() for parameter in hf.parameters()) == parameters(model.config)


def test_a_model_with_biases_in_huggingface() -> None:
    model = tiny()
    hf_config = {**model.hf_config, "attention_bias": True}
    config = replace(model.config, qkv_bias=True, o_bias=True)
    biased = replace(model, config=config, hf_config=hf_config)
    source = {
        f"{name}.factor_out.bias": torch.linspace(-1, 1, shape.out_features)
        for name, shape in config.linears().items()
        if shape.bias
    }
    biased = replace(biased, get=lambda name: source[name] if name in source else model.get(name))
    for system in static_systems(biased):
        system.prepare(PROMPTS, 2)
        with torch.inference_mode():
            logits = system._prefill(PROMPTS)
        torch.testing.assert_close(logits, reference_logits(biased, PROMPTS), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_int4_is_a_rounded_dense_matmul() -> None:
    linear = torch.nn.Linear(256, 96, bias=True, dtype=torch.bfloat16)
    q, scales = quantize(linear.weight.data, 128)
    assert (int(q.min()), int(q.max())) == (0, 15)
    steps = scales[..., 0].T.repeat_interleave(128, 1).float()
    offsets = scales[..., 1].T.repeat_interleave(128, 1).float()
    rounded = (q.float() - 8) * steps + offsets
    # half a step from rounding, and the 8 bits of the offset
    assert ((rounded - linear.weight.float()).abs() <= 0.5 * steps + 1e-3).all()
    x = torch.randn(3, 2, 256, dtype=torch.bfloat16)
    expected = x.float() @ rounded.T + linear.bias.float()
    error = (Int4Linear(linear)(x).float() - expected).norm() / expected.norm()
    assert error < 1e-2  # bfloat16 output


def test_int4_reads_a_quarter_and_needs_bfloat16() -> None:
    model = tiny("dense", torch.bfloat16)
    system = Int4System(model, compiled=False)
    assert 0.25 < system.step_bytes(0, 1) / model_step_bytes(model, 0, 1) < 0.3
    with pytest.raises(OptionError, match="bfloat16"):
        Int4System(tiny("dense"))


def test_names() -> None:
    model = tiny()
    assert selected_systems([], model) == ["thinrank"]
    assert selected_systems(["densekv", "hf-static"], model) == ["thinrank", "hf-static", "densekv"]
    assert selected_systems(["all"], model) == list(SYSTEMS) == ["thinrank", *BASELINES]
    assert "thinrank-dense" not in selected_systems(["all"], tiny("dense"))
    with pytest.raises(OptionError, match=r"unknown baseline 'vllm': known: .*hf-static"):
        selected_systems(["vllm"], model)


@pytest.mark.parametrize("name", [name for name in SYSTEMS if "compile" not in name])
def test_every_system_runs(name: str) -> None:
    model = random_model("tiny", "dense" if SYSTEMS[name].dense else "hetero", 0.5, torch.bfloat16, CPU, 0)
    system: System = SYSTEMS[name].build(model)
    if isinstance(system, StaticDecoderSystem):
        system._compiled = False
    system.prepare(PROMPTS, 3)
    system.prefill()
    system.decode_steps(2)
    assert system.step_bytes(10, 2) > 0


def test_a_checkpoint_can_be_measured(converted) -> None:
    from thinrank.bench.shapes import checkpoint_model

    path: Path = converted("asvd-mha-80")
    model = checkpoint_model(path, "float32", CPU, 0)
    assert model.structure == "checkpoint"
    assert 0.3 < model.keep_ratio < 1
    system = HuggingFaceSystem(model)
    ids = PROMPTS % model.config.vocab_size
    system.prepare(ids, 2)
    with torch.inference_mode():
        logits = system._prefill(ids)
    torch.testing.assert_close(logits, reference_logits(model, ids), rtol=1e-3, atol=1e-3)
    assert layer_ranks(model.dense()) == 0


def layer_ranks(model: BenchModel) -> int:
    return len(model.config.ranks)
