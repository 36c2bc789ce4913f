"""The cost model counts what a model really holds."""

import pytest

from thinrank.checkpoint.format import expected_tensors
from thinrank.model import cost
from thinrank.model.registry import parse_config
from tiny_hf_models import CONFIGS, decoder_of, hf_model


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_equal_hugging_face(name: str) -> None:
    model = hf_model(CONFIGS[name])
    config = decoder_of(model).config
    assert cost.parameters(config) == sum(p.numel() for p in model.parameters())
    assert cost.weight_bytes(config, 2) == 2 * cost.parameters(config)


def test_parameters_equal_the_stored_tensors() -> None:
    up = "model.layers.{}.mlp.up_proj"
    config = parse_config(
        CONFIGS["llama-head-dim"].to_dict(),
        ranks={up.format(0): 5, up.format(1): 5, "lm_head": 9},
        tied_factors={f"{up.format(1)}.factor_in.weight": f"{up.format(0)}.factor_in.weight"},
    )
    stored = 0
    for shape in expected_tensors(config).values():
        size = 1
        for extent in shape:
            size *= extent
        stored += size
    assert cost.parameters(config) == stored
    dense = parse_config(CONFIGS["llama-head-dim"].to_dict())
    assert cost.parameters(cost.dense_config(config)) == cost.parameters(dense)


def test_a_step_reads_the_head_but_not_the_embedding_table() -> None:
    untied = parse_config(CONFIGS["llama-gqa"].to_dict())
    table = untied.vocab_size * untied.hidden_size
    assert cost.decode_step_bytes(untied, 2) == 2 * (cost.parameters(untied) - table)
    tied = parse_config(CONFIGS["llama-mha-tied"].to_dict())
    assert cost.decode_step_bytes(tied, 2) == 2 * cost.parameters(tied)


def test_cache_bytes_follow_the_window() -> None:
    config = parse_config(CONFIGS["mistral-window"].to_dict())
    per_token = cost.kv_bytes_per_token(config, 2)
    assert per_token == 2 * 3 * 2 * 16 * 2  # keys and values, layers, heads, head_dim, bytes
    read = cost.decode_step_bytes(config, 2, [10, 100]) - cost.decode_step_bytes(config, 2)
    assert read == per_token * (10 + 37)


def test_flops_grow_with_the_context() -> None:
    config = parse_config(CONFIGS["llama-gqa"].to_dict())
    table = config.vocab_size * config.hidden_size
    norms = 7 * config.hidden_size
    assert cost.flops_per_token(config) == 2 * (cost.parameters(config) - table - norms)
    assert cost.flops_per_token(config, 10) - cost.flops_per_token(config) == 4 * 64 * 10 * 3


def test_a_tied_head_is_quantised_beside_its_embedding() -> None:
    tied = parse_config({**CONFIGS["llama-gqa"].to_dict(), "tie_word_embeddings": True})
    untied = parse_config({**CONFIGS["llama-gqa"].to_dict(), "tie_word_embeddings": False})
    for kind in (cost.INT8, cost.INT4):
        assert cost.quantized_weight_bytes(tied, 2, kind) == cost.quantized_weight_bytes(untied, 2, kind)
        step_bytes = cost.quantized_step_bytes(untied, 2, kind, [9])
        assert cost.quantized_step_bytes(tied, 2, kind, [9]) == step_bytes
    assert cost.INT4.matrix_bytes(3, 130) == 3 * (65 + 2 * 4), "a last group may be short"


def test_latents_of_a_cache() -> None:
    dense = parse_config(CONFIGS["llama-gqa"].to_dict())
    assert cost.latent_kv_bytes_per_token(dense, 2) == cost.kv_bytes_per_token(dense, 2)
    ranks = {"model.layers.0.self_attn.k_proj": 5, "model.layers.0.self_attn.q_proj": 1}
    low_rank = parse_config(CONFIGS["llama-gqa"].to_dict(), ranks=ranks)
    saved = dense.num_key_value_heads * dense.head_dim - 5
    assert cost.latent_kv_bytes_per_token(low_rank, 2) == cost.kv_bytes_per_token(dense, 2) - 2 * saved
