"""Adapter for GGUF files of the llama architecture (Llama, Mistral, SmolLM and their like).

Translates names, undoes the row order that llama.cpp gives to `attn_q` and `attn_k`, and gathers the config.
Knows nothing about the file's layout (`gguf_file`), vocabularies (`gguf_tokenizer`) or other architectures.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError, UnsupportedModelError
from ...model.registry import parse_config
from ..format import expected_tensors
from ..tensors import LazyTensor
from .gguf_file import GGUFFile, Metadata
from .gguf_tokenizer import special_token_ids, tokenizer_files

_TOP_LEVEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FREQ_FACTORS = "rope_freqs.weight"

#: `llama.*` keys that are read, or that say nothing about the mathematics.
_KNOWN_KEYS = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.finetuned",
    "tensor_data_layout",
}
#: `llama.*` keys that change the mathematics, with the values that do not. Any other key is refused.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "use_parallel_residual": (False,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scaling.yarn_attn_factor": (1.0, -1.0),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}


@dataclass(frozen=True, eq=False)
class GGUFModel:
    """A GGUF file in Hugging Face's terms.

    config: content of a config.json. tensors: every tensor of the model under its Hugging Face name, in
    the model's order. tokenizer_files: file name -> content; always generation_config.json, and
    tokenizer.json and tokenizer_config.json if the file has a vocabulary. dropped: one line for each
    thing that is left out or guessed. base_model: the repository that the file says it was made from.
    """

    config: dict[str, Any]
    tensors: dict[str, LazyTensor]
    tokenizer_files: dict[str, bytes]
    dropped: list[str] = field(default_factory=list)
    base_model: str | None = None


def read(path: Path) -> GGUFModel:
    """Describe a GGUF file; tensors are read and dequantised one by one, when asked for.

    Raises CheckpointError for a damaged file, UnsupportedModelError for an architecture, setting, tensor
    or tokenizer that is not implemented, ThinrankError when the file is quantised and `gguf` is missing.
    """
    file = GGUFFile.open(path)
    _refuse_unsupported(file.metadata)
    stored = file.tensors()
    config = _config(file.metadata, stored)
    return GGUFModel(
        config=config,
        tensors=_translate(config, stored),
        tokenizer_files=tokenizer_files(file.metadata, config["vocab_size"]),
        dropped=list(_left_out(file.metadata)),
        base_model=_origin(file.metadata),
    )


def _translate(config: dict[str, Any], stored: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Name and arrange tensors as Hugging Face does.

    Raises UnsupportedModelError for a tensor that has no place in the model, CheckpointError for one that
    is missing or has the wrong shape.
    """
    expected = expected_tensors(parse_config(config))
    tensors: dict[str, LazyTensor] = {}
    for name, tensor in stored.items():
        if name == _FREQ_FACTORS:
            continue  # it is in the config
        target = _hugging_face_name(name)
        if target not in expected:
            raise UnsupportedModelError(
                f"the GGUF file has a tensor {name}", "a llama model has no place for it"
            )
        if tensor.shape != expected[target]:
            raise CheckpointError(
                f"the tensor {name} has the shape {list(tensor.shape)}",
                f"the metadata asks for {list(expected[target])}; the file is damaged",
            )
        if ".q_proj." in target:
            tensor = _unpermuted(tensor, config["num_attention_heads"])
        elif ".k_proj." in target:
            tensor = _unpermuted(tensor, config["num_key_value_heads"])
        tensors[target] = tensor
    for name, shape in expected.items():
        if name in tensors:
            continue
        # llama.cpp takes each bias that it finds; Hugging Face's switch is one for all projections.
        if not name.endswith(".bias"):
            raise CheckpointError(f"the GGUF file has no tensor for {name}", "the file is incomplete")
        tensors[name] = LazyTensor.of(torch.zeros(shape))
    return {name: tensors[name] for name in expected}


def _hugging_face_name(name: str) -> str | None:
    match = re.fullmatch(r"blk\.(0|[1-9]\d{0,4})\.(\w+)\.(weight|bias)", name, re.ASCII)
    if match is None:
        return _TOP_LEVEL_NAMES.get(name)
    layer, part, suffix = match.groups()
    return f"model.layers.{layer}.{_BLOCK_NAMES[part]}.{suffix}" if part in _BLOCK_NAMES else None


def _unpermuted(tensor: LazyTensor, heads: int) -> LazyTensor:
    """Rows of a query or key projection in Hugging Face's order; [heads * head_dim, ...] stays so.

    RoPE rotates pairs of rows. llama.cpp's llama graph wants the two of a pair side by side and its
    converter moves them there; Hugging Face keeps all first ones of a head before all second ones.
    """

    def read_tensor() -> torch.Tensor:
        rows = tensor.read()
        pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1)
        return pairs.transpose(1, 2).reshape(rows.shape).contiguous()

    return LazyTensor(tensor.shape, tensor.dtype, read_tensor)


def _refuse_unsupported(metadata: Metadata) -> None:
    """Raise UnsupportedModelError for files that are no single llama model, and for unknown settings."""
    architecture = metadata.typed("general.architecture", str)
    if architecture is None:
        raise CheckpointError("the GGUF file has no general.architecture", "it does not hold a model")
    kind = metadata.typed("general.type", str, "model")
    if kind != "model":
        raise UnsupportedModelError(f"the GGUF file holds a {kind}, not a model", "name the model's own file")
    if architecture != "llama":
        raise UnsupportedModelError(
            f"the GGUF architecture {architecture!r} is not implemented",
            "implemented: llama; convert other models from their Hugging Face folder",
        )
    parts = metadata.typed("split.count", int, 1)
    if parts > 1:
        raise UnsupportedModelError(
            f"the model is split into {parts} GGUF files", "join them first with llama-gguf-split --merge"
        )
    experts = metadata.typed("llama.expert_count", int, 0)
    if experts:
        raise UnsupportedModelError(f"the model is a mixture of {experts} experts", "this is not implemented")
    for key, value in metadata.items():
        setting = key.removeprefix("llama.")
        if setting == key or setting in _KNOWN_KEYS:
            continue
        neutral = _NEUTRAL_VALUES.get(setting, ())
        if not isinstance(value, bool | int | float) or value not in neutral:
            shown = value if isinstance(value, bool | int | float) else "a list or text"
            raise UnsupportedModelError(f"the GGUF file sets {key} to {shown}", "this is not implemented")


def _config(metadata: Metadata, stored: dict[str, LazyTensor]) -> dict[str, Any]:
    """The Hugging Face config that the metadata and the tensor list amount to."""
    hidden_size = metadata.count("llama.embedding_length")
    layers = metadata.count("llama.block_count")
    heads = metadata.count("llama.attention.head_count")
    head_dim = metadata.count("llama.attention.key_length", max(hidden_size // heads, 1))
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if metadata.count(key, head_dim) != head_dim:
            raise UnsupportedModelError(
                f"the GGUF file sets {key} to {metadata.count(key)} with heads of {head_dim}",
                "this is not implemented; both must be equal",
            )
    # Also bounds what is built from the count.
    if layers > len(stored):
        raise CheckpointError(
            f"the GGUF file announces {layers} layers and has {len(stored)} tensors",
            "the file is damaged or incomplete",
        )
    embedding = stored.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError("the GGUF file has no token_embd.weight matrix", "the file is incomplete")
    vocab_size = embedding.shape[0]
    if metadata.count("llama.vocab_size", vocab_size) != vocab_size:
        raise CheckpointError(
            f"llama.vocab_size is {metadata['llama.vocab_size']}, token_embd.weight has {vocab_size} rows",
            "the file is damaged",
        )
    theta = metadata.positive("llama.rope.freq_base", 10000.0)
    context_length = metadata.count("llama.context_length")
    dtypes = {tensor.dtype for tensor in stored.values() if len(tensor.shape) == 2}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": metadata.count("llama.feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": metadata.positive("llama.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": context_length,
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(metadata, stored.get(_FREQ_FACTORS), theta, head_dim, context_length),
        "attention_bias": any(re.search(r"\.attn_(q|k|v|output)\.bias$", name) for name in stored),
        "mlp_bias": any(re.search(r"\.ffn_(gate|up|down)\.bias$", name) for name in stored),
        "tie_word_embeddings": "output.weight" not in stored,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **special_token_ids(metadata, vocab_size),
    }


def _rope_scaling(
    metadata: Metadata, freq_factors: LazyTensor | None, theta: float, head_dim: int, context_length: int
) -> dict[str, Any] | None:
    """Hugging Face's `rope_scaling`, from metadata (linear, yarn) or from `rope_freqs.weight` (llama3)."""
    # llama.cpp: a factor of 0 means none, one without a type is linear; `scale_linear` is its old name.
    factor = metadata.typed("llama.rope.scaling.factor", float, 0.0)
    factor = factor or metadata.typed("llama.rope.scale_linear", float, 0.0)
    kind = metadata.typed("llama.rope.scaling.type", str, "linear")
    scaling: dict[str, Any] | None = None
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"the GGUF file sets the RoPE scaling {kind!r}", "implemented: none, linear, yarn, llama3"
        )
    if kind != "none" and factor not in (0.0, 1.0):
        if not 0 < factor < math.inf:
            raise CheckpointError(f"llama.rope.scaling.factor is {factor}", "the file is damaged")
        scaling = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = metadata.count(
                "llama.rope.scaling.original_context_length", context_length
            )
            for name in ("beta_fast", "beta_slow"):
                if f"llama.rope.scaling.yarn_{name}" in metadata:
                    scaling[name] = metadata.positive(f"llama.rope.scaling.yarn_{name}")
    if freq_factors is None:
        return scaling
    llama3 = _llama3_scaling(freq_factors, theta, head_dim)
    if scaling and llama3:
        raise UnsupportedModelError(
            f"the GGUF file has both {_FREQ_FACTORS} and {kind} RoPE scaling", "this is not implemented"
        )
    return scaling or llama3


def _llama3_scaling(freq_factors: LazyTensor, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The llama3 rule that gives these divisors of the RoPE frequencies; None if they are all 1.

    The file has the divisors only. All Llama 3.x models share every setting but the factor, which is
    the largest divisor; computing the rule anew tells whether it is the right one. Raises
    UnsupportedModelError when it is not.
    """
    if freq_factors.shape != (head_dim // 2,):
        raise CheckpointError(
            f"{_FREQ_FACTORS} has the shape {list(freq_factors.shape)}", f"[{head_dim // 2}] is needed"
        )
    divisors = freq_factors.read().double()
    if bool((divisors == 1).all()):
        return None
    factor, low, high, original = float(divisors.max()), 1.0, 4.0, 8192
    wavelengths = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    if not torch.allclose(1 / ((1 - smooth) / factor + smooth), divisors, rtol=1e-4, atol=0):
        raise UnsupportedModelError(
            f"{_FREQ_FACTORS} does not follow the llama3 rule (low 1, high 4, original length 8192)",
            "this is not implemented",
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _left_out(metadata: Metadata) -> Iterator[str]:
    """A line for what the result lacks or guesses."""
    for key in metadata:
        if key.startswith("tokenizer.chat_template."):
            yield f"{key}: only the default chat template is kept"
    if metadata.get("tokenizer.ggml.model") == "gpt2" and "tokenizer.ggml.pre" not in metadata:
        yield "tokenizer.ggml.pre is missing: text is split as llama.cpp does by default"


def _origin(metadata: Metadata) -> str | None:
    """The Hugging Face repository that the file says it was converted from."""
    for key in ("general.source.huggingface.repository", "general.source.repo_url", "general.repo_url"):
        value = metadata.get(key)
        if isinstance(value, str) and value:
            return value.removeprefix("https://huggingface.co/")
    return None
