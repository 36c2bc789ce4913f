"""The most likely token of each row, and the step's own bookkeeping (the end of a decode step)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .gemv import wait_for_inputs

#: Logits that one program looks at.
BLOCK = 4096


def greedy_workspace(batch: int, vocab_size: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Scratch of `greedy`: values, indices and arrival counters."""
    chunks = triton.cdiv(vocab_size, BLOCK)
    return (
        torch.empty(batch, chunks, dtype=torch.float32, device=device),
        torch.empty(batch, chunks, dtype=torch.int32, device=device),
        torch.zeros(batch, dtype=torch.int32, device=device),
    )


def greedy(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    context_lens: torch.Tensor,
    history: torch.Tensor,
    workspace: tuple[torch.Tensor, ...],
    *,
    pdl: bool,
) -> None:
    """token_ids[b] = argmax(logits[b]), the lowest id among equals; positions and context_lens advance by one.

    logits: float32 [batch, vocab_size]. token_ids: int64 [batch]; positions, context_lens: int32 [batch].
    history: int64 [slots, batch]; the token also goes to slot `new position % slots`, so that the host can read it
    while the next step runs.
    A row that has a NaN, or no finite maximum, gets -1 in the history, which tells the host, and some id as its token.
    One launch: the last program of a row to arrive compares the others' results.
    """
    batch, vocab_size = logits.shape
    values, indices, arrived = workspace
    chunks = values.shape[1]
    _greedy_kernel[(chunks, batch)](
        logits, logits.stride(0), token_ids, positions, context_lens, values, indices, arrived, history,
        vocab_size, chunks,
        SLOTS=history.shape[0], SIZE=BLOCK, CHUNKS=triton.next_power_of_2(chunks), PDL=pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _greedy_kernel(
    logits, logits_stride, token_ids, positions, context_lens, values, indices, arrived, history, vocab_size, chunks,
    SLOTS: tl.constexpr, SIZE: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    chunk, row = tl.program_id(0), tl.program_id(1)
    columns = chunk * SIZE + tl.arange(0, SIZE)
    x = tl.load(logits + row * logits_stride + columns, mask=columns < vocab_size, other=float("-inf"))
    x = tl.where(x == x, x, float("inf"))
    best, index = tl.max(x, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(values + row * chunks + chunk, best)
    tl.store(indices + row * chunks + chunk, (chunk * SIZE + index).to(tl.int32))
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == chunks - 1:
        c = tl.arange(0, CHUNKS)
        all_best = tl.load(values + row * chunks + c, mask=c < chunks, other=float("-inf"), volatile=True)
        largest, winner = tl.max(all_best, axis=0, return_indices=True, return_indices_tie_break_left=True)
        token = tl.load(indices + row * chunks + winner, volatile=True).to(tl.int64)
        tl.store(token_ids + row, token)
        position = tl.load(positions + row) + 1
        tl.store(positions + row, position)
        defined = tl.abs(largest) < float("inf")
        tl.store(history + position % SLOTS * tl.num_programs(1) + row, tl.where(defined, token, -1))
        tl.store(context_lens + row, tl.load(context_lens + row) + 1)
        tl.store(arrived + row, 0)
