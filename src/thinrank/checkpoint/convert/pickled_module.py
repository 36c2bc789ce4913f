"""Model, config and tokenizer out of a pickled `nn.Module`, read as inert data.

SVD-LLM and Dobi-SVD save `{'model': module, 'tokenizer': tokenizer}`; LowRankArena the module alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...errors import CheckpointError
from ...model.registry import NEUTRAL_KEYS
from ..pickle_machine import Stub
from ..pickle_objects import module_tensors, plain_json, stub_attributes
from ..tensors import LazyTensor

#: What of a pickled config object describes the model; the rest is defaults of an old transformers.
_CONFIG_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "attention_bias",
    "attention_dropout",
    "mlp_bias",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "torch_dtype",
    "_name_or_path",
    *NEUTRAL_KEYS,
)


def find_module(root: object) -> Stub | None:
    """The pickled module in a checkpoint's root object, if there is one."""
    candidate = root.get("model") if isinstance(root, dict) else root
    if isinstance(candidate, Stub) and "_modules" in stub_attributes(candidate):
        return candidate
    return None


def unpack_module(
    module: Stub, root: object
) -> tuple[dict[str, Any] | None, dict[str, LazyTensor], dict[str, bytes]]:
    """Config (None if it holds none), tensors by state-dict name, tokenizer files."""
    attributes = stub_attributes(module)
    config = attributes.get("config")
    files: dict[str, bytes] = {}
    if isinstance(root, dict) and isinstance(root.get("tokenizer"), Stub):
        files |= _tokenizer(root["tokenizer"])
    generation = attributes.get("generation_config")
    if isinstance(generation, Stub):
        files["generation_config.json"] = _encode(_generation_config(generation))
    return _config(config) if isinstance(config, Stub) else None, module_tensors(module), files


def _config(stub: Stub) -> dict[str, Any]:
    """A pickled config object as config.json; `model_type` was a class attribute, so its module says it."""
    attributes = stub_attributes(stub)
    config = {key: plain_json(attributes[key]) for key in _CONFIG_KEYS if key in attributes}
    parts = stub.cls.module.split(".")
    config["model_type"] = parts[2] if parts[:2] == ["transformers", "models"] and len(parts) > 2 else None
    return config


def _generation_config(stub: Stub) -> dict[str, Any]:
    attributes = stub_attributes(stub)
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {key: plain_json(attributes[key]) for key in keys if attributes.get(key) is not None}


def _tokenizer(stub: Stub) -> dict[str, bytes]:
    """tokenizer.model or tokenizer.json, whichever the pickled tokenizer carries, and its config."""
    attributes = stub_attributes(stub)
    files: dict[str, bytes] = {}
    sentencepiece, fast = attributes.get("sp_model_proto"), attributes.get("_tokenizer")
    if isinstance(sentencepiece, bytes):
        files["tokenizer.model"] = sentencepiece
    elif isinstance(fast, Stub) and isinstance(fast.state, bytes):
        files["tokenizer.json"] = fast.state
    else:
        return {}
    files["tokenizer_config.json"] = _encode(_tokenizer_config(stub.cls.name, attributes))
    return files


def _tokenizer_config(class_name: str, attributes: Mapping[str, object]) -> dict[str, Any]:
    arguments = attributes.get("init_kwargs")
    config: dict[str, Any] = {}
    for key, value in (arguments if isinstance(arguments, dict) else {}).items():
        if key.endswith("_token") or key in ("chat_template", "model_max_length", "legacy"):
            text = _token_text(value)
            if text is not None:
                config[str(key)] = text
        elif isinstance(value, bool):
            config[str(key)] = value
    config["tokenizer_class"] = class_name
    return config


def _token_text(value: object) -> str | int | bool | None:
    """A special token is a string or a pickled AddedToken."""
    if isinstance(value, Stub):
        value = stub_attributes(value).get("content")
    return value if isinstance(value, str | int | bool) else None


def _encode(value: dict[str, Any]) -> bytes:
    try:
        return (json.dumps(value, indent=2) + "\n").encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(
            "the pickled tokenizer has broken text", "name the dense model with --base"
        ) from error
