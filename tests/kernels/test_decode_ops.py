"""The GEMV ops of a decode step against float32 arithmetic: odd ranks, split sums, every batch size.

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
from thinrank.kernels.tuning import GemvConfig, Launch, gemv_rule
from thinrank.kernels.workspace import SplitWorkspace

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
HIDDEN, HEAD_DIM, EPS = 128, 64, 1e-5

WAYS = [(GemvConfig(1, 1, 16), 1), (GemvConfig(2, 1, 16, splits=2), 3), (GemvConfig(1, 2, 16, splits=4), 8)]
NARROW = [(GemvConfig(2, 1, 8), 3), (GemvConfig(1, 1, 8, splits=2), 8)]
UNSPLIT = [(GemvConfig(1, 1), 1), (GemvConfig(2, 1), 3)]


def large(*cases):
    """Sizes that the interpreter takes too long for."""
    return [pytest.param(*case, marks=pytest.mark.gpu) for case in cases]


class Arena:
    """Matrices with NaN everywhere else, so that a read outside shows."""

    def __init__(self, size=400_000, dtype=torch.float32):
        self.generator = torch.Generator().manual_seed(0)
        self.data = torch.full((size,), float("nan"), dtype=dtype, device=DEVICE)
        self.end = 64

    def place(self, rows, width):
        """A random matrix, columns padded with zeros to a multiple of 64; returns (offset, padded width, matrix)."""
        matrix = (torch.randn(rows, width, generator=self.generator).to(DEVICE) * width**-0.5).to(
            self.data.dtype
        )
        padded, offset = -(-width // 64) * 64, self.end
        view = self.data[offset : offset + rows * padded].view(rows, padded)
        view.zero_()
        view[:, :width] = matrix
        self.end += rows * padded + 64
        return offset, padded, matrix

    def randn(self, *shape):
        return torch.randn(shape, generator=self.generator).to(DEVICE)


def parts(x, dtype=None):
    return ops.in_two_parts(x, dtype or x.dtype)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def residual(arena, batch):
    """hidden, norm, and what the kernels keep of them: scaled and squares."""
    hidden, norm = arena.randn(batch, HIDDEN), arena.randn(HIDDEN)
    squares = hidden.square().view(batch, -1, 16).sum(-1).contiguous()
    return hidden, norm, parts(hidden * norm), squares


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


@pytest.mark.parametrize(("config", "batch"), WAYS)
@pytest.mark.parametrize("rank", [1, 57, 149])
def test_project_and_back(config, batch, rank):
    arena = Arena()
    x = arena.randn(batch, 192)
    offset, width, factor_in = arena.place(rank, 192)
    latents = torch.zeros(batch, 2, 256, device=DEVICE)
    workspace = SplitWorkspace.allocate(256, config.splits, DEVICE)
    for rows in (8, 16):
        latents.fill_(7.0)
        project(
            parts(x), arena.data, offset, rank, width, latents, workspace,
            config=config._replace(rows=rows), pdl=False,
        )  # fmt: skip
        close(latents[:, :, :rank], parts(x @ factor_in.T))

    offset, width, factor_out = arena.place(HIDDEN, rank)
    hidden, norm, scaled, squares = residual(arena, batch)
    bias = arena.randn(HIDDEN)
    expected = hidden + latents[:, :, :rank].sum(1) @ factor_out.T + bias
    project_residual(
        latents, arena.data, offset, HIDDEN, width, bias, hidden, norm, scaled, squares, workspace,
        config=config, pdl=False,
    )  # fmt: skip
    close(hidden, expected)
    close(scaled, parts(expected * norm))
    close(squares, expected.square().view(batch, -1, 16).sum(-1))


@pytest.mark.parametrize(("config", "batch"), UNSPLIT)
@pytest.mark.parametrize("ranks", [(33, 130), (None, 57), (None, None)])
def test_project_silu_mul(config, batch, ranks):
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
    out = torch.empty(batch, 2, rows, device=DEVICE)
    project_silu_mul(
        parts(latents), scaled, squares, EPS, arena.data, Segments.of(entries), bias, out,
        config=config, pdl=False,
    )  # fmt: skip
    close(out, parts(ops.silu_mul(expected[0] + bias[0], expected[1] + bias[1])))


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


@pytest.mark.parametrize("hidden_size", [64, 1088])
def test_embed(hidden_size):
    arena = Arena()
    table, norm = arena.randn(11, hidden_size), arena.randn(hidden_size)
    token_ids = torch.tensor([10, 0, 3], device=DEVICE)
    hidden, scaled = torch.empty(3, hidden_size, device=DEVICE), torch.empty(3, 2, hidden_size, device=DEVICE)
    squares = torch.empty(3, hidden_size // 16, device=DEVICE)
    embed(token_ids, table, norm, hidden, scaled, squares, pdl=False)
    assert torch.equal(hidden, table[token_ids])
    close(scaled, parts(hidden * norm))
    close(squares, hidden.square().view(3, -1, 16).sum(-1))


@pytest.mark.parametrize("vocab_size", [5, 4096, 9001])
def test_greedy(vocab_size):
    """The lowest id among equals wins, -inf never does, and the state advances."""
    logits = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    logits[1] = 2.0
    logits[2, 0], logits[2, vocab_size - 1] = float("-inf"), 99.0
    token_ids = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    positions = torch.tensor([0, 6, 7, 40], dtype=torch.int32, device=DEVICE)
    lengths, history = positions + 1, torch.zeros(8, 4, dtype=torch.int64, device=DEVICE)
    workspace = greedy_workspace(4, vocab_size, DEVICE)
    for step in range(2):
        greedy(logits, token_ids, positions, lengths, history, workspace, pdl=False)
        expected = logits.argmax(-1).tolist()
        expected[1] = 0
        assert token_ids.tolist() == expected
        assert positions.tolist() == [1 + step, 7 + step, 8 + step, 41 + step]
        assert lengths.tolist() == [2 + step, 8 + step, 9 + step, 42 + step]
        assert [history[p % 8, row].item() for row, p in enumerate(positions.tolist())] == expected


@pytest.mark.parametrize("place", [0, 4095, 4096, 9000])
def test_greedy_marks_undefined_logits(place):
    """NaN, infinity and a row without any token: -1 for the host, an id that exists for the next step."""
    logits = torch.zeros(4, 9001, device=DEVICE)
    logits[0, place], logits[1, place], logits[2] = float("nan"), float("inf"), float("-inf")
    token_ids = torch.full((4,), -7, dtype=torch.int64, device=DEVICE)
    positions = torch.full((4,), 3, dtype=torch.int32, device=DEVICE)
    history = torch.zeros(8, 4, dtype=torch.int64, device=DEVICE)
    greedy(logits, token_ids, positions, positions + 1, history, greedy_workspace(4, 9001, DEVICE), pdl=False)
    assert history[4].tolist() == [-1, -1, -1, 0]
    assert all(0 <= token < 9001 for token in token_ids.tolist())


@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=pytest.mark.gpu), torch.float16])
@pytest.mark.parametrize(("rank", "hidden_size"), [(1, 64), (57, 192), *large((33, 4096), (1492, 4096))])
def test_16_bit_weights(dtype, rank, hidden_size):
    """Launched as in a step, with the rule's settings: float32 arithmetic on the same weights, and the same bits at
    every batch size.

    Tolerance: inputs and results have two parts of 16 bits, together at least 16 bits of mantissa.
    """
    arena = Arena(3 * (rank + 64) * (hidden_size + 64) + 100_000, dtype)
    factor_in, (back, back_width, factor_out) = arena.place(rank, hidden_size), arena.place(hidden_size, rank)
    hidden, norm, inputs = arena.randn(8, hidden_size), arena.randn(hidden_size), arena.randn(8, hidden_size)

    def step(batch):
        """latents, residual stream and its scaled copy."""
        latents = torch.zeros(batch, 2, back_width, dtype=dtype, device=DEVICE)
        workspace = SplitWorkspace.allocate(hidden_size, 8, DEVICE)
        stream, scaled = (
            hidden[:batch].clone(),
            torch.empty(batch, 2, hidden_size, dtype=dtype, device=DEVICE),
        )
        squares = torch.empty(batch, hidden_size // 16, device=DEVICE)
        offset, width, _ = factor_in
        project(
            parts(inputs[:batch], dtype), arena.data, offset, rank, width, latents, workspace,
            config=gemv_rule(Launch("project", rank, width)), pdl=ON_GPU,
        )  # fmt: skip
        project_residual(
            latents, arena.data, back, hidden_size, back_width, None, stream, norm, scaled, squares, workspace,
            config=gemv_rule(Launch("project_residual", hidden_size, back_width)), pdl=ON_GPU,
        )  # fmt: skip
        return latents, stream, scaled

    latents, stream, scaled = step(8)
    expected = inputs @ factor_in[2].float().T
    torch.testing.assert_close(latents[:, :, :rank].float().sum(1), expected, atol=1e-4, rtol=1e-4)
    expected = hidden + expected @ factor_out.float().T
    torch.testing.assert_close(stream, expected, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(scaled.float().sum(1), expected * norm, atol=5e-4, rtol=5e-4)
    for batch in (1, 2, 4):
        for alone, together in zip(step(batch), (latents, stream, scaled), strict=True):
            assert torch.equal(alone, together[:batch])
