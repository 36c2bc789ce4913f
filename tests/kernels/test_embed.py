"""embed: rows of the table, exactly, and what the first norm needs."""

import pytest
import torch

from kernels.gemv_inputs import DEVICE, Arena, close, parts

pytest.importorskip("triton")

from thinrank.kernels.embed import embed


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
