"""A decoder over the parameters of a transformers model: one copy of the weights serves training and the engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..checkpoint.format import factor_in_name, factor_out_name, read_config
from ..config import ModelConfig
from ..device import resolve_device
from ..errors import UnsupportedModelError
from ..model.decoder import Decoder
from ..model.packed_decoder import PackedDecoder
from .transformers import equal_factors


def take_over(model: PreTrainedModel, device: str | torch.device | None = None) -> Decoder | PackedDecoder:
    """The decoder of a causal language model that transformers has loaded, low-rank or dense, for an `Engine`.

    device: where both go; None: where the model is. On a CPU the decoder has the model's own tensors. On a GPU the
    matrices move into the decoder's arena and the model's parameters become views of it, so that an optimizer's
    step is the engine's next weights; move the model through `device`, and the GPU never holds both. Norms and biases
    are float32 copies: take over again after training them.

    Raises UnsupportedModelError for what `LLM` refuses, for a model with adapters, of several dtypes or on several
    devices.
    """
    config, _ = read_config(model.config.to_dict())
    kinds = {(parameter.device, parameter.dtype) for parameter in model.parameters()}
    if len(kinds) > 1 or model.device.type == "meta":
        raise UnsupportedModelError(
            "the model's parameters have several dtypes or devices",
            "load it with one dtype on one device, and merge_and_unload() its adapter",
        )
    ties = equal_factors(lambda name: parameter(model, name), config.tied_factors)
    config = replace(config, tied_factors=ties)
    target = model.device if device is None else resolve_device(device)
    if target.type == "cuda":
        return move_into_arena(model, config, target)
    model.to(target)
    return Decoder.build(config, lambda name: parameter(model, name).detach())


def move_into_arena(model: PreTrainedModel, config: ModelConfig, device: torch.device) -> PackedDecoder:
    """Build the packed decoder and make the model's matrices views of its arena."""
    decoder = PackedDecoder.build(
        config,
        lambda name: parameter(model, name).detach().to(device),
        model.dtype,
        device,
        config.max_position_embeddings,
    )
    for name, matrix in matrices(decoder):
        parameter(model, name).data = matrix
    model.to(device)  # what is left: norms, biases, guards
    return decoder


def parameter(model: PreTrainedModel, name: str) -> torch.nn.Parameter:
    """A parameter by its name in the format."""
    try:
        found: torch.nn.Parameter = model.get_parameter(name)
    except AttributeError as error:
        raise UnsupportedModelError(
            f"the model has no {name}", "if it carries an adapter, merge_and_unload() it first"
        ) from error
    return found


def matrices(decoder: PackedDecoder) -> Iterator[tuple[str, Tensor]]:
    """Every matrix of the decoder by its name in the format, [rows, columns] without padding."""
    config = decoder.config
    linears = config.linears()
    launches = []
    for index, layer in enumerate(decoder.layers):
        for packed, names in (
            (layer.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            (layer.o, ("self_attn.o_proj",)),
            (layer.gate_up, ("mlp.gate_proj", "mlp.up_proj")),
            (layer.down, ("mlp.down_proj",)),
        ):
            launches.append((packed, [f"model.layers.{index}.{name}" for name in names]))
    if not config.tie_word_embeddings:
        launches.append((decoder.lm_head, ["lm_head"]))
    for packed, modules in launches:
        low_rank = [module for module in modules if module in config.ranks]
        for module, matrix in zip(low_rank, packed.inputs, strict=True):
            yield factor_in_name(module), matrix.view(decoder.arena)
        for module, matrix in zip(modules, packed.outputs, strict=True):
            rank = config.ranks.get(module)
            name = f"{module}.weight" if rank is None else factor_out_name(module)
            yield name, matrix.view(decoder.arena)[:, : rank or linears[module].in_features]
    yield "model.embed_tokens.weight", decoder.embed_tokens
