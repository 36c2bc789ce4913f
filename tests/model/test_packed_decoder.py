"""The packed decoder against the reference decoder: prefill, chunks, decode steps; every mix of modules."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from thinrank.bench.shapes import plain_decoder, random_model, reference_decoder
from thinrank.engine.graph import capture
from thinrank.engine.kv_cache import allocate_kv_cache
from thinrank.errors import UnsupportedModelError
from thinrank.kernels import decode_attention
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


def models(model_type, choose, *, tied=False, low_rank_head=False, **changes):
    """The same random weights in both decoders. choose: which modules are low-rank."""
    raw = tiny_config(model_type, **SIZES, **changes)
    parsed = parse_config(raw)
    modules = [m for i, m in enumerate(parsed.linears()) if (low_rank_head or m != "lm_head") and choose(i)]
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
    "low-rank head": lambda: models("llama", EVERY, low_rank_head=True),
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


@pytest.mark.usefixtures("ordered_dot")
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


def wide_state(packed, rows, following):
    """A step at position 64: row r continues sequence r % 2, whose first block it shares, in its own block 10 + r."""
    state = packed.decode_state(rows, 2, idle_block=9)
    state.token_ids.copy_(following)
    state.positions.fill_(64)
    state.context_lens.fill_(65)
    own = torch.arange(10, 10 + rows, device=DEVICE)
    state.block_tables.copy_(torch.stack([TABLES[:, 0].repeat(rows // 2), own], dim=1))
    return state


@pytest.fixture
def few_splits(monkeypatch):
    """Of attention, in the interpreter: it takes as long for a program that has nothing to do as for one that has."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(decode_attention, "_NUM_SMS", 8)


def wide_case(case, rows):
    """Both decoders, a cache with the first blocks of two sequences, those sequences, and each row's next token."""
    reference, packed = CASES[case]()
    generator = torch.Generator().manual_seed(3)
    token_ids = torch.randint(0, 101, (2, 64), generator=generator).to(DEVICE)
    cache = allocate_kv_cache(packed.config, 10 + rows, torch.float32, DEVICE)
    packed(paged(token_ids, 0, 64), cache)
    following = torch.randint(0, 101, (rows,), generator=generator).to(DEVICE)
    return reference, packed, cache, token_ids, following


@pytest.mark.usefixtures("few_splits")
@pytest.mark.parametrize(("case", "rows"), [*((case, 16) for case in CASES), ("llama", 64)])
def test_a_wide_step_agrees_with_the_reference(case, rows):
    """As above, two steps on end. Every row has its own token, context and block; half of them share a history."""
    reference, packed, cache, token_ids, following = wide_case(case, rows)
    state = wide_state(packed, rows, following)
    sequences = torch.cat([token_ids.repeat(rows // 2, 1), following[:, None]], dim=1)
    for length in (65, 66):
        packed.decode_step(state, cache)
        last = reference(ForwardBatch.whole_sequences(list(sequences), DEVICE)).view(rows, length, -1)[:, -1]
        torch.testing.assert_close(state.logits, last, atol=1e-4, rtol=1e-4)
        assert torch.equal(state.token_ids, state.logits.argmax(-1))
        assert torch.equal(state.history[length % len(state.history)], state.token_ids)
        assert state.positions.tolist() == [length] * rows
        assert state.context_lens.tolist() == [length + 1] * rows
        sequences = torch.cat([sequences, state.token_ids[:, None]], dim=1)


@pytest.mark.usefixtures("few_splits")
def test_a_row_of_a_wide_step_does_not_depend_on_the_others():
    """Bit for bit, even where their keys and values are not numbers and their contexts longer."""
    _, packed, cache, _, following = wide_case("mixed, tied embeddings", 16)
    alone = wide_state(packed, 16, following)
    packed.decode_step(alone, cache)
    beside = wide_state(packed, 16, following)
    others = torch.arange(16, device=DEVICE) % 4 != 1
    for layer in cache:
        layer.keys[[4, 5]] = layer.values[[4, 5]] = float("nan")
    beside.token_ids[others] += 1
    beside.token_ids.remainder_(101)
    beside.positions[others] = 100
    beside.context_lens[others] = 101
    beside.block_tables[others] = torch.tensor([4, 5], dtype=torch.int32, device=DEVICE)
    packed.decode_step(beside, cache)
    assert torch.equal(alone.logits[~others], beside.logits[~others])
    assert beside.logits[others].isnan().all()
    assert torch.equal(alone.token_ids[~others], beside.token_ids[~others])
    assert (beside.history[101 % len(beside.history)][others] == -1).all()


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("structure", ["uniform", "mixed", "dense"])
@pytest.mark.parametrize("rows", [16, 32, 64])
def test_a_captured_wide_step(rows, structure):
    """The same bits as without a graph, and no further from float32 than twice the plain decoder in bfloat16, which
    rounds at the same places. Contexts of many lengths, some across the end of a block.
    """
    model = random_model("smollm2-135m", structure, 0.5, torch.bfloat16, DEVICE, seed=0)
    config = model.config
    packed = PackedDecoder.build(config, model.get, model.dtype, DEVICE, 1024)
    generator = torch.Generator().manual_seed(0)
    lengths = [60 + 37 * row % 200 for row in range(rows)]
    prompts = [torch.randint(config.vocab_size, (n,), generator=generator).to(DEVICE) for n in lengths]
    blocks, steps = 5, 6
    tables = torch.randperm(rows * blocks, generator=generator).view(rows, blocks).to(DEVICE)
    slots = [
        table[torch.arange(n, device=DEVICE) // 64] * 64 + torch.arange(n, device=DEVICE) % 64
        for table, n in zip(tables, lengths, strict=True)
    ]
    whole = ForwardBatch.whole_sequences(prompts, DEVICE)
    paged = replace(whole, paged=PagedContext(tuple(lengths), tables, torch.cat(slots)))
    ends = torch.tensor(lengths, device=DEVICE).cumsum(0) - 1

    def start():
        cache = allocate_kv_cache(config, rows * blocks + 1, model.dtype, DEVICE)
        state = packed.decode_state(rows, blocks, idle_block=rows * blocks)
        return cache, state

    def fill(cache, state):
        state.token_ids.copy_(packed(paged, cache, ends).argmax(-1))
        state.positions.copy_(torch.tensor(lengths))
        state.context_lens.copy_(state.positions + 1)
        state.block_tables.copy_(tables)

    (cache, state), (other_cache, other) = start(), start()
    graph = capture(lambda: packed.decode_step(state, cache), DEVICE)
    fill(cache, state)
    fill(other_cache, other)
    chosen, logits = [state.token_ids.clone()], []
    for _ in range(steps):
        graph.replay()
        packed.decode_step(other, other_cache)
        assert torch.equal(state.logits, other.logits)
        assert torch.equal(state.token_ids, other.token_ids)
        chosen.append(state.token_ids.clone())
        logits.append(state.logits.clone())
    outputs = torch.stack(chosen[:-1], dim=1)
    sequences = [torch.cat([prompt, output]) for prompt, output in zip(prompts, outputs, strict=True)]
    starts = torch.tensor([n + steps for n in lengths], device=DEVICE).cumsum(0) - steps
    last = (starts[:, None] + torch.arange(steps, device=DEVICE)).flatten()
    batch = ForwardBatch.whole_sequences(sequences, DEVICE)
    expected, plain = (
        build(model)(batch, rows=last).view(rows, steps, -1) for build in (reference_decoder, plain_decoder)
    )
    mine = (torch.stack(logits, dim=1) - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    bound = 2 * float((plain - expected).norm() / expected.norm())
    assert float(mine.max()) < bound


def test_a_shared_factor_is_stored_once():
    _, apart = models("llama", EVERY)
    _, shared = models("llama", EVERY, tied=True)
    assert shared.arena.numel() < apart.arena.numel()
    first, second = (layer.qkv.inputs[0] for layer in shared.layers)
    assert first == second


def test_odd_sizes_are_refused():
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4}
    for raw, message in (
        (tiny_config("llama"), "hidden_size is 48, no multiple of 64"),
        (tiny_config("llama", **sizes, head_dim=80), "head_dim is 80, none of 64, 96, 128, 256"),
    ):
        tensors = random_tensors(raw)
        with pytest.raises(UnsupportedModelError, match=message):
            PackedDecoder.build(parse_config(raw), tensors.__getitem__, torch.float32, DEVICE, 64)
