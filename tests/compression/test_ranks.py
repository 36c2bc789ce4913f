"""Ranks from a keep_ratio, by hand and by loss."""

import json
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrank import ThinrankError, compress
from thinrank.checkpoint.load import open_checkpoint
from thinrank.compression.loss_allocation import Choice, allocate, loss_curve
from thinrank.compression.ranks import RankProblem, kept_ratio, ranks_within, spread, uniform
from thinrank.compression.units import Unit, units_of
from thinrank.model.registry import parse_config
from tiny_models import tiny_config
from tiny_text_models import dense_model

#: SmolLM2-135M.
REAL = parse_config(
    tiny_config(
        hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
        num_hidden_layers=4,
    )
)  # fmt: skip


def problem(units, keep_ratio, multiple=1):
    return RankProblem(units, keep_ratio, multiple, None, None)


@pytest.mark.parametrize("keep_ratio", [0.3, 0.5, 0.7, 0.8, 0.9])
def test_the_kept_ratio_is_exact(keep_ratio):
    units = units_of(REAL)
    assert kept_ratio(units, uniform(problem(units, keep_ratio))) == pytest.approx(keep_ratio, abs=5e-3)
    ratios = spread(units, keep_ratio, lambda unit, scale: scale * (1 + unit.layers[0]))
    ranks = ranks_within(problem(units, keep_ratio), ratios)
    assert kept_ratio(units, ranks) == pytest.approx(keep_ratio, rel=1e-3)


@pytest.mark.parametrize("multiple", [8, 16, 64])
def test_multiples(multiple, tmp_path, calibrated):
    units = units_of(REAL)
    ranks = uniform(problem(units, 0.6, multiple))
    assert all(rank % multiple == 0 for rank in ranks.values())
    assert kept_ratio(units, ranks) == pytest.approx(0.6, rel=0.15)
    _, folder = dense_model(
        tmp_path, hidden_size=128, intermediate_size=256, num_attention_heads=4, head_dim=32
    )
    (report,) = compress(
        folder, tmp_path / "out", allocate="loss", keep_ratio=0.6, rank_multiple=multiple, **calibrated
    )
    assert report.ranks and all(rank % multiple == 0 for rank in report.ranks.values())


@given(st.floats(0.05, 0.95), st.lists(st.floats(0.1, 100), min_size=3, max_size=3))
@settings(deadline=None)
def test_spread_meets_the_target(keep_ratio, importance):
    units = [Unit((f"model.layers.{index}.mlp.up_proj",), 40 + index, 30) for index in range(3)]
    ratios = spread(units, keep_ratio, lambda unit, scale: scale * importance[unit.layers[0]])
    total = sum(unit.dense_parameters for unit in units)
    kept = sum(ratio * unit.dense_parameters for unit, ratio in ratios.items()) / total
    assert kept == pytest.approx(keep_ratio, abs=1e-6)
    assert all(0.01 <= ratio <= 1 for ratio in ratios.values())


def test_globs_choose_modules(tmp_path, calibrated):
    _, folder = dense_model(tmp_path)
    (report,) = compress(folder, tmp_path / "out", modules="*.1.mlp.*", keep_ratio=0.5, **calibrated)
    assert {name.rpartition(".")[0] for name in report.ranks} == {"model.layers.1.mlp"}
    assert len(report.ranks) == 3
    assert report.kept_ratio == pytest.approx(0.5, abs=0.03)
    for pattern, problem in (
        ("up_proj", "no module matches 'up_proj'"),
        ("lm_*", "lm_head is never factored"),
    ):
        with pytest.raises(ThinrankError, match=problem):
            compress(folder, tmp_path / "none", modules=pattern, keep_ratio=0.5, **calibrated)


def test_ranks_by_hand(tmp_path, calibrated):
    _, folder = dense_model(tmp_path)
    file = tmp_path / "ranks.json"
    file.write_text(json.dumps({"*.mlp.*": 7, "*.1.mlp.up_proj": 9, "*.0.mlp.gate_proj": None}))
    (report,) = compress(folder, tmp_path / "out", ranks=file, **calibrated)
    assert report.ranks == {
        "model.layers.0.mlp.up_proj": 7,
        "model.layers.0.mlp.down_proj": 7,
        "model.layers.1.mlp.gate_proj": 7,
        "model.layers.1.mlp.up_proj": 9,
        "model.layers.1.mlp.down_proj": 7,
    }
    assert open_checkpoint(tmp_path / "out").config.ranks == report.ranks


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "the ranks .* is no JSON"),
        ("[1]", "holds no JSON object"),
        ('{"*.nothing": 3}', r"no module matches '\*.nothing'"),
        ('{"*": 0}', "the rank 0: it must be an integer from 1 to 48"),
        ('{"*.up_proj": 49}', "the rank 49"),
        ('{"*": "3"}', "the rank '3'"),
        ('{"*": true}', "the rank True"),
    ],
)
def test_mistakes_in_a_file_of_ranks(content, message, tmp_path, calibrated):
    _, folder = dense_model(tmp_path)
    (tmp_path / "ranks.json").write_text(content)
    with pytest.raises(ThinrankError, match=message):
        compress(folder, tmp_path / "out", ranks=tmp_path / "ranks.json", **calibrated)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of keep_ratio and ranks"),
        ({"keep_ratio": 0.5, "ranks": "x.json"}, "exactly one of keep_ratio and ranks"),
        ({"keep_ratio": 0.5, "allocate": "magic"}, "unknown allocation 'magic': known: loss, uniform"),
        ({"keep_ratio": 0.5, "rank_multiple": 7}, "rank_multiple is 7: it must be one of 1, 8, 16, 64"),
    ],
)
def test_mistakes(options, message, tmp_path, calibrated):
    _, folder = dense_model(tmp_path)
    with pytest.raises(ThinrankError, match=message):
        compress(folder, tmp_path / "out", **options, **calibrated)


# By loss


@given(st.integers(1, 3), st.integers(1, 8), st.integers(1, 8), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_the_loss_curve_is_the_quadratic_form(modules, out_features, in_features, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    weight = draw(modules * out_features, in_features)
    vectors = torch.linalg.svd(weight, full_matrices=False).U
    roots = [(draw(out_features, out_features), draw(in_features, in_features)) for _ in range(modules)]
    fishers, grams = [f @ f.T for f, _ in roots], [g @ g.T for _, g in roots]
    curve = loss_curve(vectors, weight, fishers, grams)
    assert len(curve) == vectors.shape[1] + 1
    for rank in range(len(curve)):
        lost = weight - vectors[:, :rank] @ (vectors[:, :rank].T @ weight)
        expected = sum(
            torch.trace(f @ d @ g @ d.T) / 2
            for f, g, d in zip(fishers, grams, lost.split(out_features), strict=True)
        )
        torch.testing.assert_close(curve[rank], torch.as_tensor(expected).double(), atol=1e-8, rtol=1e-6)


@given(st.integers(0, 2**31), st.integers(1, 3), st.floats(0.2, 1))
@settings(max_examples=60, deadline=None)
def test_allocation_is_near_the_best_within_the_budget(seed, count, share):
    """Against trying everything. The hull is optimal but for its last step, which the bound allows for."""
    generator = torch.Generator().manual_seed(seed)
    choices = {}
    for index in range(count):
        unit = Unit((f"model.layers.{index}.mlp.up_proj",), 12, 12)
        gains = torch.rand(5, generator=generator, dtype=torch.float64).sort(descending=True).values
        losses = (gains.sum() - gains.cumsum(0)).tolist()
        ranked = [Choice(24 * rank, losses[rank - 1], rank) for rank in range(1, 6)]
        choices[unit] = [*ranked, Choice(144, 0.0, None)]
    budget = int(share * 144 * count)
    chosen = allocate(choices, budget)
    least = 24 * count
    assert sum(choice.parameters for choice in chosen.values()) <= max(budget, least)
    combinations = [c for c in product(*choices.values()) if sum(x.parameters for x in c) <= budget]
    if combinations:
        best = min(sum(choice.loss for choice in c) for c in combinations)
        step = max(a.loss - b.loss for cs in choices.values() for a, b in pairwise(cs))
        assert sum(choice.loss for choice in chosen.values()) <= best + step + 1e-9


def test_a_useless_module_pays_for_a_precious_one(tmp_path, calibrated):
    """What reads nothing but a dead channel costs no loss: it goes to rank 1, and others stay dense."""
    from safetensors.torch import load_file, save_file

    _, folder = dense_model(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"].zero_()
    save_file(tensors, folder / "model.safetensors")
    (report,) = compress(folder, tmp_path / "out", allocate="loss", keep_ratio=0.9, **calibrated)
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert report.ranks[f"model.layers.1.mlp.{name}"] == 1
    assert len(report.ranks) < 14
