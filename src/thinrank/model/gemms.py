"""Projections of many tokens as GEMMs on views of the weight arena. Knows nothing about layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .packing import PackedProjections, padded


@dataclass(frozen=True, eq=False)
class Gemms:
    """Projections of one input x: a GEMM each, two for a low-rank one; of those that read x as few as possible.

    joined: matrices [in, columns] that read x, and into how many columns for each projection their product is split.
    outputs: of each projection, which part of all those products is its own, and the matrix [rank, out] that reads
    this part; None for a dense projection. All are views of the arena, made once: making them takes the host as long
    as a launch. bias: float32, of all projections one after the other, or None.
    """

    joined: tuple[tuple[Tensor, list[int]], ...]
    outputs: tuple[tuple[int, Tensor | None], ...]
    bias: Tensor | None

    @staticmethod
    def of(packed: PackedProjections, arena: Tensor) -> Gemms:
        """Matrices that lie one after the other in the arena are joined."""
        low_rank = [offset >= 0 for offset in packed.in_offsets]
        factors = iter(packed.inputs)
        readers = [
            next(factors) if is_low_rank else output
            for is_low_rank, output in zip(low_rank, packed.outputs, strict=True)
        ]
        # Latents with their padding: zeros, as wide as the matrix that reads them.
        columns = [
            padded(reader.rows) if is_low_rank else reader.rows
            for is_low_rank, reader in zip(low_rank, readers, strict=True)
        ]
        groups: list[list[int]] = []
        end = None
        for index in sorted(range(len(readers)), key=lambda index: readers[index].offset):
            if readers[index].offset != end:
                groups.append([])
            groups[-1].append(index)
            end = readers[index].offset + columns[index] * readers[index].width
        order = [index for group in groups for index in group]
        joined = [
            (readers[group[0]].view(arena, sum(columns[i] for i in group)).t(), [columns[i] for i in group])
            for group in groups
        ]
        outputs = [
            (order.index(index), output.view(arena).t() if low_rank[index] else None)
            for index, output in enumerate(packed.outputs)
        ]
        return Gemms(tuple(joined), tuple(outputs), packed.bias)

    def __call__(self, x: Tensor) -> list[Tensor]:
        """x: [tokens, in] in the arena's dtype. Every projection, without its bias: [tokens, out], any row stride."""
        parts: list[Tensor] = []
        for matrix, columns in self.joined:
            product = torch.mm(x, matrix)
            parts += product.split(columns, dim=1) if len(columns) > 1 else (product,)
        return [
            parts[index] if matrix is None else torch.mm(parts[index], matrix)
            for index, matrix in self.outputs
        ]
