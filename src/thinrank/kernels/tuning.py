"""Launch settings of the decode GEMVs. Imports without triton."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import unknown_name


class GemvConfig(NamedTuple):
    """vector: sums in registers, for batch 1; else tensor cores. rows: of the matrix that a program computes.
    block_k: columns of a tile. num_warps: with tensor cores each takes a slice of the columns. splits: programs
    that share a block of rows, each with a range of columns. ahead: tiles read ahead."""

    vector: bool
    rows: int
    block_k: int
    num_warps: int
    splits: int
    ahead: int


#: Programs that keep the 132 SMs of an H200 busy to the end.
_ENOUGH_PROGRAMS = 256

OPS = ("norm_project", "project", "project_residual", "project_rope", "project_head_rope", "project_silu_mul")


def gemv_config(op: str, rows: int, width: int, vector: bool) -> GemvConfig:
    """Settings of an op for a matrix of `rows` x `width`.

    They depend on the shape of the layer alone, never on the batch. The best of a sweep on an H200 over the
    shapes of LLaMA-7B at keep_ratio 0.5; docs/performance-log.md has the figures.
    """
    if op not in OPS:
        raise unknown_name("op", op, list(OPS))
    config = _vector_config(op, rows, width) if vector else _matrix_config(op, rows, width)
    return config._replace(block_k=min(config.block_k, max(16, 1 << (width - 1).bit_length())))


def _vector_config(op: str, rows: int, width: int) -> GemvConfig:
    match op:
        case "norm_project" if rows >= 16384:  # lm_head
            return GemvConfig(True, 2, 1024, 4, 1, 4)
        case "norm_project":
            return GemvConfig(True, 8, 512, 4, 1, 2)
        case "project" if width >= 8192:
            return GemvConfig(True, 4, 2048, 8, 1, 1)
        case "project":
            return GemvConfig(True, 2, 2048, 4, 1, 2)
        case "project_residual" if width >= 1536:
            return GemvConfig(True, 16, 512, 8, 1, 1)
        case "project_residual":
            return GemvConfig(True, 16, 256, 4, 1, 2)
        case "project_rope":
            return GemvConfig(True, 4, 256, 4, 1, 2)
        case "project_head_rope":  # a whole head leaves fewer registers
            return GemvConfig(True, 64, 128, 8, 1, 1)
    return GemvConfig(True, 8, 256, 4, 1, 2)


def _matrix_config(op: str, rows: int, width: int) -> GemvConfig:
    match op:
        case "project_rope" | "project_silu_mul":
            return GemvConfig(False, 16, 64, 4, 1, 1)
        case "project_head_rope":
            return GemvConfig(False, 64, 32, 4, 1, 1)
    splits = 1
    while splits < 8 and rows // 16 * splits < _ENOUGH_PROGRAMS and width // (splits * 2) >= 1024:
        splits *= 2
    return GemvConfig(False, 16, 64 if splits > 4 else 128, 4, splits, 1)
