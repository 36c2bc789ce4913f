"""Which architectures are implemented, and how a Hugging Face `config.json` becomes a `ModelConfig`.

A key that changes the mathematics and is not implemented is refused by name; keys that do not are
ignored. Both spellings of renamed keys are read (`rope_theta`/`rope_parameters`, `torch_dtype`/`dtype`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import ModelConfig, RopeConfig
from ..errors import CheckpointError, UnsupportedModelError


@dataclass(frozen=True)
class Architecture:
    """What the model type implies and its config does not say."""

    class_name: str
    qkv_bias: bool | None = None  # None: the config's `attention_bias` says
    o_bias: bool | None = None
    qk_norm: bool = False
    sliding_window: str = "ignored"  # ignored | all layers | optional (`use_sliding_window`, `layer_types`)


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM"),
    "mistral": Architecture("MistralForCausalLM", qkv_bias=False, o_bias=False, sliding_window="all layers"),
    "qwen2": Architecture("Qwen2ForCausalLM", qkv_bias=True, o_bias=False, sliding_window="optional"),
    "qwen3": Architecture("Qwen3ForCausalLM", qk_norm=True, sliding_window="optional"),
}

ROPE_TYPES = ("default", "linear", "llama3", "yarn")

#: Bounds that keep an absurd config from being turned into an absurd allocation. Names are made for every layer; the
#: deepest models of these architectures have 126.
MAX_COUNT = 2**28
MAX_LAYERS = 4096

#: Keys that change the mathematics, with the values that do not.
NEUTRAL_KEYS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": (None, "silu", "swish"),
    "partial_rotary_factor": (None, 1, 1.0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
    "clip_qkv": (None,),
    "alibi": (None, False),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "num_local_experts": (None, 0, 1),
    "num_experts": (None, 0),
    "no_rope_layers": (None, []),
    "use_qk_norm": (None, False),
}


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """The architecture that a config.json names. Raises UnsupportedModelError with the known names."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError("config.json has no model_type", "it is not a Hugging Face model config")
    if model_type not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"the architecture {model_type!r} is not implemented", f"implemented: {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[model_type]


def parse_config(
    config: Mapping[str, Any],
    *,
    ranks: Mapping[str, int] | None = None,
    tied_factors: Mapping[str, str] | None = None,
) -> ModelConfig:
    """Read a Hugging Face config into a `ModelConfig`.

    Raises CheckpointError when a needed key is missing or no sensible number, UnsupportedModelError when
    a setting changes the mathematics in a way that is not implemented.
    """
    architecture = architecture_of(config)
    for key, neutral in NEUTRAL_KEYS.items():
        if key in config and config[key] not in neutral:
            raise UnsupportedModelError(
                f"config.json sets {key} to {config[key]!r}", "this is not implemented"
            )

    hidden_size = _count(config, "hidden_size")
    num_heads = _count(config, "num_attention_heads")
    num_kv_heads = _count(config, "num_key_value_heads", default=num_heads)
    num_layers = _count(config, "num_hidden_layers", most=MAX_LAYERS)
    head_dim = _count(config, "head_dim", default=hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json has {num_heads} attention heads and {num_kv_heads} key-value heads",
            "the first must be a multiple of the second",
        )
    if head_dim % 2:
        raise CheckpointError(
            f"config.json gives a head_dim of {head_dim}", "rotary embeddings need an even one"
        )
    max_positions = _count(config, "max_position_embeddings", default=2048)
    attention_bias = _flag(config, "attention_bias")
    eos = config.get("eos_token_id")
    return ModelConfig(
        model_type=str(config["model_type"]),
        vocab_size=_count(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_count(config, "intermediate_size"),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_number(config, "rms_norm_eps", 1e-6, positive=False),
        max_position_embeddings=max_positions,
        rope=_parse_rope(config, max_positions),
        tie_word_embeddings=_flag(config, "tie_word_embeddings"),
        qkv_bias=attention_bias if architecture.qkv_bias is None else architecture.qkv_bias,
        o_bias=attention_bias if architecture.o_bias is None else architecture.o_bias,
        mlp_bias=config["model_type"] == "llama" and _flag(config, "mlp_bias"),
        qk_norm=architecture.qk_norm,
        sliding_windows=_parse_windows(config, architecture, num_layers),
        bos_token_id=config.get("bos_token_id") if isinstance(config.get("bos_token_id"), int) else None,
        eos_token_ids=token_ids(eos),
        ranks=ranks or {},
        tied_factors=tied_factors or {},
    )


def token_ids(value: Any) -> tuple[int, ...]:
    """`eos_token_id` is an int, a list of ints or null."""
    values = value if isinstance(value, list) else [value]
    return tuple(v for v in values if isinstance(v, int) and not isinstance(v, bool))


def _count(
    config: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 1, most: int = MAX_COUNT
) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise CheckpointError(
            f"config.json gives {key} = {value!r}", f"a whole number from {least} to {most:,} is needed"
        )
    return value


def _number(config: Mapping[str, Any], key: str, default: float, *, positive: bool = True) -> float:
    """A finite number, above 0 or at least 0."""
    value = config.get(key)
    if value is None:
        value = default
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not 0 <= value <= sys.float_info.max
        or (positive and not value)
    ):
        needed = "a number above 0" if positive else "a number from 0"
        raise CheckpointError(f"config.json gives {key} = {value!r}", f"{needed} is needed")
    return float(value)


def _flag(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json gives {key} = {value!r}", "true or false is needed")
    return value


def _parse_rope(config: Mapping[str, Any], max_positions: int) -> RopeConfig:
    raw = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(raw, Mapping):
        raise CheckpointError(f"config.json gives rope_scaling = {raw!r}", "an object is needed")
    if any(isinstance(value, Mapping) for value in raw.values()):
        raise UnsupportedModelError("config.json sets RoPE per layer type", "this is not implemented")
    if raw.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UnsupportedModelError("config.json sets partial_rotary_factor", "this is not implemented")
    rope_type = raw.get("rope_type", raw.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"config.json sets the RoPE type {rope_type!r}", f"implemented: {', '.join(ROPE_TYPES)}"
        )
    settings: dict[str, Any] = {}
    for key in (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "attention_factor",
    ):
        if raw.get(key) is not None:
            settings[key] = _number(raw, key, 0)
    for key in ("mscale", "mscale_all_dim"):  # 0 is none
        if raw.get(key) is not None:
            settings[key] = _number(raw, key, 0, positive=False)
    if raw.get("original_max_position_embeddings") is not None:
        settings["original_max_position_embeddings"] = _count(raw, "original_max_position_embeddings")
    theta = _number({**config, **raw}, "rope_theta", 10000.0)
    if rope_type in ("llama3", "yarn"):
        settings.setdefault("original_max_position_embeddings", max_positions)
    if rope_type == "yarn" and "factor" not in settings:
        settings["factor"] = max_positions / settings["original_max_position_embeddings"]
    if rope_type != "default" and "factor" not in settings:
        raise CheckpointError(
            f"config.json sets the RoPE type {rope_type!r} without a factor", "it needs one"
        )
    if rope_type == "yarn" and theta <= 1:
        raise CheckpointError(f"config.json gives rope_theta = {theta!r}", "yarn needs one above 1")
    rope = RopeConfig(
        rope_theta=theta, rope_type=rope_type, truncate=_flag(raw, "truncate", True), **settings
    )
    if rope_type == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise CheckpointError(
            f"config.json gives low_freq_factor = {rope.low_freq_factor} and high_freq_factor = "
            f"{rope.high_freq_factor}",
            "the first must be less than the second",
        )
    return rope


def _parse_windows(
    config: Mapping[str, Any], architecture: Architecture, num_layers: int
) -> tuple[int | None, ...]:
    none: tuple[int | None, ...] = (None,) * num_layers
    if architecture.sliding_window == "ignored" or config.get("sliding_window") is None:
        return none
    if architecture.sliding_window == "optional" and not _flag(config, "use_sliding_window"):
        return none
    window = _count(config, "sliding_window")
    layer_types = config.get("layer_types")
    if isinstance(layer_types, list) and len(layer_types) == num_layers:
        unknown = set(map(str, layer_types)) - {"sliding_attention", "full_attention"}
        if unknown:
            raise UnsupportedModelError(
                f"config.json has layers of type {unknown.pop()!r}", "this is not implemented"
            )
        return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
    if architecture.sliding_window == "all layers":
        return (window,) * num_layers
    first = _count(config, "max_window_layers", 28, least=0)
    return tuple(window if layer >= first else None for layer in range(num_layers))
