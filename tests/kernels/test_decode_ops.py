"""The GEMV ops of a decode step against float32 arithmetic: odd ranks, both ways to multiply, split sums.

Tolerance: 1e-4 absolute on sums of order one; float32 sums in another order.
"""

import pytest
import torch

pytest.importorskip("triton")

from thinrank.kernels import reference as ops
from thinrank.kernels.embed import embed
from thinrank.kernels.greedy import greedy, greedy_workspace
from thinrank.kernels.norm_project import norm_project
from thinrank.kernels.project import project, project_residual
from thinrank.kernels.project_rope import project_rope
from thinrank.kernels.project_silu_mul import project_silu_mul
from thinrank.kernels.segments import Segments
from thinrank.kernels.tuning import GemvConfig
from thinrank.kernels.workspace import SplitWorkspace

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HIDDEN, HEAD_DIM, EPS = 128, 64, 1e-5

#: (vector, splits, batch): batch 1 in both ways, larger ones on tensor cores.
WAYS = [(True, 1, 1), (False, 1, 1), (False, 2, 3), (False, 4, 8)]


def settings(vector, splits, rows=16):
    return GemvConfig(vector, 4 if vector and rows != 16 else 16, 32, 2, splits, 2 if vector else 1)


class Arena:
    """Matrices with NaN everywhere else, so that a read outside shows."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)
        self.data = torch.full((400_000,), float("nan"), device=DEVICE)
        self.end = 64

    def place(self, rows, width):
        """A random matrix, columns padded with zeros to a multiple of 64; returns (offset, padded width, matrix)."""
        matrix = torch.randn(rows, width, generator=self.generator).to(DEVICE) * width**-0.5
        padded, offset = -(-width // 64) * 64, self.end
        view = self.data[offset : offset + rows * padded].view(rows, padded)
        view.zero_()
        view[:, :width] = matrix
        self.end += rows * padded + 64
        return offset, padded, matrix

    def randn(self, *shape):
        return torch.randn(shape, generator=self.generator).to(DEVICE)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def residual(arena, batch):
    """hidden, norm, and what the kernels keep of them: scaled and squares."""
    hidden, norm = arena.randn(batch, HIDDEN), arena.randn(HIDDEN)
    squares = hidden.square().view(batch, -1, 16).sum(-1).contiguous()
    return hidden, norm, hidden * norm, squares


@pytest.mark.parametrize(("vector", "splits", "batch"), WAYS)
@pytest.mark.parametrize("ranks", [(1,), (33, 57), (64, 1, 92)])
def test_norm_project(vector, splits, batch, ranks):
    arena = Arena()
    hidden, norm, scaled, squares = residual(arena, batch)
    entries, matrices, position = [], [], 0
    for rank in ranks:
        offset, width, matrix = arena.place(rank, HIDDEN)
        entries.append((offset, rank, width, 0, position))
        matrices.append((position, matrix))
        position += -(-rank // 64) * 64
    out = torch.full((batch, position), -7.0, device=DEVICE)
    workspace = SplitWorkspace.allocate(256, splits, DEVICE)
    for _ in range(2):  # the counters must be back at zero for the next launch
        norm_project(
            scaled, squares, EPS, arena.data, Segments.of(entries), out, workspace,
            config=settings(vector, splits, 4), pdl=False,
        )  # fmt: skip
        normed = ops.rms_norm(hidden, norm, EPS)
        for start, matrix in matrices:
            close(out[:, start : start + len(matrix)], normed @ matrix.T)
    untouched = torch.ones(position, dtype=torch.bool)
    for start, matrix in matrices:
        untouched[start : start + len(matrix)] = False
    assert (out[:, untouched] == -7).all()


@pytest.mark.parametrize(("vector", "splits", "batch"), WAYS)
@pytest.mark.parametrize("rank", [1, 57, 149])
def test_project_and_back(vector, splits, batch, rank):
    arena = Arena()
    x = arena.randn(batch, 192)
    offset, width, factor_in = arena.place(rank, 192)
    latents = torch.zeros(batch, 256, device=DEVICE)
    workspace = SplitWorkspace.allocate(256, splits, DEVICE)
    project(
        x, arena.data, offset, rank, width, latents, workspace, config=settings(vector, splits, 4), pdl=False
    )
    close(latents[:, :rank], x @ factor_in.T)

    offset, width, factor_out = arena.place(HIDDEN, rank)
    hidden, norm, scaled, squares = residual(arena, batch)
    bias = arena.randn(HIDDEN)
    expected = hidden + latents[:, :rank] @ factor_out.T + bias
    project_residual(
        latents, arena.data, offset, HIDDEN, width, bias, hidden, norm, scaled, squares, workspace,
        config=settings(vector, splits), pdl=False,
    )  # fmt: skip
    close(hidden, expected)
    close(scaled, expected * norm)
    close(squares, expected.square().view(batch, -1, 16).sum(-1))


@pytest.mark.parametrize(("vector", "batch"), [(True, 1), (False, 1), (False, 5)])
@pytest.mark.parametrize("ranks", [(33, 130), (None, 57), (None, None)])
def test_project_silu_mul(vector, batch, ranks):
    """A rank of None is a dense module, which reads the normed vector."""
    arena = Arena()
    hidden, norm, scaled, squares = residual(arena, batch)
    normed, rows = ops.rms_norm(hidden, norm, EPS), 90
    latents = arena.randn(batch, 256)
    entries, expected = [], []
    for index, rank in enumerate(ranks):
        offset, width, matrix = arena.place(rows, rank or HIDDEN)
        start = -1 if rank is None else index * 64
        entries.append((offset, rows, width, start, 0))
        expected.append((normed if rank is None else latents[:, start : start + rank]) @ matrix.T)
    bias = arena.randn(2, rows)
    out = torch.empty(batch, rows, device=DEVICE)
    project_silu_mul(
        latents, scaled, squares, EPS, arena.data, Segments.of(entries), bias, out,
        config=settings(vector, 1, 4), pdl=False,
    )  # fmt: skip
    close(out, ops.silu_mul(expected[0] + bias[0], expected[1] + bias[1]))


@pytest.mark.parametrize(("vector", "batch"), [(True, 1), (False, 3)])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("ranks", [(33, 57, 1), (None, 57, None)])
def test_project_rope(vector, batch, qk_norm, ranks):
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
    config = settings(vector, 1, 4)
    project_rope(
        latents, scaled, squares, EPS, arena.data, Segments.of(entries), bias, norms, rotation,
        queries, keys, values, positions, tables, config=config, pdl=False,
    )  # fmt: skip
    close(queries.view(batch, heads, HEAD_DIM), q)
    for row, position in enumerate(positions.tolist()):
        block, place = tables[row, position // 64], position % 64
        close(keys[block, :, place], k[row])
        close(values[block, :, place], v[row])
    assert (keys == -7).sum() == keys.numel() - batch * kv_heads * HEAD_DIM


@pytest.mark.parametrize("hidden_size", [64, 1088])
def test_embed(hidden_size):
    arena = Arena()
    table, norm = arena.randn(11, hidden_size), arena.randn(hidden_size)
    token_ids = torch.tensor([10, 0, 3], device=DEVICE)
    hidden, scaled = (torch.empty(3, hidden_size, device=DEVICE) for _ in range(2))
    squares = torch.empty(3, hidden_size // 16, device=DEVICE)
    embed(token_ids, table, norm, hidden, scaled, squares, pdl=False)
    assert torch.equal(hidden, table[token_ids])
    close(scaled, hidden * norm)
    close(squares, hidden.square().view(3, -1, 16).sum(-1))


@pytest.mark.parametrize("vocab_size", [5, 4096, 9001])
def test_greedy(vocab_size):
    """The lowest id among equals wins, NaN never does, and the state advances."""
    logits = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    logits[1] = 2.0
    logits[2, 0], logits[2, vocab_size - 1] = float("nan"), 99.0
    token_ids = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    positions = torch.tensor([0, 6, 7, 40], dtype=torch.int32, device=DEVICE)
    lengths, history = positions + 1, torch.zeros(8, 4, dtype=torch.int64, device=DEVICE)
    workspace = greedy_workspace(4, vocab_size, DEVICE)
    for step in range(2):
        greedy(logits, token_ids, positions, lengths, history, workspace, pdl=False)
        expected = logits.nan_to_num(float("-inf")).argmax(-1).tolist()
        expected[1] = 0
        assert token_ids.tolist() == expected
        assert positions.tolist() == [1 + step, 7 + step, 8 + step, 41 + step]
        assert lengths.tolist() == [2 + step, 8 + step, 9 + step, 42 + step]
        assert [history[p % 8, row].item() for row, p in enumerate(positions.tolist())] == expected
