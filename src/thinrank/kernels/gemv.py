"""What the decode GEMVs share: how they multiply, split sums, the norm's scale, the launch barrier.

Weights live in one arena, a flat tensor; a matrix is an offset into it with rows of K numbers, K a multiple of 64.
A program multiplies 8, 16 or 32 rows of one matrix, or of a pair. Each of its SLICES warps takes blocks of 64 columns
in turn and multiplies them on tensor cores, the batch rows being the other side of the product, so that a batch of 8
takes hardly longer than one row, and in the same order of summation: a row's result is the same bit for bit alone and
in any batch.

That side has room for 16 rows and the batch has at most 8, so each input comes in two parts, the number rounded to the
weights' dtype and what the rounding left, [batch, 2, width], and a 16-bit model is multiplied with inputs of 16 bits of
mantissa (bfloat16) for the price of 8. Both parts of up to FOUR rows fit the 8 rows that one load brings, and the other
8 are zeros: that halves the loads of the inputs, which cost 10 % of a step of LLaMA-7B.

A tile is what one load instruction of every thread brings: 8 rows of 32 columns for each warp, 16 bytes a thread.
It goes into the tensor cores from the registers that it was loaded into. They want columns spread over a warp in
another order, but a sum over columns may run in any order: `fragment` renames the columns of weights and inputs
alike, which moves nothing. No shared memory, no barrier, and about one instruction for every 100 weights.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

#: Squares of the residual stream are summed in groups of this many channels.
SQUARES_GROUP = 16


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Block until the kernel before this one has finished, then let the next one start its prologue.

    All kernels before that one have finished when this one starts, so what they wrote may be read before the wait.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def program_row(index, apart):
    """Which row a program's index-th is: groups of 8 rows, every other group `apart` after the one before it."""
    return index % 8 + index // 8 % 2 * apart + index // 16 * 8


@triton.jit
def tile_rows(matrix, first_row, num_rows, stride, apart, ROWS: tl.constexpr, SLICES: tl.constexpr):
    """Where the tiles of ROWS rows start: pointers [ROWS * SLICES, 32], 8 rows of every warp after 8 others.

    Past the last row it is the last row again.
    """
    lane = tl.arange(0, ROWS * SLICES)
    row = first_row + program_row(lane // (8 * SLICES) * 8 + lane % 8, apart)
    columns = (lane // 8 % SLICES * 64)[:, None] + tl.arange(0, 32)[None, :]
    return matrix + tl.minimum(row, num_rows - 1)[:, None].to(tl.int64) * stride + columns


@triton.jit
def input_rows(x, batch, stride, SLICES: tl.constexpr, FOUR: tl.constexpr):
    """Where the tiles of the inputs start: pointers [2 * SLICES * 8, 32], one part of 8 rows after the other; FOUR:
    both parts of 4 rows, in the first half."""
    lane = tl.arange(0, 2 * SLICES * 8)
    if FOUR:
        row, part = lane % 4, lane // 4 % 2
    else:
        row, part = lane % 8, lane // (SLICES * 8)
    row = tl.minimum(row, batch - 1)
    columns = (lane // 8 % SLICES * 64)[:, None] + tl.arange(0, 32)[None, :]
    return x + (row * stride + part * (stride // 2))[:, None] + columns


@triton.jit
def load_tiles(
    pointers,
    k,
    end,
    SLICES: tl.constexpr,
    AHEAD: tl.constexpr,
    EVEN: tl.constexpr,
    HALF: tl.constexpr = False,
):
    """2 * AHEAD tiles, shaped as the pointers, from column k, zeros from column `end`; EVEN: which is far enough.
    HALF: the second half of their rows is zeros, which the compiler knows and does not load."""
    lane = tl.arange(0, pointers.shape[0])[:, None]
    first = lane // 8 % SLICES * 64
    loaded = lane < SLICES * 8
    tiles = ()
    for i in tl.static_range(2 * AHEAD):
        at = k + (i // 2) * SLICES * 64 + (i % 2) * 32
        if EVEN and HALF:
            tile = tl.load(pointers + at, mask=loaded, other=0.0)
        elif EVEN:
            tile = tl.load(pointers + at)
        elif HALF:
            tile = tl.load(pointers + at, mask=loaded & (first < end - at), other=0.0)
        else:
            tile = tl.load(pointers + at, mask=first < end - at, other=0.0)
        tiles = tiles + (tile,)
    return tiles


@triton.jit
def fragment(tile, SLICES: tl.constexpr):
    """[n * 8, 32] -> [SLICES, n / SLICES * 8, 32], columns in the order of the registers of a tensor core operand.

    A thread has 8 columns 8 j + 2 a + b of its row, j its number among the row's four. The operand (m16n8k16, both
    sides) wants it to have 8 a + 2 j + b.
    """
    parts: tl.constexpr = tile.shape[0] // (SLICES * 8)
    tile = tl.permute(tl.reshape(tile, [parts, SLICES, 8, 4, 4, 2]), [1, 0, 2, 4, 3, 5])
    return tl.reshape(tile, [SLICES, parts * 8, 32])


@triton.jit
def add_tiles(acc, tiles, inputs, SLICES: tl.constexpr, AHEAD: tl.constexpr):
    """acc [SLICES, 16, ROWS] plus the products of `load_tiles` of a matrix and of its inputs."""
    for i in tl.static_range(2 * AHEAD):
        weights = tl.permute(fragment(tiles[i], SLICES), [0, 2, 1])
        acc = tl.dot(fragment(inputs[i], SLICES), weights, acc, input_precision="ieee")
    return acc


@triton.jit
def add_round(
    acc0, acc1, pointers0, inputs0, end0, pointers1, inputs1, end1, k,
    PAIR: tl.constexpr, SAME_INPUT: tl.constexpr,
    SLICES: tl.constexpr, AHEAD: tl.constexpr, EVEN: tl.constexpr, FOUR: tl.constexpr,
):  # fmt: skip
    """Both sums plus one round's products, from column k on."""
    tiles0 = load_tiles(pointers0, k, end0, SLICES, AHEAD, EVEN)
    if PAIR:
        tiles1 = load_tiles(pointers1, k, end1, SLICES, AHEAD, EVEN)
    x0_tiles = load_tiles(inputs0, k, end0, SLICES, AHEAD, EVEN, FOUR)
    x1_tiles = x0_tiles
    if not SAME_INPUT:
        x1_tiles = load_tiles(inputs1, k, end1, SLICES, AHEAD, EVEN, FOUR)
    acc0 = add_tiles(acc0, tiles0, x0_tiles, SLICES, AHEAD)
    if PAIR:
        acc1 = add_tiles(acc1, tiles1, x1_tiles, SLICES, AHEAD)
    return acc0, acc1


@triton.jit
def add_columns(
    acc, pointers, inputs, begin, end, SLICES: tl.constexpr, AHEAD: tl.constexpr, FOUR: tl.constexpr,
):  # fmt: skip
    """acc plus the products of a matrix and its inputs from column `begin` on, which may be past the `end`."""
    step: tl.constexpr = AHEAD * SLICES * 64
    whole = begin + tl.maximum(end - begin, 0) // step * step
    for k in tl.range(begin, whole, step, num_stages=1):
        tiles = load_tiles(pointers, k, end, SLICES, AHEAD, True)
        acc = add_tiles(acc, tiles, load_tiles(inputs, k, end, SLICES, AHEAD, True, FOUR), SLICES, AHEAD)
    for k in tl.range(whole, end, step, num_stages=1):
        tiles = load_tiles(pointers, k, end, SLICES, AHEAD, False)
        acc = add_tiles(acc, tiles, load_tiles(inputs, k, end, SLICES, AHEAD, False, FOUR), SLICES, AHEAD)
    return acc


@triton.jit
def sum_parts(acc, SLICES: tl.constexpr, FOUR: tl.constexpr):
    """The products of both parts of the inputs together: [SLICES, 16, ROWS] -> [SLICES, 8 or 4, ROWS]."""
    ROWS: tl.constexpr = acc.shape[2]
    sums = tl.sum(tl.reshape(acc, [SLICES, 2, 8, ROWS]), axis=1)
    if FOUR:  # one of the two was zeros
        sums = tl.sum(tl.reshape(sums, [SLICES, 2, 4, ROWS]), axis=1)
    return sums


@triton.jit
def by_weight_row(sums, FOUR: tl.constexpr):
    """[8 or 4, ROWS] -> [ROWS, 8], a column a batch row."""
    if FOUR:
        sums = tl.reshape(tl.permute(tl.join(sums, sums), [2, 0, 1]), [8, sums.shape[1]])
    return tl.trans(sums)


@triton.jit
def store_parts(pointers, part_stride, value, mask):
    """A float32 value as the next GEMV reads it: rounded, and `part_stride` further what the rounding left."""
    rounded = value.to(pointers.dtype.element_ty)
    tl.store(pointers, rounded, mask=mask)
    rest = value - rounded.to(tl.float32)
    tl.store(pointers + part_stride, rest.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def store_result(pointers, stride, value, mask, PARTS: tl.constexpr):
    """A float32 value in two parts for the next GEMV, half a row's stride apart, or rounded to the pointers' dtype."""
    if PARTS:
        store_parts(pointers, stride // 2, value, mask)
    else:
        tl.store(pointers, value.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def load_rows(
    matrix, first_row, num_rows, K, apart, begin, end,
    ROWS: tl.constexpr, SLICES: tl.constexpr, AHEAD: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """What `gemv` needs of ROWS rows of a matrix: where their tiles are, and the first ones."""
    pointers = tile_rows(matrix, first_row, num_rows, K, apart, ROWS, SLICES)
    return pointers, load_tiles(pointers, begin, end, SLICES, AHEAD, EVEN)


@triton.jit
def gemv(
    weights, x, stride, begin, end, batch,
    SLICES: tl.constexpr, AHEAD: tl.constexpr, EVEN: tl.constexpr, FOUR: tl.constexpr,
):  # fmt: skip
    """Columns begin to end of the rows of `load_rows` times x: float32 [ROWS, 8], a column a batch row; those past the
    batch are meaningless.

    EVEN: the columns are whole rounds. FOUR: the batch has at most 4 rows.
    """
    sums, _ = gemv_pair(
        weights, x, stride, end, weights, x, stride, end, begin, batch, False, True, SLICES, AHEAD, EVEN, FOUR
    )
    return sums


@triton.jit
def gemv_pair(
    weights0, x0, stride0, end0, weights1, x1, stride1, end1, begin, batch,
    PAIR: tl.constexpr, SAME_INPUT: tl.constexpr,
    SLICES: tl.constexpr, AHEAD: tl.constexpr, EVEN: tl.constexpr, FOUR: tl.constexpr,
    UNEQUAL: tl.constexpr = False,
):  # fmt: skip
    """`gemv` of one matrix and, if PAIR, of another one with as many rows.

    SAME_INPUT: x1 is x0, so that it is loaded once. UNEQUAL: one may end before the other, which goes on alone, in
    steps twice as long.
    """
    pointers0, pointers1 = weights0[0], weights1[0]
    ROWS: tl.constexpr = pointers0.shape[0] // SLICES
    step: tl.constexpr = AHEAD * SLICES * 64
    inputs0 = input_rows(x0, batch, stride0, SLICES, FOUR)
    inputs1 = input_rows(x1, batch, stride1, SLICES, FOUR)
    x0_tiles = load_tiles(inputs0, begin, end0, SLICES, AHEAD, EVEN, FOUR)
    x1_tiles = x0_tiles
    if not SAME_INPUT:
        x1_tiles = load_tiles(inputs1, begin, end1, SLICES, AHEAD, EVEN, FOUR)
    acc0 = add_tiles(tl.zeros([SLICES, 16, ROWS], tl.float32), weights0[1], x0_tiles, SLICES, AHEAD)
    acc1 = tl.zeros([SLICES, 16, ROWS], tl.float32)
    if PAIR:
        acc1 = add_tiles(acc1, weights1[1], x1_tiles, SLICES, AHEAD)
    # One stage: a pipelined loop would send the tiles through shared memory. Tiles are not carried from one round
    # to the next either: carried values are unpacked into single numbers, which waits for them. While the tiles of
    # a round are on their way, other programs of the SM multiply.
    end = end0
    if UNEQUAL:
        end = tl.minimum(end0, end1)
    whole = begin + (end - begin) // step * step
    for k in tl.range(begin + step, whole, step, num_stages=1):
        acc0, acc1 = add_round(
            acc0, acc1, pointers0, inputs0, end0, pointers1, inputs1, end1, k,
            PAIR, SAME_INPUT, SLICES, AHEAD, True, FOUR,
        )  # fmt: skip
    if not EVEN:  # at most one more: only the last round has masks, which cost instructions
        for k in tl.range(tl.maximum(whole, begin + step), end, step, num_stages=1):
            acc0, acc1 = add_round(
                acc0, acc1, pointers0, inputs0, end0, pointers1, inputs1, end1, k,
                PAIR, SAME_INPUT, SLICES, AHEAD, False, FOUR,
            )  # fmt: skip
    if UNEQUAL:
        done = begin + tl.cdiv(end - begin, step) * step
        acc0 = add_columns(acc0, pointers0, inputs0, done, end0, SLICES, 2 * AHEAD, FOUR)
        acc1 = add_columns(acc1, pointers1, inputs1, done, end1, SLICES, 2 * AHEAD, FOUR)
    sums0 = sum_parts(acc0, SLICES, FOUR)
    if PAIR:
        # The warps are summed up for both matrices together: one exchange instead of two.
        sums0, sums1 = tl.split(tl.sum(tl.join(sums0, sum_parts(acc1, SLICES, FOUR)), axis=0))
    else:
        sums0 = tl.sum(sums0, axis=0)
        sums1 = sums0
    return by_weight_row(sums0, FOUR), by_weight_row(sums1, FOUR)


@triton.jit
def load_squares(squares, num_squares, batch, NUM_SQUARES: tl.constexpr):
    """[8, NUM_SQUARES]: sums of squares of the residual stream, for `norm_scale`: early, it needs them late."""
    row, group = tl.arange(0, 8), tl.arange(0, NUM_SQUARES)
    mask = (row < batch)[:, None] & (group < num_squares)[None, :]
    return tl.load(squares + row[:, None] * num_squares + group[None, :], mask=mask, other=0.0)


@triton.jit
def norm_scale(square_sums, hidden_size, eps):
    """[1, 8]: 1 / sqrt(mean(hidden^2) + eps) of each batch row."""
    return tl.rsqrt(tl.sum(square_sums, axis=1) / hidden_size + eps)[None, :]


@triton.jit
def split_range(K, split, SPLITS: tl.constexpr):
    """The columns of one of the programs that share a block of rows: whole blocks of 64."""
    share = tl.cdiv(tl.cdiv(K, SPLITS), 64) * 64
    begin = split * share
    return begin, tl.minimum(K, begin + share)


@triton.jit
def sum_splits(sums, partials, counters, block, split, ROWS: tl.constexpr, SPLITS: tl.constexpr):
    """The sum over all programs that share the block's columns, and whether this one has to use it.

    sums: [ROWS, 8]. The last program to arrive adds the partial sums in the order of the splits and resets the
    counter.
    """
    is_last = True
    if SPLITS > 1:
        place = (
            partials + block * SPLITS * ROWS * 8 + tl.arange(0, ROWS)[:, None] * 8 + tl.arange(0, 8)[None, :]
        )
        tl.store(place + split * ROWS * 8, sums)
        tl.debug_barrier()
        is_last = tl.atomic_add(counters + block, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            sums = tl.zeros([ROWS, 8], tl.float32)
            for s in range(SPLITS):
                # .cg: past L1, which knows nothing of what other programs wrote.
                sums += tl.load(place + s * ROWS * 8, cache_modifier=".cg")
            tl.store(counters + block, 0)
    return sums, is_last
