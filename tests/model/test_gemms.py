"""Projections as GEMMs on views of the arena, against the matrices themselves."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from thinrank.model.gemms import Gemms, multiply_into
from thinrank.model.packing import ArenaBuilder
from thinrank.model.registry import parse_config
from tiny_models import tiny_config

SIZES = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 96,  # k and v have 96 rows: no multiple of 64
    "num_hidden_layers": 1,
}
MODULES = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]


def build(ranks, ties=(), **changes):
    """Gemms of q, k and v and the weights that they stand for. ranks: None for a dense module. changes: to SIZES."""
    config = parse_config(tiny_config("llama", **(SIZES | changes)))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape.out_features, shape.in_features, generator=generator) * 0.1
        for name, shape in ((f"{name}.weight", shape) for name, shape in config.linears().items())
    }
    low_rank = {module: rank for module, rank in zip(MODULES, ranks, strict=True) if rank}
    for module, rank in low_rank.items():
        rows, width = tensors.pop(f"{module}.weight").shape
        tensors[f"{module}.factor_in.weight"] = torch.randn(rank, width, generator=generator) * 0.1
        tensors[f"{module}.factor_out.weight"] = torch.randn(rows, rank, generator=generator)
    tied = {f"{MODULES[a]}.factor_in.weight": f"{MODULES[b]}.factor_in.weight" for a, b in ties}
    for name, holder in tied.items():
        tensors[name] = tensors[holder]
    config = replace(config, ranks=low_rank, tied_factors=tied)
    builder = ArenaBuilder(config, tensors.__getitem__, torch.float32, torch.device("cpu"))
    packed = builder.projections(MODULES)
    weights = [
        tensors[f"{module}.factor_out.weight"] @ tensors[f"{module}.factor_in.weight"]
        if module in low_rank
        else tensors[f"{module}.weight"]
        for module in MODULES
    ]
    return Gemms.of(packed, builder.arena), weights


@pytest.mark.parametrize(
    ("ranks", "ties", "joined", "batches"),
    [
        ((33, 64, 7), (), 1, [1, 2]),  # k and v: 96 rows and a rank that is padded to 64
        ((33, 65, 7), (), 1, [1, 1, 1]),
        ((5, None, 70), (), 2, [1, 1, 1]),  # q and v lie one after the other
        ((None, 5, None), (), 2, [1, 1, 1]),  # k's factor and q
        ((None, None, None), (), 2, [1, 1, 1]),  # behind k there is a gap
        ((33, 20, 20), ((2, 1),), 2, [1, 1, 1]),
        ((33, 20, 33), ((2, 0),), 2, [1, 1, 1]),
    ],
)
def test_products(ranks, ties, joined, batches):
    """joined: into how many matrices those that read x can be joined. batches: how many projections each GEMM after
    them is for."""
    gemms, weights = build(ranks, ties)
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(1))
    outputs = gemms(x)
    assert len(gemms.readers) == joined
    assert sorted(len(output.projections) for output in gemms.outputs) == batches
    for output, weight in zip(outputs, weights, strict=True):
        assert output.stride(1) == 1
        torch.testing.assert_close(output, x @ weight.T, atol=1e-4, rtol=1e-4)


def test_three_of_one_shape_are_two_gemms():
    gemms, weights = build((5, 64, 30), num_key_value_heads=4)
    assert [len(output.projections) for output in gemms.outputs] == [3]
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(1))
    for output, weight in zip(gemms(x), weights, strict=True):
        torch.testing.assert_close(output, x @ weight.T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_for_logits_are_float32(dtype):
    """On a GPU the result is not rounded: float32 sums of exact products, 1e-5 apart at most; elsewhere to the inputs'
    dtype."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, matrix = (torch.randn(shape, device=device).to(dtype) for shape in ((3, 64), (64, 10)))
    out = torch.empty(3, 10, device=device)
    multiply_into(out, x, matrix)
    tolerance = 1e-5 if device == "cuda" or dtype == torch.float32 else 2**-8
    torch.testing.assert_close(out.double(), x.double() @ matrix.double(), atol=1e-5, rtol=tolerance)
