"""Models to measure: named shapes with seeded random weights, or a checkpoint.

A benchmark needs shapes, not knowledge: random weights cost the same time as trained ones and need no
download. Every tensor is drawn on the target device from its own seed, so that each system of a comparison
can draw its own copy of the same model and free it before the next one starts.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import floor, prod
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..checkpoint.format import expected_tensors
from ..checkpoint.load import DTYPES, compute_dtype, open_checkpoint
from ..config import LinearShape, ModelConfig
from ..errors import OptionError, unknown_name
from ..model.cost import dense_config, linear_parameters
from ..model.decoder import Decoder
from ..model.layers import TensorSource
from ..model.registry import parse_config

if TYPE_CHECKING:
    from ..model.packed_decoder import PackedDecoder


def _shape(model_type: str, vocab: int, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int,
           **more: Any) -> dict[str, Any]:  # fmt: skip
    """A config.json. Positions are 32 768 whatever the model was trained for: speed does not ask."""
    return {
        "model_type": model_type,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    } | more


#: Hugging Face configs, from the models' own config.json files. mistral-7b is v0.3, which has no sliding
#: window. `tiny` is for tests, with the smallest heads that the attention kernels take.
SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama-7b": _shape("llama", 32000, 4096, 11008, 32, 32, 32),
        "llama-13b": _shape("llama", 32000, 5120, 13824, 40, 40, 40),
        "llama3-8b": _shape("llama", 128256, 4096, 14336, 32, 32, 8, rope_theta=5e5),
        "mistral-7b": _shape("mistral", 32768, 4096, 14336, 32, 32, 8, rope_theta=1e6, sliding_window=None),
        "qwen2.5-7b": _shape("qwen2", 152064, 3584, 18944, 28, 28, 4, rope_theta=1e6, rms_norm_eps=1e-6),
        "smollm2-135m": _shape("llama", 49152, 576, 1536, 30, 9, 3, rope_theta=1e5, tie_word_embeddings=True),
        "tiny": _shape("llama", 192, 128, 256, 3, 4, 2, head_dim=64),
    }
)

#: Modules that a Basis Sharing group of layers has one `factor_in` for; o and down stay private.
SHARED_MODULES = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
SHARED_LAYERS = 2
#: How far `hetero` moves a rank from the rule.
HETERO_SPREAD = 0.3

#: rank and tied_factors of a structure.
Ranks = tuple[dict[str, int], dict[str, str]]


@dataclass(frozen=True)
class BenchModel:
    """A model that can be drawn (or read) any number of times.

    name: the shape's name or the checkpoint's folder. keep_ratio: share of the decoder layers' linear
    parameters that is kept. hf_config: a Hugging Face config.json. get: one tensor by its checkpoint name, on
    `device` and in the dtype to compute with; the same bits whenever it is asked.
    """

    name: str
    structure: str
    keep_ratio: float
    config: ModelConfig
    hf_config: Mapping[str, Any]
    get: TensorSource
    dtype: torch.dtype
    device: torch.device
    seed: int

    def dense(self) -> BenchModel:
        """The dense model of the same shape, with random weights of its own."""
        config = dense_config(self.config)
        get = random_source(config, self.dtype, self.device, self.seed)
        return replace(self, structure="dense", keep_ratio=1.0, config=config, get=get)


def random_model(
    shape: str, structure: str, keep_ratio: float, dtype: torch.dtype, device: torch.device, seed: int
) -> BenchModel:
    """A named shape with random weights.

    Raises OptionError for an unknown shape or structure, or a keep_ratio that the structure cannot have.
    """
    if shape not in SHAPES:
        raise unknown_name("shape", shape, list(SHAPES))
    if structure not in STRUCTURES:
        raise unknown_name("structure", structure, list(STRUCTURES))
    if not 0 < keep_ratio <= 1:
        raise OptionError(f"keep_ratio is {keep_ratio}", "it must be above 0, to 1")
    dense = parse_config(SHAPES[shape])
    ranks, tied_factors = STRUCTURES[structure](dense, keep_ratio, seed)
    config = replace(dense, ranks=ranks, tied_factors=tied_factors)
    get = random_source(config, dtype, device, seed)
    ratio = 1.0 if structure == "dense" else keep_ratio
    return BenchModel(shape, structure, ratio, config, SHAPES[shape], get, dtype, device, seed)


def checkpoint_model(path: str | Path, dtype: str, device: torch.device, seed: int) -> BenchModel:
    """A checkpoint folder, all of it in one dtype.

    dtype: a name, or "auto" as `load_model` has it, by the first projection. Raises what `open_checkpoint`
    does.
    """
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    first = next(iter(config.linears()))
    stored = checkpoint.tensors[f"{first}.factor_out.weight" if first in config.ranks else f"{first}.weight"]
    computed = compute_dtype(stored.dtype, device, dtype)
    structure = "checkpoint" if config.ranks else "dense"
    return BenchModel(
        str(checkpoint.path),
        structure,
        layer_keep_ratio(config),
        config,
        {key: value for key, value in checkpoint.raw_config.items() if key != "quantization_config"},
        lambda name: checkpoint.read(name, device, dtype).to(computed),
        computed,
        device,
        seed,
    )


def chosen_model(
    model: str | Path | None,
    shape: str | None,
    structure: str,
    keep_ratio: float,
    dtype: str,
    device: torch.device,
    seed: int,
) -> BenchModel:
    """A checkpoint, or a named shape with random weights; bfloat16 is the shape's "auto".

    Raises OptionError unless exactly one of both is named, and what `random_model` and `open_checkpoint` raise.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise unknown_name("dtype", dtype, ["auto", *DTYPES])
    if (model is None) == (shape is None):
        problem = "there is no model" if model is None else "both MODEL and --shape are given"
        raise OptionError(problem, "pass one of MODEL and --shape NAME")
    if model is not None:
        return checkpoint_model(model, dtype, device, seed)
    drawn = DTYPES["bfloat16" if dtype == "auto" else dtype]
    return random_model(str(shape), structure, keep_ratio, drawn, device, seed)


def fast_decoder(model: BenchModel) -> Decoder | PackedDecoder:
    """The decoder as `load_model` would build it: packed on a GPU. The one place where ours are built."""
    config = model.config
    if model.device.type != "cuda":
        return Decoder.build(config, model.get)
    from ..model.packed_decoder import PackedDecoder

    return PackedDecoder.build(config, model.get, model.dtype, model.device, config.max_position_embeddings)


def plain_decoder(model: BenchModel) -> Decoder:
    """The same arithmetic in plain PyTorch, in the model's dtype."""
    return Decoder.build(model.config, model.get)


def reference_decoder(model: BenchModel) -> Decoder:
    """The plain decoder on the same stored weights, upcast to float32: what the others are compared with."""
    return Decoder.build(model.config, lambda name: model.get(name).float())


def random_decoder(
    shape: str, structure: str, keep_ratio: float, dtype: torch.dtype, device: torch.device, seed: int
) -> Decoder | PackedDecoder:
    """A decoder with random weights; arguments as in `random_model`."""
    return fast_decoder(random_model(shape, structure, keep_ratio, dtype, device, seed))


def random_source(config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int) -> TensorSource:
    """Draws tensors by name: normal, with a scale that keeps activations of order one."""
    shapes = expected_tensors(config)

    def get(name: str) -> Tensor:
        shape = shapes[name]
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if name.endswith("norm.weight"):
            return tensor.normal_(1.0, 0.1, generator=generator)
        if name.endswith(".bias"):
            return tensor.normal_(0.0, 0.2, generator=generator)
        if name == "model.embed_tokens.weight" and not config.tie_word_embeddings:
            return tensor.normal_(0.0, 1.0, generator=generator)
        return tensor.normal_(0.0, shape[1] ** -0.5, generator=generator)

    return get


def rule_rank(shape: LinearShape, keep_ratio: float) -> int:
    """floor(keep_ratio * in * out / (in + out)), at least 1."""
    product = shape.in_features * shape.out_features
    return max(1, floor(keep_ratio * product / (shape.in_features + shape.out_features)))


def shared_rank(shape: LinearShape, keep_ratio: float, layers: int = SHARED_LAYERS) -> int:
    """Basis Sharing's rule: a group of `layers` modules side by side is one matrix [out * layers, in]."""
    together = LinearShape(shape.out_features * layers, shape.in_features, False)
    return min(rule_rank(together, keep_ratio), shape.in_features)


def layer_linears(config: ModelConfig) -> dict[str, LinearShape]:
    """The projections of the decoder layers: all but `lm_head`, which no compressor touches here."""
    return {name: shape for name, shape in config.linears().items() if name != "lm_head"}


def layer_keep_ratio(config: ModelConfig) -> float:
    """Share of the dense model's linear parameters (biases and `lm_head` left out) that a config keeps."""
    dense = dense_config(config)
    kept = linear_parameters(config) - linear_parameters(dense)
    total = sum(shape.out_features * shape.in_features for shape in layer_linears(config).values())
    return 1 + kept / total


def _uniform(config: ModelConfig, keep_ratio: float, seed: int) -> Ranks:
    """Every module has the rule's rank."""
    return {name: rule_rank(shape, keep_ratio) for name, shape in layer_linears(config).items()}, {}


def _hetero(config: ModelConfig, keep_ratio: float, seed: int) -> Ranks:
    """Ranks spread up to 30 % around the rule, odd ones included, as rank allocators produce them.

    What one layer's module gains, the same module of the next layer loses, so the total stays.
    """
    random = Random(seed)
    linears, ranks = layer_linears(config), _uniform(config, keep_ratio, seed)[0]
    for name in linears:
        layer, module = _split(name)
        partner = f"model.layers.{layer + 1}.{module}"
        if layer % 2 == 0 and partner in linears:
            room = min(linears[name][:2]) - ranks[name]  # no rank above full
            spread = min(int(HETERO_SPREAD * ranks[name]), room, ranks[name] - 1)
            change = random.randint(-spread, spread)
            ranks[name] += change
            ranks[partner] -= change
    return ranks, {}


def _shared2(config: ModelConfig, keep_ratio: float, seed: int) -> Ranks:
    """Basis Sharing: two neighbouring layers have one `factor_in` for each of q, k, v, gate and up.

    A last layer without a neighbour stays private.
    """
    ranks, tied = _uniform(config, keep_ratio, seed)[0], {}
    grouped = config.num_hidden_layers - config.num_hidden_layers % SHARED_LAYERS
    for name, shape in layer_linears(config).items():
        layer, module = _split(name)
        if module.rpartition(".")[2] not in SHARED_MODULES or layer >= grouped:
            continue
        ranks[name] = shared_rank(shape, keep_ratio)
        if layer % SHARED_LAYERS:
            holder = f"model.layers.{layer - layer % SHARED_LAYERS}.{module}"
            tied[f"{name}.factor_in.weight"] = f"{holder}.factor_in.weight"
    return ranks, tied


def _mixed(config: ModelConfig, keep_ratio: float, seed: int) -> Ranks:
    """Every third module dense; the others are compressed harder, so that the total stays."""
    linears = layer_linears(config)
    low_rank = {name: shape for index, (name, shape) in enumerate(linears.items()) if index % 3 != 2}
    total = sum(prod(shape[:2]) for shape in linears.values())
    left = sum(prod(shape[:2]) for shape in low_rank.values())
    ratio = (keep_ratio * total - (total - left)) / left
    if ratio < 0.01:
        raise OptionError(
            f"keep_ratio is {keep_ratio}, and the dense third of 'mixed' takes {1 - left / total:.2f} of it",
            "raise it, or take another structure",
        )
    return {name: rule_rank(shape, ratio) for name, shape in low_rank.items()}, {}


def _dense(config: ModelConfig, keep_ratio: float, seed: int) -> Ranks:
    return {}, {}


#: Structure name -> the ranks that it gives a dense config at a keep_ratio and a seed.
STRUCTURES: Mapping[str, Callable[[ModelConfig, float, int], Ranks]] = MappingProxyType(
    {"uniform": _uniform, "hetero": _hetero, "shared2": _shared2, "mixed": _mixed, "dense": _dense}
)


def _split(name: str) -> tuple[int, str]:
    """ "model.layers.3.mlp.up_proj" -> (3, "mlp.up_proj")."""
    _, _, layer, module = name.split(".", 3)
    return int(layer), module
