"""What the decode GEMVs share: two ways to multiply, split sums, the norm's scale, the launch barrier.

Weights live in one arena, a flat tensor; a matrix is an offset into it with rows of K numbers, K a multiple of 64.
A program multiplies ROWS rows.

VECTOR, for batch 1: every thread adds its products in a register of its own, summed at the end, while the next
AHEAD tiles are on their way. Otherwise, for batches up to 8, tensor cores: each of the SLICES warps takes a slice
of the columns, the batch rows are the columns of the product, so that a batch of 8 takes as long as one of 2.

On an H200, 32 different matrices in a row, microseconds at batch 1 / 8: 22016 x 1536 16.8 / 63 by vectors, 19.6 /
20.3 on tensor cores; 1024 x 4096 3.6 / 13.5 and 5.5 / 5.5. In either way the order of summation depends on the
matrix and the settings alone, never on other rows of the batch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

#: Squares of the residual stream are summed in groups of this many channels.
SQUARES_GROUP = 16


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Block until the kernels before this one have finished, then let the next one start its prologue."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def load_tile(
    arena, offset, rows, row_mask, k, K, end,
    VECTOR: tl.constexpr, SLICES: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Weights from column k: [ROWS, BLOCK_K], or [SLICES, ROWS, BLOCK_K] for tensor cores; zeros from `end`.

    They are read once, so they are the first to leave the caches.
    """
    if VECTOR:
        columns = k + tl.arange(0, BLOCK_K)
        pointers = arena + offset + rows[:, None].to(tl.int64) * K + columns[None, :]
        mask = row_mask[:, None] & (columns < end)[None, :]
    else:
        columns = k + tl.arange(0, SLICES)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        pointers = arena + offset + rows[None, :, None].to(tl.int64) * K + columns[:, None, :]
        mask = row_mask[None, :, None] & (columns < end)[:, None, :]
    return tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def load_tiles(
    arena, offset, rows, row_mask, k, K, end,
    VECTOR: tl.constexpr, SLICES: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """AHEAD tiles, one after the other."""
    step: tl.constexpr = BLOCK_K if VECTOR else SLICES * BLOCK_K
    tiles = ()
    for i in tl.static_range(AHEAD):
        tile = load_tile(arena, offset, rows, row_mask, k + i * step, K, end, VECTOR, SLICES, BLOCK_K)
        tiles = tiles + (tile,)
    return tiles


@triton.jit
def zeros(ROWS: tl.constexpr, VECTOR: tl.constexpr, SLICES: tl.constexpr, BLOCK_K: tl.constexpr):
    """The accumulator of `add_tile`."""
    if VECTOR:
        return tl.zeros([ROWS, BLOCK_K], tl.float32)
    else:  # not by falling through: Triton leaves out a branch only where there are two
        return tl.zeros([SLICES, ROWS, 8], tl.float32)


@triton.jit
def add_tile(
    acc, tile, x, x_stride, k, end, batch, VECTOR: tl.constexpr, SLICES: tl.constexpr, BLOCK_K: tl.constexpr
):
    """acc plus the products of a tile with the inputs from column k."""
    if VECTOR:
        columns = k + tl.arange(0, BLOCK_K)
        inputs = tl.load(x + columns, mask=columns < end, other=0.0).to(tl.float32)
        return acc + tile.to(tl.float32) * inputs[None, :]
    else:
        columns = k + tl.arange(0, SLICES)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        row = tl.arange(0, 8)
        mask = (row < batch)[None, None, :] & (columns < end)[:, :, None]
        inputs = tl.load(x + row[None, None, :] * x_stride + columns[:, :, None], mask=mask, other=0.0)
        return tl.dot(tile, inputs, acc, input_precision="ieee")


@triton.jit
def total(acc, VECTOR: tl.constexpr):
    """float32 [ROWS, 1], or [ROWS, 8] with a column a batch row."""
    if VECTOR:
        return tl.sum(acc, axis=1)[:, None]
    else:
        return tl.sum(acc, axis=0)


@triton.jit
def gemv(
    arena, offset, rows, row_mask, x, x_stride, K, begin, end, batch, tiles,
    ROWS: tl.constexpr, VECTOR: tl.constexpr, SLICES: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Columns begin to end of the matrix times x, as `total` has it. tiles: the first ones, loaded already."""
    step: tl.constexpr = BLOCK_K if VECTOR else SLICES * BLOCK_K
    acc = zeros(ROWS, VECTOR, SLICES, BLOCK_K)
    for k in range(begin, end, AHEAD * step):
        following = load_tiles(
            arena, offset, rows, row_mask, k + AHEAD * step, K, end, VECTOR, SLICES, BLOCK_K, AHEAD
        )
        for i in tl.static_range(AHEAD):
            acc = add_tile(acc, tiles[i], x, x_stride, k + i * step, end, batch, VECTOR, SLICES, BLOCK_K)
        tiles = following
    return total(acc, VECTOR)


@triton.jit
def gemv_pair(
    arena, offset0, rows0, x0, x0_stride, K0, tiles0, offset1, rows1, x1, x1_stride, K1, tiles1, row_mask, batch,
    ROWS: tl.constexpr, VECTOR: tl.constexpr, SLICES: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Two `gemv` of as many rows, interleaved so that the reads of both are under way together."""
    step: tl.constexpr = BLOCK_K if VECTOR else SLICES * BLOCK_K
    acc0 = zeros(ROWS, VECTOR, SLICES, BLOCK_K)
    acc1 = zeros(ROWS, VECTOR, SLICES, BLOCK_K)
    for k in range(0, tl.maximum(K0, K1), AHEAD * step):
        after = k + AHEAD * step
        following0 = load_tiles(
            arena, offset0, rows0, row_mask, after, K0, K0, VECTOR, SLICES, BLOCK_K, AHEAD
        )
        following1 = load_tiles(
            arena, offset1, rows1, row_mask, after, K1, K1, VECTOR, SLICES, BLOCK_K, AHEAD
        )
        for i in tl.static_range(AHEAD):
            at = k + i * step
            acc0 = add_tile(acc0, tiles0[i], x0, x0_stride, at, K0, batch, VECTOR, SLICES, BLOCK_K)
            acc1 = add_tile(acc1, tiles1[i], x1, x1_stride, at, K1, batch, VECTOR, SLICES, BLOCK_K)
        tiles0 = following0
        tiles1 = following1
    return total(acc0, VECTOR), total(acc1, VECTOR)


@triton.jit
def norm_scale(
    squares, num_squares, hidden_size, eps, batch, COLUMNS: tl.constexpr, NUM_SQUARES: tl.constexpr
):
    """[COLUMNS]: 1 / sqrt(mean(hidden^2) + eps) of each batch row, from the sums of its groups of channels."""
    row, group = tl.arange(0, COLUMNS), tl.arange(0, NUM_SQUARES)
    mask = (row < batch)[:, None] & (group < num_squares)[None, :]
    sums = tl.load(squares + row[:, None] * num_squares + group[None, :], mask=mask, other=0.0)
    return tl.rsqrt(tl.sum(sums, axis=1) / hidden_size + eps)


@triton.jit
def sum_splits(
    acc, partials, counters, block, split, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr
):
    """The sum over all programs that share the block's columns, and whether this one has to use it.

    The last program to arrive adds the partial sums in the order of the splits and resets the counter.
    """
    is_last = True
    if SPLITS > 1:
        place = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        tl.store(partials + (block * SPLITS + split) * ROWS * COLUMNS + place, acc)
        tl.debug_barrier()
        is_last = tl.atomic_add(counters + block, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            acc = tl.zeros([ROWS, COLUMNS], tl.float32)
            for s in range(SPLITS):
                # .cg: past L1, which knows nothing of what other programs wrote.
                acc += tl.load(partials + (block * SPLITS + s) * ROWS * COLUMNS + place, cache_modifier=".cg")
            tl.store(counters + block, 0)
    return acc, is_last
