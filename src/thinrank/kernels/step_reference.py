"""The launches of a decode step in plain PyTorch: each takes and writes what the kernel of its name does.

The maths are `reference`'s, in float32 throughout; what is added here is where things lie: matrices in the arena,
inputs in two parts, results in place. The oracle of the kernel benchmarks; imports without triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from . import reference
from .segments import Segments

if TYPE_CHECKING:
    from .sample import RowSampling

#: As `gemv.SQUARES_GROUP`, which needs triton.
_SQUARES_GROUP = 16


def norm_project(
    scaled: Tensor, squares: Tensor, eps: float, arena: Tensor, segments: Segments, out: Tensor
) -> None:
    """Arguments as `norm_project.norm_project` has them."""
    normed = _normed(scaled, squares, eps)
    for matrix, start in zip(_matrices(arena, segments), segments.out_offsets, strict=False):
        _store(out[..., start : start + len(matrix)], normed @ matrix.T)


def project(x: Tensor, arena: Tensor, offset: int, rows: int, width: int, out: Tensor) -> None:
    """Arguments as `project.project` has them."""
    _store(out[..., :rows], _whole(x)[:, :width] @ _matrix(arena, offset, rows, width).T)


def project_residual(
    x: Tensor,
    arena: Tensor,
    offset: int,
    rows: int,
    width: int,
    bias: Tensor | None,
    hidden: Tensor,
    norm: Tensor,
    scaled: Tensor,
    squares: Tensor,
) -> None:
    """Arguments as `project.project_residual` has them."""
    hidden += F.linear(_whole(x)[:, :width], _matrix(arena, offset, rows, width), bias)
    _begin_norm(hidden, norm, scaled, squares)


def project_rope(
    latents: Tensor,
    scaled: Tensor,
    squares: Tensor,
    eps: float,
    arena: Tensor,
    segments: Segments,
    bias: Tensor | None,
    qk_norm: Tensor | None,
    rotation: Tensor,
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    block_tables: Tensor,
) -> None:
    """Arguments as `project_rope.project_rope` has them."""
    outputs = _outputs(latents, scaled, squares, eps, arena, segments)
    reference.rope_write_kv(
        *outputs, bias, qk_norm, eps, rotation, positions.long(), key_cache, value_cache,
        reference.slots(positions, block_tables, key_cache.shape[2]),
    )  # fmt: skip
    q.copy_(outputs[0])


def project_silu_mul(
    latents: Tensor,
    scaled: Tensor,
    squares: Tensor,
    eps: float,
    arena: Tensor,
    segments: Segments,
    bias: Tensor | None,
    out: Tensor,
) -> None:
    """Arguments as `project_silu_mul.project_silu_mul` has them."""
    gate, up = _outputs(latents, scaled, squares, eps, arena, segments)
    if bias is not None:
        gate, up = gate + bias.view(2, -1)[0], up + bias.view(2, -1)[1]
    _store(out, reference.silu_mul(gate, up))


def embed(
    token_ids: Tensor, embed_tokens: Tensor, norm: Tensor, hidden: Tensor, scaled: Tensor, squares: Tensor
) -> None:
    """Arguments as `embed.embed` has them."""
    hidden.copy_(embed_tokens[token_ids])
    _begin_norm(hidden, norm, scaled, squares)


def greedy(
    logits: Tensor, token_ids: Tensor, positions: Tensor, context_lens: Tensor, history: Tensor
) -> None:
    """Arguments as `greedy.greedy` has them."""
    largest = logits.amax(-1)  # NaN where there is one
    token_ids.copy_(logits.argmax(-1))
    positions += 1
    context_lens += 1
    slots = (positions % len(history)).long().unsqueeze(0)
    history.scatter_(0, slots, token_ids.where(largest.isfinite(), -1).unsqueeze(0))


def sample(logits: Tensor, token_ids: Tensor, positions: Tensor, history: Tensor, rows: RowSampling) -> None:
    """Arguments as `sample.sample` has them."""
    temperature, top_p, min_p = rows.floats
    top_k, seed, stream = rows.integers
    scaled = reference.apply_temperature(logits, temperature)
    kept = reference.filter_logits(scaled, top_k, top_p, min_p)
    drawn = reference.sample(kept, reference.philox_uniform(seed, stream, positions.long()))
    slots = (positions % len(history)).long().unsqueeze(0)
    before = history.gather(0, slots).squeeze(0)
    draws = (temperature > 0) & (before >= 0)
    token_ids.copy_(drawn.where(draws, token_ids))
    history.scatter_(0, slots, drawn.where(draws, before).unsqueeze(0))


def _whole(parts: Tensor) -> Tensor:
    """[batch, 2, width] in two parts -> float32 [batch, width]."""
    return parts.float().sum(1)


def _store(out: Tensor, value: Tensor) -> None:
    """A float32 value in two parts, or as it is."""
    out.copy_(reference.in_two_parts(value, out.dtype) if out.dim() == 3 else value)


def _matrix(arena: Tensor, offset: int, rows: int, width: int) -> Tensor:
    return arena[offset : offset + rows * width].view(rows, width).float()


def _matrices(arena: Tensor, segments: Segments) -> list[Tensor]:
    places = zip(segments.offsets, segments.rows, segments.widths, strict=True)
    return [_matrix(arena, *place) for place in places if place[1]]


def _normed(scaled: Tensor, squares: Tensor, eps: float) -> Tensor:
    """The residual stream through RMSNorm, from what the launch that wrote it left."""
    whole = _whole(scaled)
    return whole * (squares.sum(1, keepdim=True) / whole.shape[1] + eps).rsqrt()


def _begin_norm(hidden: Tensor, norm: Tensor, scaled: Tensor, squares: Tensor) -> None:
    """Leave what `_normed` needs."""
    _store(scaled, hidden * norm)
    squares.copy_(hidden.square().unflatten(1, (-1, _SQUARES_GROUP)).sum(-1))


def _outputs(
    latents: Tensor, scaled: Tensor, squares: Tensor, eps: float, arena: Tensor, segments: Segments
) -> list[Tensor]:
    """Of modules that read the residual stream, without bias: from their latents, or normed if dense."""
    whole, normed = _whole(latents), _normed(scaled, squares, eps)
    outputs = []
    for matrix, start in zip(_matrices(arena, segments), segments.in_offsets, strict=False):
        x = normed if start < 0 else whole[:, start : start + matrix.shape[1]]
        outputs.append(x @ matrix.T)
    return outputs
