"""Attention of one new token per sequence over the KV blocks, split over the context, in one launch.

Each program reads a run of tokens for one kv head and leaves (max, sum, weighted values) in the workspace; the last
program to arrive for a (row, kv head) merges them. Everything that changes from step to step is read from device
memory, so a captured graph serves every context length.
Imports triton: only the GPU path may import this file. Knows nothing about layers or scheduling.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..config import BLOCK_SIZE
from .gemv import store_result
from .paged import LOG2_E, NO_WINDOW, check_paged_inputs, check_scale_and_window, check_shape

#: SMs of an H100/H200. A constant, so that the order of summation is the same on every card.
_NUM_SMS = 132

#: More programs than this keep the memory busy by themselves. On an H200 a step of LLaMA-7B at 8192 tokens takes
#: 3.36 ms, not 3.61, if each of its 1,024 programs asks for its next tokens; of four rows 2 % more than without.
_FEW_PROGRAMS = 8 * _NUM_SMS

#: Workspaces for so many rows or fewer split a context alike: their rows are the same bit for bit.
MAX_SAME_SPLITS_BATCH = 8


class DecodeWorkspace(NamedTuple):
    """Scratch of one stream; layers may share it.

    partials: float32 [batch, kv_heads, splits, group, head_dim], sums of values weighted by 2^(score - max).
    stats: float32 [batch, kv_heads, splits, group, 2], a split's max (in units of log2) and sum of weights.
    counters: int32 [batch, kv_heads], splits that have arrived; zero between launches.
    """

    partials: Tensor
    stats: Tensor
    counters: Tensor


class DecodeConfig(NamedTuple):
    """How the kernel is launched. It decides the order of summation, so it depends on the layer's shape and on the
    batch that the workspace is for, never on a row.

    num_splits: programs that share one context, at most. unit: tokens that a single head multiplies at a time, and
    half of those that grouped heads do, a divisor of 32. num_warps: of a program. What follows changes no sum.
    pairs: whether a single head loads two units before it multiplies the first. prefetch: whether the next two are
    asked for, into the L2 cache, before that. max_registers: of a thread.
    """

    num_splits: int
    unit: int
    num_warps: int
    pairs: bool
    prefetch: bool
    max_registers: int


def num_splits(heads: int, kv_heads: int, batch: int = 1) -> int:
    """Into how many parts a context is split at most.

    Up to MAX_SAME_SPLITS_BATCH rows: enough to fill 132 SMs at batch 1, whatever the batch. Above: as many programs in
    all as would fill them four times, so that long rows are shared and few programs have nothing to do.
    """
    per_sm = 8 if heads == kv_heads else 2
    splits = per_sm * _NUM_SMS // kv_heads
    if batch > MAX_SAME_SPLITS_BATCH:
        splits = 4 * splits // batch
    return max(1, min(splits, 32 if kv_heads > 2 else 64))


def decode_config(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, batch: int = 1
) -> DecodeConfig:
    """The launch of a layer's shape; `dtype` is the caches', `batch` what the workspace is for.

    At short contexts a program is all latency, so a single head has one warp, which needs no barrier. Few programs
    load two units at once, 16 KiB in all, in 190 registers; many load one, and with 128 registers an SM holds 16 of
    them: on an H200 a step of 8 rows of LLaMA-7B at 320 tokens takes 3.29 ms, not 3.35, and of four rows at 4096 tokens
    4.50 ms, not 4.78. The merge of fewer parts, above 8 rows, needs fewer registers anyway. Grouped heads multiply on
    tensor cores; a step of Llama-3-8B takes 3.17 ms at 512 tokens with tiles straight into registers, 3.9 ms with three
    in shared memory.
    """
    splits = num_splits(heads, kv_heads, batch)
    few = splits * kv_heads * batch <= _FEW_PROGRAMS
    unit = 8 if head_dim > 128 or dtype == torch.float32 else 16
    if heads == kv_heads:
        crowded = not few and batch <= MAX_SAME_SPLITS_BATCH
        return DecodeConfig(splits, unit, 1, few, few, 128 if crowded else 255)
    return DecodeConfig(splits, 2 * unit, 4, True, few, 255)


def decode_attention_workspace(
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    device: torch.device | str,
    splits: int | None = None,
) -> DecodeWorkspace:
    """Scratch for `decode_attention` of up to `batch` rows; its size does not depend on context lengths.

    splits: of the config, where one is passed to `decode_attention`; None: `num_splits` of the batch.
    Bytes: 4 * batch * heads * splits * (head_dim + 2) and a little; 0.25 MiB a row of a LLaMA-7B.
    Raises ValueError for a shape that the kernel does not take.
    """
    check_shape(heads, kv_heads, head_dim)
    shape = (batch, kv_heads, splits or num_splits(heads, kv_heads, batch), heads // kv_heads)
    return DecodeWorkspace(
        torch.empty(*shape, head_dim, dtype=torch.float32, device=device),
        torch.empty(*shape, 2, dtype=torch.float32, device=device),
        torch.zeros(batch, kv_heads, dtype=torch.int32, device=device),
    )


def decode_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    out: Tensor,
    workspace: DecodeWorkspace,
    pdl: bool = False,
    config: DecodeConfig | None = None,
) -> Tensor:
    """out[b, h] = softmax(scale * q[b, h] . keys) . values over the tokens of sequence b; one query each.

    q: [batch, heads, head_dim], bfloat16, float16 or float32; rows and heads may have any stride. With more than 8
    heads a kv head it is rounded to the caches' dtype. caches: [blocks, kv_heads, 64, head_dim] with equal strides,
    a block's head contiguous; heads a multiple of kv_heads. block_tables: int32 [batch, blocks], any row stride;
    only the entries of blocks in use are read. context_lens: int32 [batch], the new token included; a row of length
    0 reads nothing and gives zeros. window: the query sees this many tokens, itself included; None: all.
    out: [batch, heads * head_dim] in any of these dtypes, or [batch, 2, heads * head_dim] in two parts for the next
    GEMV. workspace: from `decode_attention_workspace` for at least this batch, not in use by another stream. pdl:
    launch with programmatic dependent launch (compute capability 9.0 and later). config: for tuning; its num_splits
    must be the workspace's.

    Returns out. A row's result depends on nothing but the row and the workspace's number of splits: it is the same bit
    for bit in any batch that uses such a workspace.
    Rows of blocks beyond the context may hold anything, NaN included.
    Raises ValueError for a shape, dtype or stride that the kernel does not take. Lengths live on the device
    and are not checked: a context_len must fit its block table.
    """
    parts = out.dim() == 3
    batch, heads, head_dim = check_paged_inputs(
        q, key_cache, value_cache, block_tables, context_lens, out[:, 0] if parts else out
    )
    check_scale_and_window(scale, window)
    kv_heads = key_cache.shape[1]
    if len(block_tables) != batch or len(context_lens) != batch:
        raise ValueError(
            f"q has {batch} rows, block_tables {len(block_tables)} and context_lens {len(context_lens)}"
        )
    config = config or decode_config(heads, kv_heads, head_dim, key_cache.dtype, len(workspace.counters))
    group = heads // kv_heads
    expected = (kv_heads, config.num_splits, group, head_dim)
    if workspace.partials.shape[1:] != expected or len(workspace.counters) < batch:
        raise ValueError(
            f"the workspace is for {tuple(workspace.partials.shape)}, "
            f"this call needs at least {(batch, *expected)}"
        )
    splits_pad = triton.next_power_of_2(config.num_splits)
    # 128 registers of each thread.
    merged = 128 * 32 * config.num_warps // triton.next_power_of_2(group) // triton.next_power_of_2(head_dim)
    # Heads first: with a short context the splits without work are then the last to start, not in between.
    _decode_kernel[(kv_heads, config.num_splits, batch)](
        q,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        out,
        workspace.partials,
        workspace.stats,
        workspace.counters,
        scale * LOG2_E,
        NO_WINDOW if window is None else window,
        q.stride(0),
        q.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        block_tables.stride(0),
        out.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        # A single head needs no tensor core; up to 8 are there in two parts, as an operand has 16 rows at least.
        GROUP_PAD=1 if group == 1 else max(8, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        HEAD_DIM_PAD=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=BLOCK_SIZE,
        UNIT=config.unit,
        PAIRS=config.pairs,
        NUM_SPLITS=config.num_splits,
        NUM_SPLITS_PAD=splits_pad,
        MERGED_SPLITS=min(splits_pad, merged),
        PARTS=parts,
        PREFETCH=config.prefetch and pdl,
        PDL=pdl,
        num_warps=config.num_warps,
        maxnreg=config.max_registers,
        launch_pdl=pdl,
    )
    return out


# Device code.


@triton.jit
def _decode_kernel(
    q_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    context_ptr,
    out_ptr,
    partials_ptr,
    stats_ptr,
    counters_ptr,
    scale_log2,
    window,
    q_stride_row,
    q_stride_head,
    cache_stride_block,
    cache_stride_head,
    table_stride,
    out_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    PAIRS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_SPLITS_PAD: tl.constexpr,
    MERGED_SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    # Known before the kernel that computes q has finished, like all keys and values but the newest.
    context_len = tl.load(context_ptr + row)
    first = tl.maximum(context_len - window, 0)  # the first token that the query sees
    # A short context is dealt out in units, a long one in pairs of them, none across the end of a block.
    first_unit = first // (2 * UNIT) * 2
    units = tl.cdiv(context_len, UNIT) - first_unit
    per_split = tl.where(units <= NUM_SPLITS, 1, tl.cdiv(units, 2 * NUM_SPLITS) * 2)
    used = tl.maximum(tl.cdiv(units, per_split), 1)
    begin = (first_unit + split * per_split) * UNIT
    end = tl.minimum(begin + per_split * UNIT, context_len)
    table = table_ptr + row * table_stride
    head_offset = kv_head.to(tl.int64) * cache_stride_head
    if PDL:  # the interpreter has no gdc_*
        if begin < end:
            _prefetch_tile(
                key_ptr + head_offset, value_ptr + head_offset, tl.load(table + begin // BLOCK_SIZE), begin,
                cache_stride_block, HEAD_DIM, BLOCK_SIZE, UNIT,
            )  # fmt: skip
        gdc_wait()
        gdc_launch_dependents()
    if split < used:
        q_head = q_ptr + row * q_stride_row + (kv_head * GROUP).to(tl.int64) * q_stride_head
        if GROUP == 1:
            m, total, acc = _attend_one(
                q_head, key_ptr + head_offset, value_ptr + head_offset, table, scale_log2, first,
                begin, end, cache_stride_block, HEAD_DIM, HEAD_DIM_PAD, BLOCK_SIZE, UNIT, PAIRS, PREFETCH,
            )  # fmt: skip
        else:
            m, total, acc = _attend_group(
                q_head, q_stride_head, key_ptr + head_offset, value_ptr + head_offset, table, scale_log2,
                first, begin, end, cache_stride_block, GROUP, GROUP_PAD, HEAD_DIM, HEAD_DIM_PAD,
                BLOCK_SIZE, 2 * UNIT, PREFETCH,
            )  # fmt: skip

        head = tl.arange(0, GROUP_PAD)
        dim = tl.arange(0, HEAD_DIM_PAD)
        valid = (head < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
        out_row = out_ptr + row * out_stride + kv_head * GROUP * HEAD_DIM
        if used == 1:
            # A row without tokens has total 0 and gives zeros. NaN > 0 is false: a NaN stays one through acc.
            acc = acc / tl.where(total > 0, total, 1.0)[:, None]
            store_result(out_row + head[:, None] * HEAD_DIM + dim[None, :], out_stride, acc, valid, PARTS)
        else:
            pair = row * KV_HEADS + kv_head
            slot = (pair * NUM_SPLITS + split) * GROUP + head
            tl.store(stats_ptr + slot * 2, m, mask=head < GROUP)
            tl.store(stats_ptr + slot * 2 + 1, total, mask=head < GROUP)
            tl.store(partials_ptr + slot[:, None] * HEAD_DIM + dim[None, :], acc, mask=valid)
            # The atomic is one thread's: without the barrier it would not release the others' stores.
            tl.debug_barrier()
            arrived = tl.atomic_add(counters_ptr + pair, 1, sem="acq_rel", scope="gpu")
            if arrived == used - 1:
                tl.store(counters_ptr + pair, 0)  # for the next launch of the graph
                _merge(
                    partials_ptr, stats_ptr, out_row, out_stride, PARTS, pair * NUM_SPLITS * GROUP, used,
                    GROUP, HEAD_DIM, HEAD_DIM_PAD, NUM_SPLITS_PAD, MERGED_SPLITS,
                )  # fmt: skip


@triton.jit
def _prefetch(pointer, SIZE: tl.constexpr):
    """Ask for SIZE numbers to be brought into the L2 cache."""
    LINE: tl.constexpr = 1024 // pointer.dtype.element_ty.primitive_bitwidth  # numbers in 128 bytes
    LINES: tl.constexpr = SIZE // LINE
    line = tl.minimum(tl.arange(0, triton.next_power_of_2(LINES)), LINES - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointer + line * LINE],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _prefetch_tile(
    key_ptr, value_ptr, block, start, cache_stride_block,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Ask for the keys and values of TILE tokens from `start`, all of them in `block`."""
    offset = block.to(tl.int64) * cache_stride_block + start % BLOCK_SIZE * HEAD_DIM
    _prefetch(key_ptr + offset, TILE * HEAD_DIM)
    _prefetch(value_ptr + offset, TILE * HEAD_DIM)


@triton.jit
def _load_tile(
    keys, values, start, first, end,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Keys and values [TILE, HEAD_DIM_PAD] of tokens from `start` in one block, and which of them the query sees."""
    token, dim = tl.arange(0, TILE), tl.arange(0, HEAD_DIM_PAD)
    seen = (start + token >= first) & (start + token < end)
    offsets = (start % BLOCK_SIZE + token)[:, None] * HEAD_DIM + dim[None, :]
    mask = seen[:, None] & (dim < HEAD_DIM)[None, :]
    return (
        tl.load(keys + offsets, mask=mask, other=0.0),
        tl.load(values + offsets, mask=mask, other=0.0),
        seen,
    )


@triton.jit
def _attend_one(
    q_ptr, key_ptr, value_ptr, table, scale_log2, first, begin, end, cache_stride_block,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, UNIT: tl.constexpr,
    PAIRS: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """One query head over tokens [begin, end). Returns m [1], total [1], acc [1, HEAD_DIM_PAD]."""
    STEP: tl.constexpr = 2 * UNIT if PAIRS else UNIT
    dim = tl.arange(0, HEAD_DIM_PAD)
    q = tl.load(q_ptr + dim, mask=dim < HEAD_DIM, other=0.0)
    q = q.to(tl.float32) * scale_log2
    # Finite, so that the difference of two maxima is never inf - inf.
    m = tl.full([1], -1e30, tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([HEAD_DIM_PAD], tl.float32)
    # Read a step ahead: otherwise every tile would wait for its address.
    block = tl.load(table + begin // BLOCK_SIZE, mask=begin < end, other=0)
    for start in tl.range(begin, end, STEP, num_stages=1):
        following = tl.load(table + tl.minimum(start + STEP, end - 1) // BLOCK_SIZE)
        keys = key_ptr + block.to(tl.int64) * cache_stride_block
        values = value_ptr + block.to(tl.int64) * cache_stride_block
        k, v, seen = _load_tile(keys, values, start, first, end, HEAD_DIM, HEAD_DIM_PAD, BLOCK_SIZE, UNIT)
        if PAIRS:
            middle = start + UNIT
            k2, v2, seen2 = _load_tile(
                keys, values, middle, first, end, HEAD_DIM, HEAD_DIM_PAD, BLOCK_SIZE, UNIT
            )
        if PREFETCH:
            if start + STEP < end:
                _prefetch_tile(
                    key_ptr, value_ptr, following, start + STEP, cache_stride_block, HEAD_DIM, BLOCK_SIZE, STEP,
                )  # fmt: skip
        m, total, acc = _add_tile(q, k, v, seen, m, total, acc)
        if PAIRS:
            if middle < end:
                m, total, acc = _add_tile(q, k2, v2, seen2, m, total, acc)
        block = following
    return m, total, acc[None, :]


@triton.jit
def _add_tile(q, k, v, seen, m, total, acc):
    """The attention of one query so far, and that over one more tile."""
    score = tl.sum(k.to(tl.float32) * q[None, :], axis=1)
    score = tl.where(seen, score, float("-inf"))
    m_new = tl.maximum(m, tl.max(score, axis=0))
    decay = tl.exp2(m - m_new)
    p = tl.exp2(score - m_new)
    total = total * decay + tl.sum(p, axis=0)
    return m_new, total, acc * decay + tl.sum(p[:, None] * v.to(tl.float32), axis=0)


@triton.jit
def _part(x, part, dtype: tl.constexpr):
    """float32 x rounded to dtype where part is 0, what the rounding left where it is 1."""
    rounded = x.to(dtype)
    return tl.where(part == 0, rounded, (x - rounded.to(tl.float32)).to(dtype))


@triton.jit
def _attend_group(
    q_ptr, q_stride_head, key_ptr, value_ptr, table, scale_log2, first, begin, end,
    cache_stride_block, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """The query heads of one kv head over tokens [begin, end), each read once.

    Returns m [GROUP_PAD], total [GROUP_PAD], acc [GROUP_PAD, HEAD_DIM_PAD]; rows past GROUP are meaningless.
    """
    PARTS: tl.constexpr = 2 if GROUP_PAD == 8 else 1
    row = tl.arange(0, PARTS * GROUP_PAD)
    dim = tl.arange(0, HEAD_DIM_PAD)
    q_mask = (row % GROUP_PAD < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + (row % GROUP_PAD)[:, None] * q_stride_head + dim[None, :], mask=q_mask, other=0.0)
    q = _part(q.to(tl.float32), (row // GROUP_PAD)[:, None], key_ptr.dtype.element_ty)
    m = tl.full([GROUP_PAD], -1e30, tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, HEAD_DIM_PAD], tl.float32)
    block = tl.load(table + begin // BLOCK_SIZE, mask=begin < end, other=0)
    for start in tl.range(begin, end, TILE, num_stages=1):
        following = tl.load(table + tl.minimum(start + TILE, end - 1) // BLOCK_SIZE)
        block_offset = block.to(tl.int64) * cache_stride_block
        k, v, seen = _load_tile(
            key_ptr + block_offset, value_ptr + block_offset, start, first, end,
            HEAD_DIM, HEAD_DIM_PAD, BLOCK_SIZE, TILE,
        )  # fmt: skip
        if PREFETCH:
            if start + TILE < end:
                _prefetch_tile(
                    key_ptr, value_ptr, following, start + TILE, cache_stride_block, HEAD_DIM, BLOCK_SIZE, TILE,
                )  # fmt: skip
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        score = tl.sum(tl.reshape(score, [PARTS, GROUP_PAD, TILE]), axis=0)
        score = tl.where(seen[None, :], score, float("-inf"))
        m_new = tl.maximum(m, tl.max(score, axis=1))
        decay = tl.exp2(m - m_new)
        p = tl.exp2(score - m_new[:, None])
        total = total * decay + tl.sum(p, axis=1)
        p = tl.broadcast_to(tl.reshape(p, [1, GROUP_PAD, TILE]), [PARTS, GROUP_PAD, TILE])
        p = tl.reshape(_part(p, tl.arange(0, PARTS)[:, None, None], v.dtype), [PARTS * GROUP_PAD, TILE])
        products = tl.reshape(tl.dot(p, v, input_precision="ieee"), [PARTS, GROUP_PAD, HEAD_DIM_PAD])
        acc = acc * decay[:, None] + tl.sum(products, axis=0)
        m = m_new
        block = following
    return m, total, acc


@triton.jit
def _slots(slot, start, used, GROUP: tl.constexpr, HEADS: tl.constexpr, COUNT: tl.constexpr):
    """[COUNT, HEADS]: where splits from `start` left the results of a group's heads, and whether there are such."""
    split, head = start + tl.arange(0, COUNT), tl.arange(0, HEADS)
    return slot + split[:, None] * GROUP + head[None, :], (split < used)[:, None] & (head < GROUP)[None, :]


@triton.jit
def _load_partials(partials_ptr, slots, mask, HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr):
    """[COUNT, HEADS, HEAD_DIM_PAD] of `_slots`."""
    dim = tl.arange(0, HEAD_DIM_PAD)
    pointers = partials_ptr + slots[:, :, None] * HEAD_DIM + dim[None, None, :]
    inside = mask[:, :, None] & (dim < HEAD_DIM)[None, None, :]
    return tl.load(pointers, mask=inside, other=0.0, cache_modifier=".cg")


@triton.jit
def _merge(
    partials_ptr, stats_ptr, out_row, out_stride, PARTS: tl.constexpr, slot, used,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr, NUM_SPLITS_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """out = sum of 2^(m_s - m) acc_s / sum of 2^(m_s - m) total_s over the splits s, all heads of a group at once.

    CHUNK splits are loaded together, all if the registers hold them: each trip to L2 costs 1 us of the step's layer.
    All loads are .cg: L1 knows nothing of what other SMs wrote.
    """
    HEADS: tl.constexpr = triton.next_power_of_2(GROUP)
    head, dim = tl.arange(0, HEADS), tl.arange(0, HEAD_DIM_PAD)
    slots, mask = _slots(slot, 0, used, GROUP, HEADS, NUM_SPLITS_PAD)
    m = tl.load(stats_ptr + slots * 2, mask=mask, other=-1e30, cache_modifier=".cg")
    total = tl.load(stats_ptr + slots * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
    if CHUNK == NUM_SPLITS_PAD:
        partial = _load_partials(partials_ptr, slots, mask, HEAD_DIM, HEAD_DIM_PAD)
    largest = tl.max(m, axis=0)
    weight = tl.where(mask, tl.exp2(m - largest[None, :]), 0.0)
    total = tl.sum(weight * total, axis=0)
    if CHUNK == NUM_SPLITS_PAD:
        acc = tl.sum(partial * weight[:, :, None], axis=0)
    else:
        acc = tl.zeros([HEADS, HEAD_DIM_PAD], tl.float32)
        for start in range(0, used, CHUNK):
            places, inside = _slots(slot, start, used, GROUP, HEADS, CHUNK)
            chunk_m = tl.load(stats_ptr + places * 2, mask=inside, other=-1e30, cache_modifier=".cg")
            chunk = _load_partials(partials_ptr, places, inside, HEAD_DIM, HEAD_DIM_PAD)
            share = tl.where(inside, tl.exp2(chunk_m - largest[None, :]), 0.0)
            acc += tl.sum(chunk * share[:, :, None], axis=0)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    place = out_row + head[:, None] * HEAD_DIM + dim[None, :]
    store_result(place, out_stride, acc, (head < GROUP)[:, None] & (dim < HEAD_DIM)[None, :], PARTS)
