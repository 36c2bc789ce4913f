"""Rotary position embedding: the angles of each position, for every scaling that is implemented.

Frequencies are computed in float32 with the same order of operations as Hugging Face's
`modeling_rope_utils`, because at position 100 000 a last-bit difference in a frequency is visible.
Angles are computed for the positions of a batch, so nothing is sized by the longest possible context.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import RopeConfig


@dataclass(frozen=True)
class RotaryEmbedding:
    """inv_freq: float32 [head_dim/2], radians per position. attention_factor scales cos and sin (yarn)."""

    inv_freq: Tensor
    attention_factor: float = 1.0

    @staticmethod
    def build(rope: RopeConfig, head_dim: int, device: torch.device) -> RotaryEmbedding:
        """The embedding that a config describes."""
        # On the CPU whatever the device, so that every device gets the same bits.
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        inv_freq = 1.0 / (rope.rope_theta**exponents)
        attention_factor = 1.0
        if rope.rope_type == "linear":
            inv_freq = inv_freq / rope.factor
        elif rope.rope_type == "llama3":
            inv_freq = _llama3(inv_freq, rope)
        elif rope.rope_type == "yarn":
            inv_freq = _yarn(rope, head_dim)
            attention_factor = _yarn_attention_factor(rope)
        return RotaryEmbedding(inv_freq.to(device), attention_factor)

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles: float32 [tokens, head_dim/2] each. positions: int64 [tokens]."""
        angles = torch.outer(positions.float(), self.inv_freq)
        if self.attention_factor == 1.0:
            return angles.cos(), angles.sin()
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor


def _llama3(inv_freq: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between interpolated."""
    turns = _original_positions(rope) / (2 * math.pi / inv_freq)  # within the original context
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0, 1)
    return (1 - keep) * inv_freq / rope.factor + keep * inv_freq


def _yarn(rope: RopeConfig, head_dim: int) -> Tensor:
    """YaRN (Peng et al. 2023): interpolate by a ramp over the dimensions between two rotation counts."""

    def dimension_of(rotations: float) -> float:
        """The dimension whose wave turns this often within the original context."""
        turns = _original_positions(rope) / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.rope_theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp needs a width
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    wave = rope.rope_theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    return 1.0 / (rope.factor * wave) * (1 - keep) + 1.0 / wave * keep


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """The factor on cos and sin that keeps the softmax as sharp as it was in training."""

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _original_positions(rope: RopeConfig) -> int:
    assert rope.original_max_position_embeddings is not None, "registry.parse_config fills this in"
    return rope.original_max_position_embeddings
