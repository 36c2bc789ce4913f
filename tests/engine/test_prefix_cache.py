"""The prefix cache: the same tokens as cold, what counts as a hit, who shares and who does not."""

from collections import defaultdict
from typing import Any

import pytest

from engine_invariants import check_empty, check_invariants
from hashing_decoder import VOCAB, hash_continuation, hashing_engine
from thinrank.config import EngineConfig, SamplingParams
from thinrank.engine.engine import Engine
from thinrank.engine.prefix_cache import block_hashes
from thinrank.engine.sequence import Sequence, TokenOutput
from tiny_hf_models import CONFIGS, decoder_of, hf_model, random_ids


def greedy(max_tokens: int = 8, **settings: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **settings)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 37 + i * i * 11) % VOCAB for i in range(length)]


def run(engine: Engine, ids: list[int], params: SamplingParams, **options: Any) -> list[TokenOutput]:
    request = engine.add(ids, params, **options)
    outputs: dict[str, list[TokenOutput]] = defaultdict(list)
    while engine.has_unfinished:
        for output in engine.step():
            outputs[output.request_id].append(output)
        check_invariants(engine)
    return outputs[request]


def tokens(outputs: list[TokenOutput]) -> list[int]:
    return [output.token_id for output in outputs]


def num_cached(outputs: list[TokenOutput]) -> int:
    assert outputs[0].metrics is not None
    return outputs[0].metrics.num_cached_tokens


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window"])
def test_a_hit_gives_the_tokens_of_a_cold_start(name: str) -> None:
    """A real model, float32; the second prompt shares two blocks and goes on otherwise."""
    decoder = decoder_of(hf_model(CONFIGS[name]))
    shared = random_ids(140)
    warm = Engine(decoder)
    for ids in (shared, shared, shared[:130] + random_ids(40, 1)):
        cold = Engine(decoder, EngineConfig(enable_prefix_caching=False))
        assert tokens(run(warm, ids, greedy(24))) == tokens(run(cold, ids, greedy(24)))
    stats = warm.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (140 + 140 + 170, 0 + 128 + 128)


@pytest.mark.parametrize(("length", "hit"), [(63, 0), (64, 0), (65, 64), (128, 64), (129, 128), (200, 192)])
def test_full_blocks_but_never_the_last_token(length: int, hit: int) -> None:
    engine = hashing_engine()
    outputs = [run(engine, prompt(length), greedy()) for _ in range(2)]
    assert [num_cached(each) for each in outputs] == [0, hit]
    assert tokens(outputs[0]) == tokens(outputs[1]) == hash_continuation(prompt(length), 8)


def test_the_next_turn_of_a_conversation_finds_the_answer_too() -> None:
    engine = hashing_engine()
    answer = tokens(run(engine, prompt(100), greedy(100)))
    turn = prompt(100) + answer + prompt(20, 5)
    outputs = run(engine, turn, greedy())
    assert num_cached(outputs) == 192 and tokens(outputs) == hash_continuation(turn, 8)


def test_salts_do_not_share() -> None:
    engine = hashing_engine()
    salts = ["", "a", "b", "a", ""]
    outputs = [run(engine, prompt(100), greedy(), cache_salt=salt) for salt in salts]
    assert [num_cached(each) for each in outputs] == [0, 0, 0, 64, 64]


def test_equal_tokens_after_different_ones_are_another_block() -> None:
    engine = hashing_engine()
    one, other = prompt(64) + prompt(70, 3), prompt(64, 1) + prompt(70, 3)
    assert num_cached(run(engine, one, greedy())) == num_cached(run(engine, other, greedy())) == 0


def test_several_sequences_compute_their_prompt_once() -> None:
    engine = hashing_engine(max_num_batched_tokens=100)
    computed = []
    request = engine.add(prompt(200), SamplingParams(n=4, seed=1, max_tokens=10))
    outputs = defaultdict(list)
    while engine.has_unfinished:
        before = {s: s.num_computed for s in engine.scheduler.sequences}
        for output in engine.step():
            outputs[output.index].append(output)
        computed.append(sum(max(0, min(s.num_computed, 200) - before[s]) for s in before if s.block_table))
        check_invariants(engine)
    assert request and {len(each) for each in outputs.values()} == {10}
    assert [num_cached(outputs[index]) for index in range(4)] == [0, 192, 192, 192]
    assert len({tuple(tokens(each)) for each in outputs.values()}) == 4
    check_empty(engine)


def test_requests_that_come_together_share_too() -> None:
    """The second waits for the prompt of the first, not the third, which begins otherwise."""
    engine = hashing_engine()
    for ids in (prompt(100), prompt(100), prompt(100, 1)):
        engine.add(ids, greedy(3))
    assert [output.request_id for output in engine.step()] == ["0"]
    assert [output.request_id for output in engine.step()] == ["0", "1", "2"]
    assert engine.stats().prefix_cache_hits == 64


def test_what_was_never_computed_is_not_found() -> None:
    """A prompt that was aborted in the middle leaves the blocks that were done."""
    engine = hashing_engine(max_num_batched_tokens=150)
    aborted = engine.add(prompt(400), greedy())
    engine.step()
    engine.abort(aborted)
    outputs = run(engine, prompt(400), greedy())
    assert num_cached(outputs) == 128 and tokens(outputs) == hash_continuation(prompt(400), 8)


def test_the_least_recently_used_goes_first() -> None:
    """Ten blocks. Four prompts of two full blocks each fit; the fifth evicts the one not asked for again."""
    engine = hashing_engine(10)
    for seed in range(4):
        run(engine, prompt(140, seed), greedy(2))
    assert num_cached(run(engine, prompt(140, 0), greedy(2))) == 128
    run(engine, prompt(140, 4), greedy(2))
    assert engine.prefix_cache is not None and len(engine.prefix_cache) <= 10
    hits = {seed: num_cached(run(engine, prompt(140, seed), greedy(2))) for seed in (0, 2, 3, 4)}
    assert hits[0] == hits[3] == hits[4] == 128
    check_empty(engine)


def test_an_evicted_block_is_forgotten() -> None:
    engine = hashing_engine(4)
    run(engine, prompt(200), greedy(2))
    run(engine, prompt(250, 1), greedy(2))
    outputs = run(engine, prompt(200), greedy(2))
    assert num_cached(outputs) == 0 and tokens(outputs) == hash_continuation(prompt(200), 2)


def test_a_preempted_sequence_finds_its_own_blocks() -> None:
    engine = hashing_engine(8)
    requests = {engine.add(prompt(120, seed), greedy(150)): prompt(120, seed) for seed in range(3)}
    found = []
    answers: dict[str, list[int]] = defaultdict(list)
    while engine.has_unfinished:
        waiting = {sequence for sequence in engine.scheduler.waiting if sequence.num_output_tokens}
        for output in engine.step():
            answers[output.request_id].append(output.token_id)
        found += [s.num_shared_blocks for s in waiting if s.block_table]
        check_invariants(engine)
    assert found and max(found) > 0
    assert answers == {request: hash_continuation(ids, 150) for request, ids in requests.items()}
    assert engine.stats().prefix_cache_queries == 360, "only first lookups count"


def test_it_can_be_switched_off() -> None:
    engine = hashing_engine(enable_prefix_caching=False)
    assert [num_cached(run(engine, prompt(100), greedy())) for _ in range(2)] == [0, 0]
    stats = engine.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (0, 0)


def test_hashes() -> None:
    def hashes(ids: list[int], salt: str = "") -> list[bytes]:
        sequence = Sequence("r", 0, ids, greedy(), frozenset(), 8, 0, salt)
        return block_hashes(sequence, len(ids) // 64)

    ids = prompt(192)
    assert len(set(hashes(ids))) == 3 and {len(each) for each in hashes(ids)} == {32}
    assert hashes(ids)[:2] == hashes(ids[:128]) and hashes(ids) == hashes(list(ids))
    changed = [ids[0] + 1, *ids[1:]]
    assert not set(hashes(ids)) & set(hashes(changed)) and not set(hashes(ids)) & set(hashes(ids, "salt"))
