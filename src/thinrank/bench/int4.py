"""Dense with int4 weights through torch's own matmul: what a user of plain quantisation gets.

Asymmetric, round to nearest, one scale and offset for every 128 inputs of an output, as gpt-fast has it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from ..errors import OptionError
from .shapes import BenchModel
from .static_decoder import StaticDecoderSystem
from .system import model_step_bytes

#: Inputs that share a scale: the largest that divides the layer, 128 in all 7B shapes.
GROUP_SIZES = (128, 64, 32)


def group_size(in_features: int) -> int:
    """Raises OptionError when none fits."""
    for size in GROUP_SIZES:
        if in_features % size == 0:
            return size
    raise OptionError(f"int4 needs a multiple of {GROUP_SIZES[-1]} inputs, not {in_features}", "leave it out")


def quantize(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """[out, in] -> int32 [out, in] of 0..15, and scales and offsets [in / group, out, 2] in weight's dtype.

    weight is about (q - 8) * scale + offset.
    """
    groups = weight.float().unflatten(1, (-1, group))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (high - low).clamp(min=1e-6) / 15
    q = ((groups - low) / scale).round().clamp(0, 15).to(torch.int32)
    parameters = torch.cat((scale, low + 8 * scale), dim=-1).transpose(0, 1)
    return q.flatten(1), parameters.to(weight.dtype).contiguous()


class Int4Linear(nn.Module):
    packed: Tensor
    scales: Tensor

    def __init__(self, module: nn.Linear):
        super().__init__()
        self.group = group_size(module.in_features)
        self.on_cpu = module.weight.device.type == "cpu"
        q, scales = quantize(module.weight.data, self.group)
        if self.on_cpu:
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1)
        else:
            tiles = {128: 8, 64: 4, 32: 2}[self.group]
            nibbles = (q[:, ::2] << 4 | q[:, 1::2]).to(torch.uint8)
            packed = torch.ops.aten._convert_weight_to_int4pack(nibbles, tiles)
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales)
        self.bias = module.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        matmul = (
            torch.ops.aten._weight_int4pack_mm_for_cpu if self.on_cpu else torch.ops.aten._weight_int4pack_mm
        )
        out: Tensor = matmul(x.flatten(0, -2), self.packed, self.group, self.scales)
        out = out.unflatten(0, x.shape[:-1])
        return out if self.bias is None else out + self.bias


class Int4System(StaticDecoderSystem):
    """The compiled static decoder with every projection, `lm_head` included, in int4."""

    def __init__(self, model: BenchModel, compiled: bool = True):
        if model.dtype != torch.bfloat16:
            raise OptionError("int4-dense runs in bfloat16 only", "use --dtype bfloat16 or leave it out")
        super().__init__(model, compiled, Int4Linear)

    def step_bytes(self, context_len: int, batch_size: int) -> int:
        config, itemsize = self.model.config, self.model.dtype.itemsize
        total = model_step_bytes(self.model, context_len, batch_size)
        weights = sum(s.out_features * s.in_features for s in config.linears().values())
        if config.tie_word_embeddings:
            weights += config.vocab_size * config.hidden_size
        return total - weights * itemsize + _int4_bytes(config, itemsize)


def _int4_bytes(config: ModelConfig, itemsize: int) -> int:
    """Half a byte a weight, and two numbers a group."""
    shapes = [shape[:2] for shape in config.linears().values()]
    if config.tie_word_embeddings:
        shapes.append((config.vocab_size, config.hidden_size))
    return sum(out * size // 2 + 2 * itemsize * out * size // group_size(size) for out, size in shapes)
