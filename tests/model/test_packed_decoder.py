"""The packed decoder against the reference decoder: prefill, chunks, decode steps; every mix of modules."""

import pytest
import torch

pytest.importorskip("triton")

from thinrank.engine.kv_cache import allocate_kv_cache
from thinrank.errors import UnsupportedModelError
from thinrank.model.batch import ForwardBatch, PagedContext
from thinrank.model.decoder import Decoder
from thinrank.model.packed_decoder import PackedDecoder
from thinrank.model.registry import parse_config
from tiny_models import low_rank, random_tensors, tiny_config

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
}
#: Blocks of two sequences, in no order; block 9 belongs to idle rows.
TABLES = torch.tensor([[3, 1], [2, 7]], device=DEVICE)
LENGTH = 70


def models(model_type, choose, *, tied=False, **changes):
    """The same random weights in both decoders. choose: which modules are low-rank."""
    raw = tiny_config(model_type, **SIZES, **changes)
    parsed = parse_config(raw)
    modules = [m for i, m in enumerate(parsed.linears()) if m != "lm_head" and choose(i)]
    dense, factors = low_rank(random_tensors(raw), {m: 1 + (7 * i) % 61 for i, m in enumerate(modules)})
    tensors = dict(dense)
    for module, (factor_in, factor_out) in factors.items():
        tensors |= {f"{module}.factor_in.weight": factor_in, f"{module}.factor_out.weight": factor_out}
        if f"{module}.bias" in tensors:
            tensors[f"{module}.factor_out.bias"] = tensors[f"{module}.bias"]
    ranks = {module: len(factor_in) for module, (factor_in, _) in factors.items()}
    ties = {}
    if tied:  # layer 1 borrows q's basis of layer 0
        name = "self_attn.q_proj.factor_in.weight"
        ties = {f"model.layers.1.{name}": f"model.layers.0.{name}"}
        ranks["model.layers.1.self_attn.q_proj"] = ranks["model.layers.0.self_attn.q_proj"]
        rank = ranks["model.layers.0.self_attn.q_proj"]
        tensors["model.layers.1.self_attn.q_proj.factor_out.weight"] = torch.randn(256, rank) * 0.1
    config = parse_config(raw, ranks=ranks, tied_factors=ties)
    on_device = {name: tensor.to(DEVICE) for name, tensor in tensors.items()}
    return (
        Decoder.build(config, on_device.__getitem__),
        PackedDecoder.build(config, on_device.__getitem__, torch.float32, DEVICE, 256),
    )


def paged(token_ids, start, end):
    """Tokens start to end of both sequences, their history in the cache."""
    positions = torch.arange(start, end, device=DEVICE)
    slots = torch.cat([table[positions // 64] * 64 + positions % 64 for table in TABLES])
    counts = (end - start, end - start)
    context = PagedContext((end, end), TABLES, slots)
    return ForwardBatch(token_ids[:, start:end].flatten(), positions.repeat(2), counts, context)


EVERY, MIXED, NONE = (lambda i: True), (lambda i: i % 3 != 1), (lambda i: False)
CASES = {
    "llama": lambda: models("llama", EVERY),
    "mixed, tied embeddings": lambda: models("llama", MIXED, tie_word_embeddings=True),
    "dense": lambda: models("llama", NONE),
    "biases": lambda: models("qwen2", MIXED),
    "q/k norm": lambda: models("qwen3", MIXED),
    "window": lambda: models("mistral", EVERY, sliding_window=40),
    "shared factor": lambda: models("llama", EVERY, tied=True),
}


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_reference(case):
    """To 1e-4: float32 sums in another order, logits of order one."""
    reference, packed = CASES[case]()
    token_ids = torch.randint(0, 101, (2, LENGTH), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    expected = reference(ForwardBatch.whole_sequences(list(token_ids), DEVICE))
    whole = packed(ForwardBatch.whole_sequences(list(token_ids), DEVICE))
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)

    cache = allocate_kv_cache(packed.config, 10, torch.float32, DEVICE)
    packed(paged(token_ids, 0, 50), cache)
    chunk = packed(paged(token_ids, 50, LENGTH), cache).view(2, -1, 101)
    torch.testing.assert_close(chunk, expected.view(2, LENGTH, -1)[:, 50:], atol=1e-4, rtol=1e-4)

    for rows in (1, 2):  # one row multiplies by vectors, two on tensor cores
        state = packed.decode_state(rows, 2, idle_block=9)
        following = chunk[:rows, -1].argmax(-1)
        state.token_ids.copy_(following)
        state.positions.fill_(LENGTH)
        state.context_lens.fill_(LENGTH + 1)
        state.block_tables.copy_(TABLES[:rows])
        packed.decode_step(state, cache)
        longer = torch.cat([token_ids[:rows], following[:, None]], dim=1)
        last = reference(ForwardBatch.whole_sequences(list(longer), DEVICE)).view(rows, LENGTH + 1, -1)[:, -1]
        torch.testing.assert_close(state.logits, last, atol=1e-4, rtol=1e-4)
        assert state.token_ids.tolist() == last.argmax(-1).tolist()
        assert state.positions.tolist() == [LENGTH + 1] * rows


def test_a_row_is_the_same_in_any_batch():
    """Bit for bit."""
    _, packed = models("llama", MIXED)
    results = []
    for rows in (1, 2, 8):
        cache = allocate_kv_cache(packed.config, 10, torch.float32, DEVICE)
        state = packed.decode_state(rows, 2, idle_block=9)
        state.token_ids.copy_(torch.arange(5, 5 + rows))
        state.block_tables[:, 0] = torch.arange(rows, dtype=torch.int32)
        packed.decode_step(state, cache)
        results.append(state.logits[0].clone())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_a_shared_factor_is_stored_once():
    _, apart = models("llama", EVERY)
    _, shared = models("llama", EVERY, tied=True)
    assert shared.arena.numel() < apart.arena.numel()
    first, second = (layer.qkv.inputs[0] for layer in shared.layers)
    assert first == second


def test_odd_sizes_are_refused():
    raw = tiny_config("llama")  # hidden_size 48
    tensors = random_tensors(raw)
    with pytest.raises(UnsupportedModelError, match="hidden_size is 48, no multiple of 64"):
        PackedDecoder.build(parse_config(raw), tensors.__getitem__, torch.float32, DEVICE, 64)
