"""A config.json comes from a stranger: whatever stands in it, it is read into numbers that can be computed with, at
once, or refused in one line."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrank.errors import CheckpointError, ThinrankError
from thinrank.model.registry import ARCHITECTURES, MAX_LAYERS, ROPE_TYPES, parse_config
from thinrank.model.rope import RotaryEmbedding

CONFIG = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
KEYS = [
    *CONFIG,
    *("head_dim", "attention_bias", "mlp_bias", "rope_theta", "hidden_act", "bos_token_id", "eos_token_id"),
    *("sliding_window", "use_sliding_window", "layer_types", "max_window_layers", "rope_parameters"),
]
ROPE_KEYS = (
    *("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "rope_theta"),
    *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate", "type"),
)
#: What a JSON file can hold, the numbers that break arithmetic first.
ODD = st.sampled_from(
    [
        0,
        -1,
        1,
        0.0,
        -0.5,
        1e-300,
        1e300,
        1e999,
        -1e999,
        math.nan,
        2**28,
        2**63,
        10**400,
        True,
        None,
        "x",
        [],
        {},
    ]
)
VALUES = ODD | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
ROPE = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(ROPE_TYPES)}, optional=dict.fromkeys(ROPE_KEYS, VALUES)
)
CHANGES = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3) | st.fixed_dictionaries(
    {"rope_scaling": ROPE}
)


@settings(max_examples=300, deadline=5000)
@given(model_type=st.sampled_from(list(ARCHITECTURES)), changes=CHANGES)
def test_any_config_is_read_or_refused(model_type: str, changes: dict[str, object]) -> None:
    raw = {**CONFIG, "model_type": model_type, **changes}
    assert json.loads(json.dumps(raw)).keys() == raw.keys()
    try:
        config = parse_config(raw)
    except ThinrankError:
        return
    assert len(config.linears()) <= 7 * MAX_LAYERS + 1
    assert len(config.sliding_windows) == config.num_hidden_layers
    if config.head_dim < 2**12:
        rope = RotaryEmbedding.build(config.rope, config.head_dim, torch.device("cpu"))
        assert rope.inv_freq.shape == (config.head_dim // 2,)
        assert not rope.inv_freq.isnan().any()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", MAX_LAYERS + 1),
        ("rms_norm_eps", math.nan),
        ("rope_theta", 0),
        ("tie_word_embeddings", "false"),
        ("attention_bias", 1),
        ("rope_scaling", {"rope_type": "linear", "factor": -2.0}),
        ("rope_scaling", {"rope_type": "yarn", "original_max_position_embeddings": 0}),
        ("rope_scaling", {"rope_type": "yarn", "factor": 2.0, "beta_fast": 0}),
        ("rope_scaling", {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0}),
    ],
)
def test_a_value_without_sense_is_refused(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json gives"):
        parse_config({**CONFIG, key: value})
