"""Continuous batching: who runs when, who waits, and that nobody's tokens depend on it."""

from collections import defaultdict
from typing import Any

import pytest
from torch import Tensor

from engine_invariants import check_empty, check_invariants
from hashing_decoder import VOCAB, hash_continuation, hashing_engine
from thinrank.config import EngineConfig, SamplingParams
from thinrank.engine.engine import Engine
from thinrank.errors import OptionError
from thinrank.model.batch import ForwardBatch
from thinrank.model.decoder import Decoder
from tiny_hf_models import CONFIGS, decoder_of, hf_model, random_ids


def greedy(max_tokens: int = 16) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 37 + i * i * 11) % VOCAB for i in range(length)]


def drain(engine: Engine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = defaultdict(list)
    while engine.has_unfinished:
        for output in engine.step():
            tokens[output.request_id].append(output.token_id)
        check_invariants(engine)
    check_empty(engine)
    return tokens


def test_64_requests_of_mixed_lengths() -> None:
    """A real model, float32: greedy and sampled tokens are those of each request alone."""
    decoder = decoder_of(hf_model(CONFIGS["llama-gqa"]))
    requests = [
        (
            random_ids(1 + (37 * i) % 180, i),
            SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=1 + (11 * i) % 24),
        )
        for i in range(64)
    ]
    limits = EngineConfig(
        kv_cache_memory=60 * 64 * 3 * 2 * 2 * 16 * 4,  # 60 blocks: not for all at a time
        max_num_seqs=48,
        max_num_batched_tokens=300,
        max_num_prefill_tokens_while_decoding=100,
    )
    engine = Engine(decoder, limits)
    ids = [engine.add(*request) for request in requests]
    together = drain(engine)
    for request_id, request in zip(ids, requests, strict=True):
        alone = Engine(decoder, EngineConfig(max_num_seqs=1))
        alone.add(*request)
        assert drain(alone)["0"] == together[request_id]


def test_blocks_are_taken_when_they_are_needed() -> None:
    engine = hashing_engine(8)
    engine.add(prompt(60), greedy(200))
    held = []
    while engine.has_unfinished:
        engine.step()
        held.append(8 - engine.pool.num_free)
    assert held[0] == 1 and max(held) == 5 and held == [*sorted(held[:-1]), 0]


def test_a_stream_gets_a_token_every_step_while_a_long_prompt_is_processed() -> None:
    engine = hashing_engine(max_num_batched_tokens=400, max_num_prefill_tokens_while_decoding=100)
    short = engine.add(prompt(5), greedy(40))
    engine.step()
    long = engine.add(prompt(950, 1), greedy(4))
    for chunk in range(1, 10):
        assert [output.request_id for output in engine.step()] == [short]
        assert [s.num_computed for s in engine.scheduler.running if s.request_id == long] == [100 * chunk]
    assert [output.request_id for output in engine.step()] == [short, long]
    drain(engine)


def test_without_a_stream_a_prompt_gets_the_whole_budget() -> None:
    engine = hashing_engine(max_num_batched_tokens=400, max_num_prefill_tokens_while_decoding=100)
    engine.add(prompt(950), greedy(1))
    assert [len(engine.step()) for _ in range(3)] == [0, 0, 1]


def test_preemption_changes_no_token() -> None:
    """Four rows that grow to 4 blocks each, where there are 7: the last ones start over."""
    requests = [(prompt(60, seed), greedy(190)) for seed in range(4)]
    engine = hashing_engine(7, enable_prefix_caching=False)
    ids = [engine.add(*request) for request in requests]
    tokens = drain(engine)
    assert engine.stats().num_preemptions > 2
    for request_id, (ids_of_prompt, _) in zip(ids, requests, strict=True):
        assert tokens[request_id] == hash_continuation(ids_of_prompt, 190)


def test_the_last_to_arrive_is_preempted_and_the_first_to_come_back() -> None:
    engine = hashing_engine(4, enable_prefix_caching=False)
    first, second = engine.add(prompt(60), greedy(120)), engine.add(prompt(100, 1), greedy(60))
    third = engine.add(prompt(10, 2), greedy(5))
    finished = []
    while engine.has_unfinished:
        finished += [output.request_id for output in engine.step() if output.finish_reason]
        if engine.scheduler.num_preemptions == 1:
            waiting = [sequence.request_id for sequence in engine.scheduler.waiting]
            assert waiting in ([second, third], [third], [])
    assert engine.stats().num_preemptions == 1
    assert finished.index(second) < finished.index(third) or finished == [first, third, second]
    check_empty(engine)


def test_a_large_request_is_not_starved_by_small_ones() -> None:
    """It needs all blocks; small ones keep coming, and wait behind it."""
    engine = hashing_engine(4)
    engine.add(prompt(10), greedy(30))
    engine.step()
    large = engine.add(prompt(250, 1), greedy(6))
    seen = []
    for number in range(60):
        engine.add(prompt(10, 2 + number), greedy(30))
        seen += [output.request_id for output in engine.step() if output.request_id == large]
    assert len(seen) == 6
    drain(engine)


def test_what_fits_together_runs_together() -> None:
    """Room for the last token of each: the watermark makes nobody wait."""
    engine = hashing_engine(8 * 2, max_num_seqs=8)
    for seed in range(8):
        engine.add(prompt(64, seed), greedy(64))
    assert len(engine.step()) == 8


def test_the_watermark_keeps_a_block_for_each_row_that_can_grow() -> None:
    engine = hashing_engine(4)
    engine.add(prompt(64), greedy(64))
    engine.add(prompt(64, 1), greedy(64))
    engine.add(prompt(64, 2), greedy(64))
    assert len(engine.step()) == 2
    drain(engine)
    assert engine.stats().num_preemptions == 0


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_abort_frees_blocks_at_once(steps: int) -> None:
    """Before, amid and after the prompt."""
    engine = hashing_engine(max_num_batched_tokens=100)
    request = engine.add(prompt(250), greedy(50))
    for _ in range(steps):
        engine.step()
    (sequence,) = engine.scheduler.sequences
    engine.abort(request)
    check_empty(engine)
    assert engine.step() == [] and sequence.metrics.finished is not None


def test_stats_and_metrics() -> None:
    engine = hashing_engine(32, max_num_seqs=2)
    ids = [engine.add(prompt(100, seed), greedy(5)) for seed in range(3)]
    outputs = engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (2, 1, 4 / 32)
    assert (stats.prompt_tokens, stats.generation_tokens) == (200, 2)
    metrics = outputs[0].metrics
    assert metrics is not None and metrics.first_scheduled is not None and metrics.first_token is not None
    assert metrics.arrival <= metrics.first_scheduled <= metrics.first_token and metrics.finished is None
    assert drain(engine).keys() == set(ids)
    assert metrics.finished is not None and metrics.finished >= metrics.first_token
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)
    assert (stats.prompt_tokens, stats.generation_tokens) == (300, 15)


def test_batch_invariance_without_graphs_is_one_row_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(hf_model(CONFIGS["llama-gqa"]))
    engine = Engine(decoder, EngineConfig(batch_invariant=True))
    rows = []

    def watched(self: Decoder, batch: ForwardBatch, *rest: Any) -> Tensor:
        rows.append(len(batch.query_lens))
        return self.head(self.hidden(batch, *rest))

    monkeypatch.setattr(Decoder, "__call__", watched)
    for seed in range(3):
        engine.add(random_ids(9, seed), greedy(4))
    drain(engine)
    assert set(rows) == {1} and len(rows) == 3 * 3


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "max_num_prefill_tokens_while_decoding"])
def test_limits_must_be_positive(name: str) -> None:
    with pytest.raises(OptionError, match=f"{name} is 0"):
        EngineConfig(**{name: 0})
