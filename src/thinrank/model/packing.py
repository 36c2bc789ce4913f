"""Weights as the decode kernels want them: one arena, each launch a list of segments in it.

Matrices that share an input lie one after the other, so that prefill multiplies them in one GEMM. Ranks are padded
with zeros to a multiple of 64, which costs memory and not reads: padded rows are never read, padded columns
are at most 63. A factor that several layers share is stored once and pointed at by each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import ModelConfig
from ..kernels.segments import Segments
from .layers import TensorSource

ALIGNMENT = 64

#: Where a dense module's latents start: nowhere. As aligned as all that do exist: kernels read as widely as the least
#: aligned of their inputs allows.
NO_LATENTS = -ALIGNMENT


def padded(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Matrix:
    """A matrix in the arena: rows [rows, width], of which `rows` and the columns up to the true rank hold data."""

    offset: int
    rows: int
    width: int

    def view(self, arena: Tensor, rows: int | None = None) -> Tensor:
        """[rows, width]; more rows than the matrix has take in the ones that follow it."""
        count = self.rows if rows is None else rows
        return arena[self.offset : self.offset + count * self.width].view(count, self.width)


@dataclass(frozen=True)
class PackedProjections:
    """Projections that read the same vector, in two steps.

    factor_in: matrices of the first step; latents go to `Segments.out_offsets` of the latent vector. None if
    all are dense. factor_out: matrices of the second step; each reads the latent vector at its `in_offset`, a
    dense module (`NO_LATENTS`) the input itself. inputs, outputs: the same matrices for prefill.
    latent_width: length of the latent vector. bias: float32, of all outputs one after the other, or None.
    """

    factor_in: Segments | None
    factor_out: Segments
    inputs: tuple[Matrix, ...]
    outputs: tuple[Matrix, ...]
    in_offsets: tuple[int, ...]
    latent_width: int
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class PackedLayer:
    """One decoder layer. Norms are float32."""

    qkv: PackedProjections
    o: PackedProjections
    gate_up: PackedProjections
    down: PackedProjections
    input_layernorm: Tensor
    post_attention_layernorm: Tensor
    qk_norm: Tensor | None
    sliding_window: int | None

    @property
    def rope_op(self) -> str:
        """The launch settings' name for the last step of q, k and v."""
        return "project_rope" if self.qk_norm is None else "project_head_rope"


class ArenaBuilder:
    """Lays matrices out, then fills the arena tensor by tensor."""

    def __init__(self, config: ModelConfig, get: TensorSource, dtype: torch.dtype, device: torch.device):
        self._config, self._get = config, get
        self._linears = config.linears()
        self._placed: dict[str, Matrix] = {}
        self.arena = torch.zeros(self._size(), dtype=dtype, device=device)
        self._end = 0

    def projections(self, modules: list[str]) -> PackedProjections:
        """Place the factors of modules that read the same vector."""
        config = self._config
        low_rank = [module for module in modules if module in config.ranks]
        inputs = [self._place_factor_in(module) for module in low_rank]
        offsets, position = {}, 0
        for module, matrix in zip(low_rank, inputs, strict=True):
            offsets[module] = position
            position += padded(matrix.rows)
        in_offsets = tuple(offsets.get(module, NO_LATENTS) for module in modules)
        outputs = tuple(self._place_output(module) for module in modules)
        out_offsets, out = [], 0
        for matrix in outputs:
            out_offsets.append(out)
            out += matrix.rows
        biases = [self._bias(module) for module in modules]
        return PackedProjections(
            factor_in=Segments.of(
                [
                    (m.offset, m.rows, m.width, 0, offsets[module])
                    for module, m in zip(low_rank, inputs, strict=True)
                ]
            )
            if inputs
            else None,
            factor_out=Segments.of(
                [
                    (m.offset, m.rows, m.width, in_offset, out_offset)
                    for m, in_offset, out_offset in zip(outputs, in_offsets, out_offsets, strict=True)
                ]
            ),
            inputs=tuple(inputs),
            outputs=outputs,
            in_offsets=in_offsets,
            latent_width=position,
            bias=torch.cat([bias for bias in biases if bias is not None]) if biases[0] is not None else None,
        )

    def lm_head(self) -> PackedProjections:
        """The embedding itself where the two are tied."""
        config = self._config
        if not config.tie_word_embeddings:
            return self.projections(["lm_head"])
        matrix = self.dense("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        segment = (matrix.offset, matrix.rows, matrix.width, NO_LATENTS, 0)
        return PackedProjections(None, Segments.of([segment]), (), (matrix,), (NO_LATENTS,), 0, None)

    def dense(self, name: str, rows: int, width: int) -> Matrix:
        """Place a dense matrix by its tensor name."""
        if name not in self._placed:
            self._placed[name] = self._place(self._get(name), rows, width)
        return self._placed[name]

    def _place_factor_in(self, module: str) -> Matrix:
        name = f"{module}.factor_in.weight"
        name = self._config.tied_factors.get(name, name)
        return self.dense(name, self._config.ranks[module], self._linears[module].in_features)

    def _place_output(self, module: str) -> Matrix:
        shape, rank = self._linears[module], self._config.ranks.get(module)
        if rank is None:
            return self.dense(f"{module}.weight", shape.out_features, shape.in_features)
        return self.dense(f"{module}.factor_out.weight", shape.out_features, rank)

    def _bias(self, module: str) -> Tensor | None:
        if not self._linears[module].bias:
            return None
        low_rank = module in self._config.ranks
        return self._get(f"{module}.factor_out.bias" if low_rank else f"{module}.bias").float()

    def _place(self, tensor: Tensor, rows: int, width: int) -> Matrix:
        matrix = Matrix(self._end, rows, padded(width))
        matrix.view(self.arena)[:, :width].copy_(tensor)
        # Padded rows keep the next matrix aligned, and are zeros for the GEMMs of prefill.
        self._end += padded(rows) * matrix.width
        return matrix

    def _size(self) -> int:
        config = self._config
        total = 0
        for module, shape in self._linears.items():
            rank = config.ranks.get(module)
            if rank is None:
                total += padded(shape.out_features) * shape.in_features
                continue
            if f"{module}.factor_in.weight" not in config.tied_factors:
                total += padded(rank) * shape.in_features
            total += padded(shape.out_features) * padded(rank)
        if config.tie_word_embeddings:
            total += padded(config.vocab_size) * config.hidden_size
        return total
