"""Which rows stand in which graph and what runs ahead, on graphs without CUDA; `test_graph` has the real ones."""

from collections import defaultdict
from typing import Any

import pytest

pytest.importorskip("triton")

from engine_invariants import check_empty, check_invariants
from hashing_decoder import VOCAB, hash_continuation, hashing_engine
from thinrank.config import SamplingParams
from thinrank.engine.engine import Engine


def greedy(max_tokens: int = 16, **settings: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **settings)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 37 + i * i * 11) % VOCAB for i in range(length)]


def graphs_of(engine: Engine) -> Any:
    return engine.runner.graphs


def counts(engine: Engine) -> tuple[int, int]:
    """Launches and loads of all graphs so far."""
    graphs = graphs_of(engine)._graphs.values()
    return sum(graph.launches for graph in graphs), sum(graph.loads for graph in graphs)


def drain(engine: Engine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = defaultdict(list)
    while engine.has_unfinished:
        for output in engine.step():
            tokens[output.request_id].append(output.token_id)
        check_invariants(engine)
    check_empty(engine)
    return tokens


def test_a_row_that_grows_is_loaded_once_and_never_computed_twice() -> None:
    """Over three ends of a block: a launch a token, all but the first of them before the host has read the last."""
    engine = hashing_engine(graph_sizes=(1, 2))
    request = engine.add(prompt(60), greedy(200))
    engine.step()
    for step in range(190):
        engine.step()
        assert counts(engine) == (step + 2, 1)
    assert drain(engine)[request][-3:] == hash_continuation(prompt(60), 200)[-3:]
    assert counts(engine) == (199, 1), "the last token needs no step"


def test_who_joins_and_leaves_disturbs_nobody() -> None:
    """Rows stay on the device while the graph grows from one row to four and shrinks again; no step is repeated."""
    engine = hashing_engine(graph_sizes=(1, 2, 4))
    lengths = {engine.add(prompt(50), greedy(90)): 90}
    tokens: dict[str, list[int]] = defaultdict(list)
    steps = 0
    for seed in range(1, 4):
        for _ in range(5):
            steps += 1
            for output in engine.step():
                tokens[output.request_id].append(output.token_id)
        lengths[engine.add(prompt(50 + seed, seed), greedy(20 - 3 * seed))] = 20 - 3 * seed
    while engine.has_unfinished:
        steps += 1
        for output in engine.step():
            tokens[output.request_id].append(output.token_id)
    for number, (request, length) in enumerate(lengths.items()):
        assert tokens[request] == hash_continuation(prompt(50 + number, number), length)
    launches, loads = counts(engine)
    assert launches == 89, "one a token of the request that was there from the first to the last"
    assert loads == 1 + 3 + 3
    assert steps == 90
    assert graphs_of(engine)._graph.batch_size == 1


def test_a_join_costs_the_new_row_a_step_and_the_others_none() -> None:
    engine = hashing_engine(graph_sizes=(1, 2))
    first = engine.add(prompt(10), greedy(30))
    engine.step()
    engine.step()
    second = engine.add(prompt(10, 1), greedy(30))
    seen = [[output.request_id for output in engine.step()] for _ in range(3)]
    assert seen == [[first, second], [first], [first, second]]


def test_nothing_runs_ahead_when_the_next_block_is_not_there() -> None:
    """All four blocks are taken when both rows fill their second one: the older one goes on alone."""
    engine = hashing_engine(4, graph_sizes=(1, 2), enable_prefix_caching=False)
    requests = {engine.add(prompt(60, seed), greedy(110)): prompt(60, seed) for seed in range(2)}
    assert drain(engine) == {request: hash_continuation(ids, 110) for request, ids in requests.items()}
    assert engine.stats().num_preemptions == 1


def test_more_rows_than_the_largest_graph() -> None:
    """In groups, each launched before the one before it is read."""
    engine = hashing_engine(graph_sizes=(1, 2, 4), max_num_seqs=16)
    requests = {
        engine.add(prompt(20 + seed, seed), greedy(70)): prompt(20 + seed, seed) for seed in range(10)
    }
    assert drain(engine) == {request: hash_continuation(ids, 70) for request, ids in requests.items()}
    assert counts(engine)[0] == 3 * 69


def test_rows_that_the_host_chooses_for_join_and_leave() -> None:
    engine = hashing_engine(graph_sizes=(1, 2, 4))
    plain = engine.add(prompt(30), greedy(60))
    for _ in range(4):
        engine.step()
    biased = engine.add(prompt(30, 1), greedy(10, logit_bias={3: 100}))
    tokens = drain(engine)
    assert tokens[biased] == [3] * 10
    assert tokens[plain] == hash_continuation(prompt(30), 60)[4:]


def test_an_idle_row_never_walks_into_somebody_elses_block() -> None:
    """Three rows in a graph of four, whose fourth row belonged to a request that is gone, for more than a block."""
    engine = hashing_engine(graph_sizes=(4,), enable_prefix_caching=False)
    leaving = engine.add(prompt(100, 9), greedy(8))
    requests = {engine.add(prompt(10, seed), greedy(200)): prompt(10, seed) for seed in range(3)}
    for _ in range(4):
        engine.step()
    engine.abort(leaving)
    later = engine.add(prompt(40, 7), greedy(1))  # takes the blocks of the one that left
    held = engine.add(prompt(100, 8), greedy(1))
    assert later and held
    tokens = drain(engine)
    for request, ids in requests.items():
        assert tokens[request] == hash_continuation(ids, 200)[-len(tokens[request]) :]


def test_a_sequence_that_lost_its_blocks_is_loaded_anew() -> None:
    """It is preempted while its step is under way, and comes back as long as it was: 62 tokens in two chunks, and the
    last one by a decode step, which must write into the new block."""
    engine = hashing_engine(4, graph_sizes=(1,), enable_prefix_caching=False, max_num_batched_tokens=31)
    request = engine.add(prompt(60), greedy(40))
    for _ in range(4):
        engine.step()
    (sequence,) = engine.scheduler.running
    assert len(sequence.token_ids) == 63 and graphs_of(engine).under_way([sequence])
    engine.scheduler.running.remove(sequence)
    engine.scheduler._free(sequence)
    engine.scheduler.waiting.appendleft(sequence)
    filler = engine.pool.allocate(1)  # so that it gets another block
    tokens = drain_rest(engine)
    engine.pool.free(filler)
    assert tokens[request] == hash_continuation(prompt(60), 40)[3:]


def drain_rest(engine: Engine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = defaultdict(list)
    while engine.has_unfinished:
        for output in engine.step():
            tokens[output.request_id].append(output.token_id)
    return tokens


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_company_does_not_change_a_sample(temperature: float) -> None:
    def params(seed: int) -> SamplingParams:
        return SamplingParams(temperature=temperature, top_p=0.9, seed=seed, max_tokens=30)

    together = hashing_engine(graph_sizes=(1, 2, 4, 8))
    ids = [together.add(prompt(40 + seed, seed), params(seed)) for seed in range(7)]
    tokens = drain(together)
    for seed, request in enumerate(ids):
        alone = hashing_engine()  # without graphs, by the sampler in PyTorch
        alone.add(prompt(40 + seed, seed), params(seed))
        assert drain(alone)["0"] == tokens[request]


def test_what_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from thinrank.engine import decode_graphs
    from thinrank.engine.decode_graphs import DecodeGraphs

    monkeypatch.setattr(decode_graphs, "DECODE_BATCH_SIZES", (1, 2, 4, 8, 16, 32, 64))
    monkeypatch.setattr(decode_graphs, "DecodeGraph", lambda decoder, cache, state, idle: state)
    decoder: Any = SimpleNamespace(decode_state=lambda size, *_: SimpleNamespace(batch_size=size))
    for max_num_seqs, invariant, sizes in (
        (1, False, (1,)),
        (5, False, (1, 2, 4, 8)),
        (64, False, (1, 2, 4, 8, 16, 32, 64)),
        (500, False, (1, 2, 4, 8, 16, 32, 64)),
        (64, True, (1, 2, 4, 8)),
    ):
        assert DecodeGraphs.capture(decoder, [], max_num_seqs, invariant, 1, 0).batch_sizes == sizes
