"""python benchmarks/kernels/greedy.py: the most likely token of each row."""

from collections.abc import Iterator
from functools import partial

import torch
from harness import DEVICE, Case, main

from thinrank.kernels import step_reference
from thinrank.kernels.greedy import greedy, greedy_workspace

#: Vocabulary and batch size: of LLaMA-7B, whatever its structure, Llama-3-8B, Qwen2.5-7B and Gemma 3.
SIZES = [(vocab_size, batch) for vocab_size in (32000, 128256, 152064, 262144) for batch in (1, 2, 4, 8)]
SMALL = [(5000, 3)]


def cases(vocab_size: int, batch: int) -> Iterator[Case]:
    logits = torch.randn(batch, vocab_size, device=DEVICE)
    token_ids = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
    positions = torch.full((batch,), 9, dtype=torch.int32, device=DEVICE)
    lengths, history = positions + 1, torch.zeros(8, batch, dtype=torch.int64, device=DEVICE)
    arguments = (logits, token_ids, positions, lengths, history)
    yield Case(
        f"greedy {vocab_size} x {batch}",
        partial(greedy, *arguments, greedy_workspace(batch, vocab_size, DEVICE), pdl=False),
        partial(step_reference.greedy, *arguments),
        outputs=(token_ids, positions, lengths, history),
        nbytes=logits.nbytes,
    )


if __name__ == "__main__":
    main(cases, SIZES)
