"""Named shapes and structures: ranks by their rules, totals kept, weights that repeat."""

import pytest
import torch

from thinrank.bench.shapes import (
    SHAPES,
    SHARED_MODULES,
    STRUCTURES,
    layer_keep_ratio,
    layer_linears,
    random_decoder,
    random_model,
    rule_rank,
)
from thinrank.errors import OptionError
from thinrank.model.batch import ForwardBatch
from thinrank.model.cost import parameters
from thinrank.model.layers import LowRankLinear

CPU = torch.device("cpu")


def model(shape: str, structure: str, keep_ratio: float = 0.5, seed: int = 0):
    return random_model(shape, structure, keep_ratio, torch.float32, CPU, seed)


@pytest.mark.parametrize(
    ("shape", "billions"),
    [
        ("llama-7b", 6.738),
        ("llama-13b", 13.016),
        ("llama3-8b", 8.030),
        ("mistral-7b", 7.248),
        ("qwen2.5-7b", 7.616),
        ("smollm2-135m", 0.1345),
    ],
)
def test_dense_shapes_have_the_parameters_of_the_models(shape: str, billions: float) -> None:
    assert parameters(model(shape, "dense").config) / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize("structure", sorted(set(STRUCTURES) - {"dense"}))
@pytest.mark.parametrize("shape", sorted(set(SHAPES) - {"tiny"}))
@pytest.mark.parametrize("keep_ratio", [0.4, 0.5, 0.8])
def test_structures_keep_the_total(shape: str, structure: str, keep_ratio: float) -> None:
    config = model(shape, structure, keep_ratio).config
    assert layer_keep_ratio(config) == pytest.approx(keep_ratio, rel=0.01)
    shared = {*config.tied_factors, *config.tied_factors.values()}
    for name, rank in config.ranks.items():
        out_features, in_features, _ = config.linears()[name]
        layers = 2 if f"{name}.factor_in.weight" in shared else 1  # a shared basis serves both layers
        assert 1 <= rank <= min(out_features * layers, in_features)


def test_uniform_has_the_ranks_of_the_rule() -> None:
    ranks = model("llama-7b", "uniform").config.ranks
    assert ranks["model.layers.0.self_attn.q_proj"] == 1024
    assert ranks["model.layers.31.mlp.down_proj"] == 1492
    assert "lm_head" not in ranks


def test_hetero_spreads_the_ranks() -> None:
    config = model("llama-7b", "hetero").config
    relative = [config.ranks[name] / rule_rank(shape, 0.5) for name, shape in layer_linears(config).items()]
    assert min(relative) >= 0.7 and max(relative) <= 1.3
    assert min(relative) < 0.75 and max(relative) > 1.25
    assert any(rank % 2 for rank in config.ranks.values())
    assert config.ranks == model("llama-7b", "hetero").config.ranks
    assert config.ranks != model("llama-7b", "hetero", seed=1).config.ranks


def test_shared2_shares_the_basis_of_two_layers() -> None:
    config = model("llama-7b", "shared2").config
    q_proj = "model.layers.{}.self_attn.q_proj"
    # floor(4096 * 4096 * 2 * 0.5 / (4096 + 4096 * 2))
    assert config.ranks[q_proj.format(0)] == config.ranks[q_proj.format(1)] == 1365
    name = f"{q_proj}.factor_in.weight"
    assert config.tied_factors[name.format(1)] == name.format(0)
    assert len(config.tied_factors) == 16 * len(SHARED_MODULES)


def test_shared_layers_have_one_tensor_and_an_odd_one_stays_private() -> None:
    decoder = random_decoder("tiny", "shared2", 0.5, torch.float32, CPU, 0)
    first, second, third = (layer.up_proj for layer in decoder.layers)
    assert isinstance(first, LowRankLinear) and isinstance(second, LowRankLinear)
    assert first.factor_in is second.factor_in
    assert first.factor_in is not third.factor_in
    assert decoder.layers[0].o_proj.factor_in is not decoder.layers[1].o_proj.factor_in


def test_every_third_module_of_mixed_is_dense() -> None:
    config = model("llama-7b", "mixed").config
    assert len(config.ranks) == 224 - 74


@pytest.mark.parametrize("structure", STRUCTURES)
def test_random_weights_repeat_and_keep_activations_of_order_one(structure: str) -> None:
    ids = torch.arange(12) * 7
    batch = ForwardBatch.whole_sequences([ids], CPU)
    decoder = random_decoder("tiny", structure, 0.5, torch.float32, CPU, 3)
    logits = decoder(batch)
    assert 0.3 < float(logits.std()) < 3
    assert 0.3 < float(decoder.hidden(batch).std()) < 10
    assert torch.equal(logits, random_decoder("tiny", structure, 0.5, torch.float32, CPU, 3)(batch))
    assert not torch.equal(logits, random_decoder("tiny", structure, 0.5, torch.float32, CPU, 4)(batch))


@pytest.mark.parametrize(
    ("shape", "structure", "keep_ratio", "message"),
    [
        ("gpt-2", "uniform", 0.5, "unknown shape 'gpt-2': known: .*llama-7b"),
        ("tiny", "odd", 0.5, "unknown structure 'odd': known: .*hetero"),
        ("tiny", "uniform", 0, "keep_ratio is 0"),
        ("tiny", "uniform", 1.1, "keep_ratio is 1.1"),
        ("llama-7b", "mixed", 0.3, "dense third"),
    ],
)
def test_mistakes(shape: str, structure: str, keep_ratio: float, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        model(shape, structure, keep_ratio)
