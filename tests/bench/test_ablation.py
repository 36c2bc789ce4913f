"""The variants: each differs from its neighbour in one mechanism, and all compute the same."""

from dataclasses import asdict, fields, replace
from functools import cache
from math import prod

import pytest
import torch

from thinrank.bench.ablation import AblationRow, Timing, _row, ablation, checked_error, describe, logits
from thinrank.bench.shapes import SHAPES, STRUCTURES, random_source
from thinrank.bench.timing import Percentiles
from thinrank.bench.variants import FULL, GRAPHS, Variant, comparisons
from thinrank.errors import OptionError, ThinrankError
from thinrank.model.registry import parse_config

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
#: A step attends to its own token too, so it reads what it has written.
STEPS = 1
#: What readers of the file rely on.
ROW_KEYS = [
    "system",
    "series",
    "change",
    "dense_kv",
    "pack_qkv",
    "pack_mlp",
    "graph",
    "pdl",
    "launches_per_token",
    "copies_per_token",
    "host_ms",
    "tpot_ms_p20",
    "tpot_ms_p50",
    "tpot_ms_p80",
    "gain",
    "factor",
]


@pytest.mark.parametrize("dense", [False, True])
def test_neighbours_differ_in_one_mechanism(dense: bool) -> None:
    rows = comparisons(dense)
    for row in rows:
        own, other = asdict(row.variant), asdict(row.neighbour)
        changed = [f"{name}={value}" for name, value in own.items() if value != other[name]]
        named = row.change.replace("=on", "=True").replace("=off", "=False")
        assert changed == ([] if row.series in ("base", "full") else [named])
    ladder = [row for row in rows if row.series == "ladder"]
    assert ladder[0].neighbour == rows[0].variant == Variant(dense_kv=dense)
    assert [row.neighbour for row in ladder[1:]] == [row.variant for row in ladder[:-1]]
    assert ladder[-1].variant == FULL
    assert all(row.neighbour == rows[0].variant for row in rows if row.series == "alone")
    assert all(row.neighbour == FULL for row in rows if row.series == "without")
    variants = [row.variant for row in rows]  # rows are written as they come, with what is measured by then
    assert all(row.neighbour in variants[: index + 1] for index, row in enumerate(rows))
    for series in ("alone", "without"):  # each mechanism, and each way to launch
        changes = {row.change for row in rows if row.series == series}
        assert len(changes) == (3 if dense else 4) + len(GRAPHS) - 1


def test_factors_multiply_out() -> None:
    rows = comparisons(dense=False)
    variants = dict.fromkeys(row.variant for row in rows)
    timings = {
        variant: Timing(1, 0, 0.1, Percentiles(0, 20 / (1 + index), 0))
        for index, variant in enumerate(variants)
    }
    table = [_row("low-rank", row, timings, timings[Variant()]) for row in rows]
    [full] = [row for row in table if row.series == "full"]
    assert full.gain == pytest.approx(20 / timings[FULL].tpot_ms.p50)
    assert prod(row.factor for row in table if row.series == "ladder") == pytest.approx(full.gain)
    for row in table:
        if row.series == "without":
            assert row.factor == pytest.approx(full.gain / row.gain)
        elif row.series == "alone":
            assert row.factor == row.gain


def test_what_readers_rely_on() -> None:
    assert [field.name for field in fields(AblationRow)] == ROW_KEYS


def test_every_variant_has_a_name_of_its_own() -> None:
    variants = {row.variant for dense in (False, True) for row in comparisons(dense)}
    assert len({describe(variant) for variant in variants}) == len(variants)
    assert describe(Variant()) == "no mechanism"


@cache
def filled_cache(model_type: str, structure: str):
    """70 tokens of two layers of the shape `tiny`: a block and a bit."""
    from thinrank.bench.variant_step import FilledCache
    from thinrank.model.packed_decoder import PackedDecoder

    dense = parse_config({**SHAPES["tiny"], "model_type": model_type, "num_hidden_layers": 2})
    ranks, _ = STRUCTURES[structure](dense, 0.5, 0)
    config = replace(dense, ranks=ranks)
    get = random_source(config, torch.float32, DEVICE, 0)
    return FilledCache.build(PackedDecoder.build(config, get, torch.float32, DEVICE, 256), 70, STEPS, seed=0)


@cache
def eager_logits(model_type: str, structure: str) -> torch.Tensor:
    """Of the engine's own step."""
    from thinrank.bench.variant_step import VariantStep

    cache = filled_cache(model_type, structure)
    return logits(cache, VariantStep(cache, Variant(True, True, True)), STEPS)


@pytest.mark.parametrize(
    ("model_type", "structure", "used"),
    [
        ("qwen2", "uniform", ["dense_kv"]),  # has biases
        ("qwen2", "uniform", ["pack_qkv"]),
        ("qwen2", "dense", ["dense_kv"]),
        ("qwen3", "uniform", []),  # norms q and k
    ],
)
def test_variants_compute_the_same(model_type: str, structure: str, used: list[str]) -> None:
    """To 1e-5 in float32, where only the order of sums differs."""
    pytest.importorskip("triton")
    from thinrank.bench.variant_step import VariantStep

    expected, cache = eager_logits(model_type, structure), filled_cache(model_type, structure)
    if "dense_kv" not in used:  # the whole history is made of latents
        for layer in cache.kv_cache:
            layer.keys.fill_(float("nan"))
            layer.values.fill_(float("nan"))
    found = logits(cache, VariantStep(cache, Variant(**dict.fromkeys(used, True))), STEPS)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_undefined_logits_are_wrong() -> None:
    expected = torch.ones(3, 5)
    assert checked_error("dense", FULL, expected + 1e-5, expected, torch.float32) < 1e-4
    for wrong in (expected + 1e-3, expected * float("nan")):
        with pytest.raises(ThinrankError, match="no time is reported"):
            checked_error("dense", FULL, wrong, expected, torch.float32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": "gpt-2"}, "unknown shape 'gpt-2'"),
        ({"keep_ratio": 0}, "keep_ratio is 0"),
        ({"context_len": 15}, "context_len is 15: it must be at least 16"),
        ({"context_len": 32769}, "tiny has 32768 positions"),
        ({"num_iters": 0}, "num_iters is 0"),
        ({"num_iters_warmup": -1}, "num_iters_warmup is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"dtype": "auto"}, "unknown dtype 'auto'"),
        ({"device": "cpu"}, "the device is cpu: run it on a machine with an NVIDIA GPU"),
    ],
)
def test_options_out_of_range(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ablation(**{"shape": "tiny", "device": "cpu", **options})


@pytest.mark.gpu
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("structure", ["uniform", "dense"])
def test_graphs_compute_the_same(graph: str, pdl: bool, structure: str) -> None:
    """Bit for bit where the kernels are the same; latents are multiplied by PyTorch."""
    from thinrank.bench.variant_step import VariantStep

    cache, expected = filled_cache("qwen2", structure), eager_logits("qwen2", structure)
    assert torch.equal(
        logits(cache, VariantStep(cache, Variant(True, True, True, graph, pdl)), STEPS), expected
    )
    if structure == "uniform":
        found = logits(cache, VariantStep(cache, Variant(graph=graph, pdl=pdl)), STEPS)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
def test_a_report(tmp_path) -> None:
    file = tmp_path / "ablation.json"
    report = ablation("tiny", context_len=100, num_iters=2, num_iters_warmup=1, output_json=file)
    assert file.exists()
    assert [check.system for check in report.checks] == ["low-rank"] * 3 + ["dense"] * 3 + [
        "low-rank",
        "dense",
    ]
    assert len(report.rows) == len(comparisons(False)) + len(comparisons(True))
    layers = SHAPES["tiny"]["num_hidden_layers"]
    for row in report.rows:
        assert 0 < row.tpot_ms_p20 <= row.tpot_ms_p50 <= row.tpot_ms_p80
        expected = {"split": 3 * layers + 2, "layer": layers + 2, "model": 1}
        assert row.graph == "none" or row.launches_per_token == expected[row.graph]
    eager = {row.change: row for row in report.rows if row.system == "low-rank" and row.series == "without"}
    assert eager["graph=none"].launches_per_token == 9 * layers + 3
