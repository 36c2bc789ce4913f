"""The decoder against Hugging Face, in float32, for every architecture and RoPE type."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from thinrank.model.batch import ForwardBatch
from thinrank.model.decoder import Decoder
from thinrank.model.layers import DecoderLayer, LowRankLinear
from tiny_hf_models import CONFIGS, decoder_of, hf_model, low_rank_pair, random_ids

CPU = torch.device("cpu")


def whole(*sequences: list[int]) -> ForwardBatch:
    return ForwardBatch.whole_sequences([torch.tensor(ids) for ids in sequences], CPU)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_hugging_face(name: str) -> None:
    model = hf_model(CONFIGS[name])
    ids = random_ids(150)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    logits = decoder_of(model)(whole(ids))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama-gqa", "llama-head-dim", "qwen2", "qwen3"])
def test_low_rank_equals_the_product_of_its_factors(name: str) -> None:
    q, k, up = (f"model.layers.{{}}.{m}" for m in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj"))
    ranks = {q.format(0): 7, k.format(0): 3, up.format(1): 13, up.format(2): 13}
    ranks |= {f"model.layers.2.{m}_proj": 11 for m in ("self_attn.v", "self_attn.o", "mlp.gate", "mlp.down")}
    if not CONFIGS[name].tie_word_embeddings:
        ranks["lm_head"] = 17
    tied = {f"{up.format(2)}.factor_in.weight": f"{up.format(1)}.factor_in.weight"}
    model, decoder = low_rank_pair(CONFIGS[name], ranks, tied)
    first, second = decoder.layers[1].up_proj, decoder.layers[2].up_proj
    assert isinstance(first, LowRankLinear) and isinstance(second, LowRankLinear)
    assert first.factor_in is second.factor_in
    ids = random_ids(40)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(decoder(whole(ids)), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window"])
@pytest.mark.parametrize("lengths", [(50, 50, 50), (50, 1, 67)])
def test_packed_sequences_do_not_see_each_other(name: str, lengths: tuple[int, ...]) -> None:
    decoder = decoder_of(hf_model(CONFIGS[name]))
    sequences = [random_ids(length, seed) for seed, length in enumerate(lengths)]
    alone = torch.cat([decoder(whole(ids)) for ids in sequences])
    torch.testing.assert_close(decoder(whole(*sequences)), alone, atol=1e-5, rtol=1e-5)


def test_rows_are_a_selection_of_the_logits() -> None:
    decoder = decoder_of(hf_model(CONFIGS["llama-gqa"]))
    batch, rows = whole(random_ids(20)), torch.tensor([3, 19])
    torch.testing.assert_close(decoder(batch, rows=rows), decoder(batch)[rows])


def test_layers_can_run_one_by_one_and_be_watched() -> None:
    """What compression does: build a layer alone, wrap a projection, pass the residual stream on."""
    model = hf_model(CONFIGS["llama-gqa"])
    decoder = decoder_of(model)
    batch = whole(random_ids(20), random_ids(20, 1))
    hidden = decoder.embed(batch)
    inputs: list[Tensor] = []
    for index in range(len(decoder.layers)):
        layer = DecoderLayer.build(decoder.config, index, model.state_dict().__getitem__)
        inner = layer.down_proj

        def watch(x: Tensor, inner=inner) -> Tensor:
            inputs.append(x)
            return inner(x)

        hidden = replace(layer, down_proj=watch)(hidden, batch)
    torch.testing.assert_close(decoder.head(hidden), decoder(batch))
    assert [tuple(x.shape) for x in inputs] == [(40, decoder.config.intermediate_size)] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_keep_a_float32_residual_stream(dtype: torch.dtype) -> None:
    model = hf_model(CONFIGS["qwen3"])
    state = model.state_dict()
    decoder = Decoder.build(decoder_of(model).config, lambda name: state[name].to(dtype))
    batch = whole(random_ids(30))
    assert decoder.hidden(batch).dtype == torch.float32
    rounded = {name: tensor.to(dtype).float() for name, tensor in state.items()}
    oracle = Decoder.build(decoder.config, rounded.__getitem__)(batch)
    error = (decoder(batch) - oracle).abs().max() / oracle.abs().max()
    # Activations are rounded at each of ~7 GEMMs a layer: 2^-8 or 2^-11 each time, partly cancelling.
    assert error < (0.05 if dtype == torch.bfloat16 else 0.01)
