"""project and project_residual against float32 arithmetic: odd ranks, split sums, 16-bit weights, every batch size."""

import pytest
import torch

from kernels.gemv_inputs import DEVICE, HIDDEN, ON_GPU, WAYS, Arena, close, parts, residual

pytest.importorskip("triton")

from thinrank.kernels.project import project, project_residual
from thinrank.kernels.tuning import Launch, gemv_rule
from thinrank.kernels.workspace import SplitWorkspace


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


def large(*cases):
    """Sizes that the interpreter takes too long for."""
    return [pytest.param(*case, marks=pytest.mark.gpu) for case in cases]


@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=pytest.mark.gpu), torch.float16])
@pytest.mark.parametrize(("rank", "hidden_size"), [(1, 64), (57, 192), *large((33, 4096), (1492, 4096))])
@pytest.mark.usefixtures("ordered_dot")
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
