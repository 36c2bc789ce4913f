"""project_silu_mul against float32 arithmetic: low-rank and dense modules, biases."""

import pytest
import torch

from kernels.gemv_inputs import DEVICE, EPS, HIDDEN, UNSPLIT, Arena, close, parts, residual

pytest.importorskip("triton")

from thinrank.kernels import reference as ops
from thinrank.kernels.project_silu_mul import project_silu_mul
from thinrank.kernels.segments import Segments


@pytest.mark.parametrize(("config", "batch"), UNSPLIT)
@pytest.mark.parametrize("ranks", [(33, 130), (None, 57), (None, None), (700, 65), (65, 700)])
def test_project_silu_mul(config, batch, ranks):
    """A rank of None is a dense module, which reads the normed vector. The larger of two ranks goes on alone, where
    there is a round left of it."""
    arena = Arena()
    hidden, norm, scaled, squares = residual(arena, batch)
    normed, rows = ops.rms_norm(hidden, norm, EPS), 90
    latents = arena.randn(batch, 1024)
    entries, expected = [], []
    for index, rank in enumerate(ranks):
        offset, width, matrix = arena.place(rows, rank or HIDDEN)
        start = -1 if rank is None else index * 64
        entries.append((offset, rows, width, start, 0))
        expected.append((normed if rank is None else latents[:, start : start + rank]) @ matrix.T)
    bias = arena.randn(2, rows)
    out = torch.empty(batch, 2, rows, device=DEVICE)
    project_silu_mul(
        parts(latents), scaled, squares, EPS, arena.data, Segments.of(entries), bias, out,
        config=config, pdl=False,
    )  # fmt: skip
    close(out, parts(ops.silu_mul(expected[0] + bias[0], expected[1] + bias[1])))
