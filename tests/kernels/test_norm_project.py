"""norm_project against float32 arithmetic: odd ranks, split sums, several matrices in a launch."""

import pytest
import torch

from kernels.gemv_inputs import DEVICE, EPS, HIDDEN, NARROW, WAYS, Arena, close, parts, residual

pytest.importorskip("triton")

from thinrank.kernels import reference as ops
from thinrank.kernels.norm_project import norm_project
from thinrank.kernels.segments import Segments
from thinrank.kernels.workspace import SplitWorkspace


@pytest.mark.parametrize(("config", "batch"), WAYS + NARROW)
@pytest.mark.parametrize("ranks", [(1,), (33, 57), (64, 1, 92)])
def test_norm_project(config, batch, ranks):
    arena = Arena()
    hidden, norm, scaled, squares = residual(arena, batch)
    entries, matrices, position = [], [], 0
    for rank in ranks:
        offset, width, matrix = arena.place(rank, HIDDEN)
        entries.append((offset, rank, width, 0, position))
        matrices.append((position, matrix))
        position += -(-rank // 64) * 64
    out = torch.full((batch, 2, position), -7.0, device=DEVICE)
    workspace = SplitWorkspace.allocate(256, config.splits, DEVICE)
    for _ in range(2):  # the counters must be back at zero for the next launch
        norm_project(
            scaled, squares, EPS, arena.data, Segments.of(entries), out, workspace,
            config=config, pdl=False,
        )  # fmt: skip
        normed = ops.rms_norm(hidden, norm, EPS)
        for start, matrix in matrices:
            close(out[:, :, start : start + len(matrix)], parts(normed @ matrix.T))
    untouched = torch.ones(position, dtype=torch.bool)
    for start, matrix in matrices:
        untouched[start : start + len(matrix)] = False
    assert (out[:, :, untouched] == -7).all()
