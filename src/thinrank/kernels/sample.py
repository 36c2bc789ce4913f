"""Draws the next token of the rows that sample, and puts it where the greedy choice was.

As `reference` does with `apply_temperature`, `filter_logits`, `philox_uniform` and `sample`, and to the same token:
probabilities are integers (`reference.token_weights`), whose sums do not depend on their order. Nothing is sorted.

Tokens are ordered by one integer, the bits of |logit - max| / temperature and then the id, so ties are broken as in
the reference, and top_k and top_p each come down to a last token that stays. It is found from a histogram: number
and weight of tokens in 2048 bins of logits; the tokens of the one bin where the limit falls are listed, and the
limit among them is found by bisection.

What it reads: the logits twice (once without top_k and top_p), spread over the GPU, and once more by one program a
row for each of the two filters. Very high temperatures put all tokens into few bins; that is slower and still right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gemv import wait_for_inputs
from .reference import WEIGHT_ONE

#: Logits that one program looks at, to find the limits of the filters and to draw.
CUTOFF_BLOCK, DRAW_BLOCK = 4096, 2048
#: Bins of 1/64 each: at 32 below the maximum the weight is 0.
BINS = 2048
#: Logits, and listed tokens, that the last program of a row takes at a time.
TILE, LIST_TILE = 8192, 1024

_ONE = tl.constexpr(WEIGHT_ONE)
_ID_BITS = tl.constexpr(20)
_BINS_PER_UNIT = tl.constexpr(64)
_EVERY = tl.constexpr(2**63 - 1)  # a cutoff above all tokens


class RowSampling(NamedTuple):
    """How each row chooses, in device memory.

    floats: float32 [3, batch]: temperature (0 keeps the most likely token), top_p, min_p. integers: int64 [3, batch]:
    top_k (0 or less: all), the 64 bits of the seed, the stream.
    """

    floats: Tensor
    integers: Tensor

    @staticmethod
    def allocate(batch: int, device: torch.device) -> RowSampling:
        """Rows that take the most likely token."""
        return RowSampling(
            torch.zeros(3, batch, dtype=torch.float32, device=device),
            torch.zeros(3, batch, dtype=torch.int64, device=device),
        )

    def load(
        self,
        temperature: Sequence[float],
        top_p: Sequence[float],
        min_p: Sequence[float],
        top_k: Sequence[int],
        seed: Sequence[int],
        stream: Sequence[int],
    ) -> None:
        """Set the first rows; those behind them take the most likely token. The host does not wait for the device."""
        rows = len(temperature)
        floats, integers = torch.zeros(self.floats.shape), torch.zeros(self.integers.shape, dtype=torch.int64)
        floats[:, :rows] = torch.tensor([temperature, top_p, min_p])
        integers[:, :rows] = torch.tensor([top_k, seed, stream])
        if self.floats.is_cuda:
            floats, integers = floats.pin_memory(), integers.pin_memory()
        self.floats.copy_(floats, non_blocking=True)
        self.integers.copy_(integers, non_blocking=True)


class SampleWorkspace(NamedTuple):
    """Scratch of `sample`. counts, masses and arrived are zero between launches."""

    cutoffs: Tensor  # int64 [batch]
    counts: Tensor  # int32 [batch, BINS]
    masses: Tensor  # int64 [batch, BINS]
    listed: Tensor  # int64 [2, batch, vocab_size]: tokens of a bin as their place in the order, their weights
    partials: Tensor  # int64 [batch, chunks]
    arrived: Tensor  # int32 [2, batch]

    @staticmethod
    def allocate(batch: int, vocab_size: int, device: torch.device) -> SampleWorkspace:
        """vocab_size: at most 2^20."""
        assert vocab_size <= 2**_ID_BITS.value
        return SampleWorkspace(
            torch.zeros(batch, dtype=torch.int64, device=device),
            torch.zeros(batch, BINS, dtype=torch.int32, device=device),
            torch.zeros(batch, BINS, dtype=torch.int64, device=device),
            torch.empty(2, batch, vocab_size, dtype=torch.int64, device=device),
            torch.empty(batch, triton.cdiv(vocab_size, DRAW_BLOCK), dtype=torch.int64, device=device),
            torch.zeros(2, batch, dtype=torch.int32, device=device),
        )


def sample(
    logits: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    history: Tensor,
    rows: RowSampling,
    workspace: SampleWorkspace,
    *,
    pdl: bool,
) -> None:
    """Replace what `greedy` chose in the rows whose temperature is above 0; the others stay.

    logits: float32 [batch, vocab_size]. token_ids: int64 [batch]. positions: int32 [batch], where the new token
    stands; with seed and stream it determines the random number. history: int64 [slots, batch]: the token is also in
    slot `position % slots`; a row whose logits `greedy` found undefined (-1) stays undefined.
    """
    batch, vocab_size = logits.shape
    chunks = workspace.partials.shape[1]
    _cutoff_kernel[(triton.cdiv(vocab_size, CUTOFF_BLOCK), batch)](
        logits, logits.stride(0), positions, history, rows.floats, rows.integers,
        workspace.cutoffs, workspace.counts, workspace.masses, workspace.listed[0], workspace.listed[1],
        workspace.arrived[0], vocab_size,
        SLOTS=history.shape[0], SIZE=CUTOFF_BLOCK, NUM_BINS=BINS, TILE=TILE, LIST_TILE=LIST_TILE, PDL=pdl,
        num_warps=16, launch_pdl=pdl,
    )  # fmt: skip
    _draw_kernel[(chunks, batch)](
        logits, logits.stride(0), token_ids, positions, history, rows.floats, rows.integers,
        workspace.cutoffs, workspace.partials, workspace.arrived[1], vocab_size,
        SLOTS=history.shape[0], SIZE=DRAW_BLOCK, CHUNKS=triton.next_power_of_2(chunks), PDL=pdl,
        num_warps=8, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _scaled(logits, columns, vocab_size, best, temperature):
    """(logit - best) / temperature, at most 0; -inf outside the vocabulary."""
    x = tl.load(logits + columns, mask=columns < vocab_size, other=float("-inf"))
    return tl.div_rn(x - best, temperature)


@triton.jit
def _weight(scaled):
    """`reference.token_weights`: int64."""
    return (tl.exp(scaled.to(tl.float64)) * _ONE).to(tl.int64)


@triton.jit
def _order(scaled, columns):
    """Where a token stands among all of its row: the more likely before the less, then the lower id."""
    return (tl.abs(scaled).to(tl.int32, bitcast=True).to(tl.int64) << _ID_BITS) | columns


@triton.jit
def _bin(scaled, NUM_BINS: tl.constexpr):
    """NUM_BINS for a token that is in none; its weight is 0."""
    return tl.minimum(tl.abs(scaled) * _BINS_PER_UNIT, NUM_BINS).to(tl.int32)


@triton.jit
def _cutoff_kernel(
    logits, logits_stride, positions, history, floats, integers,
    cutoffs, counts, masses, listed, listed_weights, arrived, vocab_size,
    SLOTS: tl.constexpr, SIZE: tl.constexpr, NUM_BINS: tl.constexpr, TILE: tl.constexpr, LIST_TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """cutoffs[row]: the place in the order of the last token that top_k and top_p let stay."""
    wait_for_inputs(PDL)
    chunk, row, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    temperature, top_p = tl.load(floats + row), tl.load(floats + batch + row)
    top_k = tl.load(integers + row)
    greedy = tl.load(history + tl.load(positions + row) % SLOTS * batch + row)
    if (temperature > 0) & (greedy >= 0):
        if (top_k > 0) | (top_p < 1):
            logits += row * logits_stride
            counts += row * NUM_BINS
            masses += row * NUM_BINS
            best = tl.load(logits + greedy)
            temperature = tl.maximum(temperature, 1e-10)
            scaled = _scaled(logits, chunk * SIZE + tl.arange(0, SIZE), vocab_size, best, temperature)
            place = _bin(scaled, NUM_BINS)
            counted = place < NUM_BINS
            tl.atomic_add(counts + place, tl.full([SIZE], 1, tl.int32), mask=counted, sem="relaxed")
            tl.atomic_add(masses + place, _weight(scaled), mask=counted, sem="relaxed")
            tl.debug_barrier()
            if tl.atomic_add(arrived + row, 1, sem="acq_rel") == tl.num_programs(0) - 1:
                tl.store(arrived + row, 0)
                bins = tl.arange(0, NUM_BINS)
                count = tl.load(counts + bins, volatile=True).to(tl.int64)
                mass = tl.load(masses + bins, volatile=True)
                tl.store(counts + bins, 0)
                tl.store(masses + bins, 0)
                listed += row * vocab_size
                listed_weights += row * vocab_size
                cutoff = tl.full([], _EVERY, tl.int64)
                total = tl.sum(mass)
                if top_k > 0:
                    cutoff, total = _cut(
                        count, mass, top_k, logits, vocab_size, best, temperature, listed, listed_weights,
                        False, NUM_BINS, TILE, LIST_TILE,
                    )  # fmt: skip
                if top_p < 1:
                    limit = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
                    cutoff, total = _cut(
                        count, mass, limit, logits, vocab_size, best, temperature, listed, listed_weights,
                        True, NUM_BINS, TILE, LIST_TILE,
                    )  # fmt: skip
                tl.store(cutoffs + row, cutoff)
        else:
            tl.store(cutoffs + row, _EVERY)


@triton.jit
def _cut(
    count, mass, limit, logits, vocab_size, best, temperature, listed, listed_weights,
    BY_MASS: tl.constexpr, NUM_BINS: tl.constexpr, TILE: tl.constexpr, LIST_TILE: tl.constexpr,
):  # fmt: skip
    """The first token with which `limit` tokens, or a mass of `limit`, is reached; and the mass up to there.

    If the bins do not reach it, every token stays: those in no bin have no mass.
    """
    amount = mass if BY_MASS else count
    bins = tl.arange(0, NUM_BINS)
    place = tl.sum((tl.cumsum(amount, 0) < limit).to(tl.int32))
    cutoff = tl.full([], _EVERY, tl.int64)
    total = tl.sum(mass)
    if place < NUM_BINS:
        missing = limit - tl.sum(tl.where(bins < place, amount, 0))
        total = tl.sum(tl.where(bins < place, mass, 0))
        number = _list_bin(place, logits, vocab_size, best, temperature, listed, NUM_BINS, TILE)
        low, high = _weigh_list(number, listed, listed_weights, LIST_TILE)
        while low < high:
            middle = low + ((high - low) >> 1)
            reached = _sum_list(number, listed, listed_weights, middle, BY_MASS, LIST_TILE) >= missing
            high = tl.where(reached, middle, high)
            low = tl.where(reached, low, middle + 1)
        cutoff = low
        total += _sum_list(number, listed, listed_weights, low, True, LIST_TILE)
    return cutoff, total


@triton.jit
def _list_bin(
    place, logits, vocab_size, best, temperature, listed, NUM_BINS: tl.constexpr, TILE: tl.constexpr
):
    """Write down the tokens of one bin, as their places in the order; how many there are."""
    number = tl.full([], 0, tl.int32)
    for start in range(0, vocab_size, TILE):
        columns = start + tl.arange(0, TILE)
        scaled = _scaled(logits, columns, vocab_size, best, temperature)
        inside = (_bin(scaled, NUM_BINS) == place).to(tl.int32)
        at = number + tl.cumsum(inside, 0) - inside
        tl.store(listed + at, _order(scaled, columns), mask=inside > 0)
        number += tl.sum(inside)
    tl.debug_barrier()
    return number


@triton.jit
def _weigh_list(number, listed, listed_weights, LIST_TILE: tl.constexpr):
    """Write down the weights of the listed tokens; the first and the last of them in the order."""
    first = tl.full([], _EVERY, tl.int64)
    last = tl.full([], 0, tl.int64)
    for start in range(0, number, LIST_TILE):
        at = start + tl.arange(0, LIST_TILE)
        order = tl.load(listed + at, mask=at < number, other=0)
        scaled = -(order >> _ID_BITS).to(tl.int32).to(tl.float32, bitcast=True)
        tl.store(listed_weights + at, _weight(scaled), mask=at < number)
        first = tl.minimum(first, tl.min(tl.where(at < number, order, _EVERY)))
        last = tl.maximum(last, tl.max(order))
    tl.debug_barrier()
    return first, last


@triton.jit
def _sum_list(number, listed, listed_weights, last, BY_MASS: tl.constexpr, LIST_TILE: tl.constexpr):
    """Number or mass of the listed tokens up to `last` in the order."""
    amount = tl.full([], 0, tl.int64)
    for start in range(0, number, LIST_TILE):
        at = start + tl.arange(0, LIST_TILE)
        counted = tl.load(listed + at, mask=at < number, other=_EVERY) <= last
        if BY_MASS:
            amount += tl.sum(tl.load(listed_weights + at, mask=counted, other=0))
        else:
            amount += tl.sum(counted.to(tl.int64))
    return amount


@triton.jit
def _draw_kernel(
    logits, logits_stride, token_ids, positions, history, floats, integers, cutoffs, partials, arrived, vocab_size,
    SLOTS: tl.constexpr, SIZE: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Weights of chunks; the last program of a row to arrive finds the chunk where the drawn number falls."""
    wait_for_inputs(PDL)
    chunk, row, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    chunks = tl.num_programs(0)
    temperature, min_p = tl.load(floats + row), tl.load(floats + 2 * batch + row)
    position = tl.load(positions + row)
    history += position % SLOTS * batch + row
    greedy = tl.load(history)
    if (temperature > 0) & (greedy >= 0):
        logits += row * logits_stride
        partials += row * chunks
        best, cutoff = tl.load(logits + greedy), tl.load(cutoffs + row)
        temperature = tl.maximum(temperature, 1e-10)
        weights = _kept_weights(logits, chunk, vocab_size, best, temperature, min_p, cutoff, SIZE)
        tl.store(partials + chunk, tl.sum(weights))
        tl.debug_barrier()
        if tl.atomic_add(arrived + row, 1, sem="acq_rel") == chunks - 1:
            tl.store(arrived + row, 0)
            each = tl.arange(0, CHUNKS)
            partial = tl.load(partials + each, mask=each < chunks, other=0, volatile=True)
            seed, stream = tl.load(integers + batch + row), tl.load(integers + 2 * batch + row)
            zero = position * 0
            word, _, _, _ = tl.philox(seed, position, stream.to(tl.int32), zero, zero)
            uniform = (word >> 8).to(tl.float64) * 2.0**-24
            target = (uniform * tl.sum(partial).to(tl.float64)).to(tl.int64)
            drawn = tl.sum((tl.cumsum(partial, 0) <= target).to(tl.int32))
            target -= tl.sum(tl.where(each < drawn, partial, 0))
            weights = _kept_weights(logits, drawn, vocab_size, best, temperature, min_p, cutoff, SIZE)
            chosen = drawn * SIZE + tl.sum((tl.cumsum(weights, 0) <= target).to(tl.int32))
            tl.store(token_ids + row, chosen)
            tl.store(history, chosen)


@triton.jit
def _kept_weights(logits, chunk, vocab_size, best, temperature, min_p, cutoff, SIZE: tl.constexpr):
    """Weights of a chunk of tokens, 0 for those that a filter takes out."""
    columns = chunk * SIZE + tl.arange(0, SIZE)
    scaled = _scaled(logits, columns, vocab_size, best, temperature)
    weights = _weight(scaled)
    kept = (_order(scaled, columns) <= cutoff) & (weights.to(tl.float64) >= min_p.to(tl.float64) * _ONE)
    return tl.where(kept, weights, 0)
