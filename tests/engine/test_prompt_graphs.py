"""Short prompts through a step on fixed tensors: what prefill computes. On a GPU captured, elsewhere just run."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from engine_invariants import check_empty, check_invariants
from hashing_decoder import PROMPT_TOKENS, eager_prompt_graph, hash_continuation, hashing_engine
from hashing_decoder import VOCAB as HASHED
from mixed_decoders import mixed_decoders
from thinrank.config import SamplingParams
from thinrank.engine.chunks import Chunks
from thinrank.engine.kv_cache import allocate_kv_cache, blocks_for
from thinrank.engine.prompt_graphs import PROMPT_SEQUENCES, PromptGraph, PromptGraphs
from thinrank.engine.scheduler import Scheduled
from thinrank.engine.sequence import Sequence
from thinrank.model.decoder import Decoder
from thinrank.model.packed_decoder import PackedDecoder
from tiny_models import tiny_config

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCKS, MAX_BLOCKS, VOCAB = 12, 4, 101


def decoders(**changes: Any) -> tuple[Decoder, PackedDecoder]:
    raw = tiny_config(
        hidden_size=128, intermediate_size=192, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        num_hidden_layers=2, vocab_size=VOCAB, **changes,
    )  # fmt: skip
    return mixed_decoders(raw, DEVICE)


def cache_of(decoder: Any) -> list[Any]:
    """Poisoned: nobody may read what was not written."""
    cache = allocate_kv_cache(decoder.config, BLOCKS + 1, torch.float32, DEVICE)
    for layer in cache:
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    return cache


def graph_of(decoder: PackedDecoder, cache: Any, tokens: int) -> PromptGraph:
    state = decoder.prompt_state(tokens, PROMPT_SEQUENCES, MAX_BLOCKS, BLOCKS)
    if DEVICE.type == "cuda":
        return PromptGraph(decoder, cache, state, BLOCKS, None)
    graph: PromptGraph = eager_prompt_graph(decoder, cache, state, BLOCKS)
    return graph


def sequence(length: int, seed: int, blocks: list[int]) -> Sequence:
    """Its blocks in the given order, which is none."""
    ids = torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    made = Sequence("r", 0, ids, SamplingParams(max_tokens=8), frozenset(), 8, 0)
    made.block_table = blocks[: blocks_for(length)]
    return made


def advance(scheduled: list[Scheduled]) -> None:
    for each, num_tokens in scheduled:
        each.num_computed += num_tokens


@pytest.mark.parametrize(
    "changes", [{}, {"model_type": "mistral", "sliding_window": 20}], ids=["full", "window"]
)
@torch.inference_mode()
def test_what_prefill_computes(changes: dict[str, Any]) -> None:
    """Chunks with and without history, of one sequence and of three, and fewer tokens after more. To 1e-4: float32 sums
    in another order."""
    plain, packed = decoders(**changes)
    expected_cache, cache = cache_of(plain), cache_of(packed)
    graph = graph_of(packed, cache, 64)
    first, second, third = sequence(90, 1, [7, 2]), sequence(5, 2, [4]), sequence(66, 3, [1, 9])
    steps = [
        [Scheduled(first, 60)],
        [Scheduled(first, 20), Scheduled(second, 5), Scheduled(third, 39)],
        [Scheduled(third, 27)],
        [Scheduled(first, 1)],
    ]
    for scheduled in steps:
        chunks = Chunks.of(scheduled)
        ends = torch.tensor(chunks.lens).cumsum(0) - 1
        hidden, logits = graph.run(chunks, ends.tolist())
        expected = plain.hidden(chunks.batch(DEVICE), expected_cache)
        torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(logits, plain.head(expected[ends]), atol=1e-4, rtol=1e-4)
        advance(scheduled)
    for mine, theirs in zip(cache, expected_cache, strict=True):
        for block in range(BLOCKS):  # what no sequence wrote is as it was
            keys = torch.stack([mine.keys[block], theirs.keys[block]])
            torch.testing.assert_close(keys[0], keys[1], atol=1e-4, rtol=1e-4, equal_nan=True)
    # Rows of no sequence as well: what they leave in the idle block must not become undefined.
    assert graph.state.hidden.isfinite().all()


@torch.inference_mode()
def test_the_smallest_graph_that_has_room() -> None:
    _, packed = decoders()
    cache = cache_of(packed)
    graphs = PromptGraphs([graph_of(packed, cache, tokens) for tokens in (128, 64)])
    assert graphs.tokens == (64, 128)

    def holding(*lens: int) -> int | None:
        scheduled = [Scheduled(sequence(length, 0, [1, 2, 3, 5]), length) for length in lens]
        graph = graphs.holding(Chunks.of(scheduled))
        return None if graph is None else graph.tokens

    assert [holding(1), holding(64), holding(65), holding(40, 24), holding(40, 25)] == [64, 64, 128, 64, 128]
    assert holding(129) is None and holding(64, 65) is None
    assert holding(*[1] * PROMPT_SEQUENCES) == 64 and holding(*[1] * (PROMPT_SEQUENCES + 1)) is None


def test_an_engine_sends_short_prompts_through_graphs() -> None:
    """Those that fit; what comes after a prefix hit; and what a sequence that gave its blocks back has to repeat."""
    engine = hashing_engine(5, graph_sizes=(1, 2, 4))
    graphs: Any = engine.prompt_graphs
    small, large = graphs._graphs
    assert (small.tokens, large.tokens) == PROMPT_TOKENS

    def prompt(length: int, seed: int) -> list[int]:
        return [(seed * 37 + i * i * 11) % HASHED for i in range(length)]

    def answer(*prompts: list[int], max_tokens: int = 70) -> None:
        asked = {
            engine.add(ids, SamplingParams(temperature=0, max_tokens=max_tokens)): ids for ids in prompts
        }
        tokens: dict[str, list[int]] = {request: [] for request in asked}
        while engine.has_unfinished:
            for output in engine.step():
                tokens[output.request_id].append(output.token_id)
            check_invariants(engine)
        assert tokens == {request: hash_continuation(ids, max_tokens) for request, ids in asked.items()}
        check_empty(engine)

    answer(prompt(20, 1), prompt(30, 2))
    assert (small.replays, large.replays) == (1, 0)
    answer(prompt(150, 3))
    assert (small.replays, large.replays) == (1, 0), "too long for any"
    answer(prompt(150, 3))
    assert (small.replays, large.replays) == (2, 0), "two blocks are known"
    answer(prompt(75, 4), prompt(50, 5), max_tokens=100)
    assert engine.stats().num_preemptions > 0
    assert large.replays == 1
