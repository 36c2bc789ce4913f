"""Projections of many rows as GEMMs on views of the weight arena. Knows nothing about layers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .packing import Matrix, PackedProjections, padded


class Reader(NamedTuple):
    """A GEMM on the input, for projections whose matrices lie one after the other.

    matrix: [in, columns]. widths: how its product is divided among what comes next, `Gemms.outputs` in order.
    """

    matrix: Tensor
    widths: list[int]


class Output(NamedTuple):
    """projections: those that a part of a reader's product is for. matrix: what multiplies this part: [rank, out];
    [projections, rank, out] for several in one batched GEMM; None: the part is the output of a dense projection."""

    projections: tuple[int, ...]
    matrix: Tensor | None


@dataclass(frozen=True, eq=False)
class Gemms:
    """Projections of one input x: a GEMM each, two for a low-rank one; as few as possible.

    Those that read x are joined where they lie one after the other; those that read latents where their shapes agree
    as well: a GEMM of few rows and 8 MB takes as long to start and to end as to run. All matrices are views of the
    arena, made once: making them takes the host as long as a launch. bias: float32, of all projections one after the
    other, or None.
    """

    readers: tuple[Reader, ...]
    outputs: tuple[Output, ...]
    bias: Tensor | None

    @staticmethod
    def of(packed: PackedProjections, arena: Tensor) -> Gemms:
        """Matrices that lie one after the other in the arena are joined."""
        low_rank = [offset >= 0 for offset in packed.in_offsets]
        factors = iter(packed.inputs)
        matrices = [
            next(factors) if is_low_rank else output
            for is_low_rank, output in zip(low_rank, packed.outputs, strict=True)
        ]
        # Latents with their padding: zeros, as wide as the matrix that reads them.
        columns = [
            padded(matrix.rows) if is_low_rank else matrix.rows
            for is_low_rank, matrix in zip(low_rank, matrices, strict=True)
        ]
        readers, outputs = [], []
        for group in _adjacent(matrices, columns):
            runs = _equally_spaced(group, packed.outputs, low_rank)
            readers.append(
                Reader(
                    matrices[group[0]].view(arena, sum(columns[i] for i in group)).t(),
                    [sum(columns[i] for i in run) for run in runs],
                )
            )
            for run in runs:
                matrix = _stacked([packed.outputs[i] for i in run], arena) if low_rank[run[0]] else None
                outputs.append(Output(tuple(run), matrix))
        return Gemms(tuple(readers), tuple(outputs), packed.bias)

    def __call__(self, x: Tensor) -> list[Tensor]:
        """x: [rows, in] in the arena's dtype. Every projection, without its bias: [rows, out], any row stride."""
        parts: list[Tensor] = []
        for matrix, widths in self.readers:
            product = torch.mm(x, matrix)
            parts += product.split(widths, dim=1) if len(widths) > 1 else (product,)
        found: dict[int, Tensor] = {}
        for part, (projections, second) in zip(parts, self.outputs, strict=True):
            if second is None:
                found[projections[0]] = part
            elif second.dim() == 2:
                found[projections[0]] = torch.mm(part, second)
            else:
                latents = part.unflatten(1, (len(projections), -1)).transpose(0, 1)
                found.update(zip(projections, torch.bmm(latents, second).unbind(0), strict=True))
        return [found[index] for index in range(len(found))]


def multiply_into(out: Tensor, x: Tensor, matrix: Tensor) -> None:
    """out = x @ matrix, not rounded: logits of 8 significant bits would often be equal.

    out: float32 [rows, columns]. x: [rows, in]; matrix: [in, columns], in the same dtype.
    """
    if x.is_cuda:
        torch.mm(x, matrix, out_dtype=torch.float32, out=out)
    else:  # other devices' GEMMs give what they take
        out.copy_(torch.mm(x, matrix))


def _adjacent(matrices: list[Matrix], columns: list[int]) -> list[list[int]]:
    """Indices of matrices in the order of the arena, those one after the other together."""
    groups: list[list[int]] = []
    end = None
    for index in sorted(range(len(matrices)), key=lambda index: matrices[index].offset):
        if matrices[index].offset != end:
            groups.append([])
        groups[-1].append(index)
        end = matrices[index].offset + columns[index] * matrices[index].width
    return groups


def _equally_spaced(group: list[int], outputs: tuple[Matrix, ...], low_rank: list[bool]) -> list[list[int]]:
    """Neighbours of a group whose last matrices are of one shape and at equal distances; a dense one is alone."""
    runs: list[list[int]] = []
    for index in group:
        run = [*runs[-1], index] if runs else [index]
        shapes = {(outputs[i].rows, outputs[i].width, low_rank[i]) for i in run}
        steps = {outputs[b].offset - outputs[a].offset for a, b in pairwise(run)}
        if runs and low_rank[index] and len(shapes) == len(steps) == 1 and min(steps) > 0:
            runs[-1] = run
        else:
            runs.append([index])
    return runs


def _stacked(matrices: list[Matrix], arena: Tensor) -> Tensor:
    """[rank, out] of one matrix, [matrices, rank, out] of several that are equally spaced."""
    first = matrices[0]
    if len(matrices) == 1:
        return first.view(arena).t()
    shape = (len(matrices), first.width, first.rows)
    return arena.as_strided(
        shape, (matrices[1].offset - first.offset, 1, first.width), arena.storage_offset() + first.offset
    )
