"""The reference decoder and the packed one with the same random weights, low-rank and dense modules side by side."""

from typing import Any

import torch

from thinrank.model.decoder import Decoder
from thinrank.model.packed_decoder import PackedDecoder
from thinrank.model.registry import parse_config
from tiny_models import low_rank, random_tensors


def mixed_decoders(raw: dict[str, Any], device: torch.device) -> tuple[Decoder, PackedDecoder]:
    """In float32, from a config.json without biases; every third module is dense."""
    modules = [name for i, name in enumerate(parse_config(raw).linears()) if name != "lm_head" and i % 3 != 1]
    ranks = {module: 1 + (7 * i) % 61 for i, module in enumerate(modules)}
    tensors, factors = low_rank(random_tensors(raw), ranks)
    for module, (factor_in, factor_out) in factors.items():
        tensors |= {f"{module}.factor_in.weight": factor_in, f"{module}.factor_out.weight": factor_out}
    config = parse_config(raw, ranks=ranks)
    on_device = {name: tensor.to(device) for name, tensor in tensors.items()}
    positions = config.max_position_embeddings
    return (
        Decoder.build(config, on_device.__getitem__),
        PackedDecoder.build(config, on_device.__getitem__, torch.float32, device, positions),
    )
