"""greedy: the most likely token, ties, undefined logits, and the state that advances."""

import pytest
import torch

from kernels.gemv_inputs import DEVICE

pytest.importorskip("triton")

from thinrank.kernels.greedy import greedy, greedy_workspace


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
