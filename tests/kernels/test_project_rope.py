"""project_rope against float32 arithmetic: low-rank and dense modules, biases, q/k norm, blocks."""

import pytest
import torch

from kernels.gemv_inputs import DEVICE, EPS, HEAD_DIM, HIDDEN, UNSPLIT, Arena, close, parts, residual

pytest.importorskip("triton")

from thinrank.kernels import reference as ops
from thinrank.kernels.project_rope import project_rope
from thinrank.kernels.segments import Segments


@pytest.mark.parametrize(("config", "batch"), UNSPLIT)
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("ranks", [(33, 57, 1), (None, 57, None)])
def test_project_rope(config, batch, qk_norm, ranks):
    arena = Arena()
    heads, kv_heads = 2, 1
    hidden, norm, scaled, squares = residual(arena, batch)
    normed, latents = ops.rms_norm(hidden, norm, EPS), arena.randn(batch, 256)
    entries, outputs = [], []
    for index, rank in enumerate(ranks):
        rows = (heads if index == 0 else kv_heads) * HEAD_DIM
        offset, width, matrix = arena.place(rows, rank or HIDDEN)
        entries.append((offset, rows, width, -1 if rank is None else index * 64, 0))
        x = normed if rank is None else latents[:, index * 64 : index * 64 + rank]
        outputs.append((x @ matrix.T).view(batch, -1, HEAD_DIM))
    bias = arena.randn((heads + 2 * kv_heads) * HEAD_DIM)
    q, k, v = (
        output + part.view(-1, HEAD_DIM)
        for output, part in zip(outputs, bias.split([heads * HEAD_DIM, HEAD_DIM, HEAD_DIM]), strict=True)
    )
    norms = arena.randn(2, HEAD_DIM) if qk_norm else None
    if norms is not None:
        q, k = ops.rms_norm(q, norms[0], EPS), ops.rms_norm(k, norms[1], EPS)
    rotation = arena.randn(200, 2, HEAD_DIM // 2)
    positions = torch.tensor([70, 3, 129][:batch], dtype=torch.int32, device=DEVICE)
    cos, sin = rotation[positions.long()].unbind(1)
    q, k = ops.apply_rope(q, cos, sin), ops.apply_rope(k, cos, sin)

    tables = torch.tensor([[4, 2, 5], [1, 0, 0], [3, 6, 7]][:batch], dtype=torch.int32, device=DEVICE)
    keys, values = (torch.full((8, kv_heads, 64, HEAD_DIM), -7.0, device=DEVICE) for _ in range(2))
    queries = torch.empty(batch, heads * HEAD_DIM, device=DEVICE)
    project_rope(
        parts(latents), scaled, squares, EPS, arena.data, Segments.of(entries), bias, norms, rotation,
        queries, keys, values, positions, tables, config=config, pdl=False,
    )  # fmt: skip
    close(queries.view(batch, heads, HEAD_DIM), q)
    for row, position in enumerate(positions.tolist()):
        block, place = tables[row, position // 64], position % 64
        close(keys[block, :, place], k[row])
        close(values[block, :, place], v[row])
    assert (keys == -7).sum() == keys.numel() - batch * kv_heads * HEAD_DIM
