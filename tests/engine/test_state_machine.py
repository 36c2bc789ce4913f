"""Requests that come, go and are aborted at random, over few blocks: 2,000 steps, with and without decode graphs."""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine_invariants import check_empty, check_invariants
from hashing_decoder import VOCAB, hashing_engine
from thinrank.config import SamplingParams
from thinrank.engine.engine import Engine
from thinrank.engine.sequence import Sequence

NUM_BLOCKS = 7
SAMPLING = (
    {"temperature": 0},
    {"temperature": 0.9, "top_k": 20},
    {"temperature": 0, "presence_penalty": 0.5},
)


def document(number: int) -> list[int]:
    """Prompts are beginnings of one of two texts, so that many share blocks."""
    return [(7 * i + 31 * number * i * i) % VOCAB for i in range(300)]


@dataclass(frozen=True)
class Request:
    number: int
    length: int
    max_tokens: int
    sampling: int
    n: int

    @property
    def prompt(self) -> list[int]:
        return document(self.number)[: self.length]

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(n=self.n, seed=5, max_tokens=self.max_tokens, **SAMPLING[self.sampling])


@cache
def alone(request: Request) -> dict[int, list[int]]:
    """What an engine with plenty of blocks answers that knows no other request."""
    engine = hashing_engine(64, enable_prefix_caching=False)
    engine.add(request.prompt, request.params)
    tokens: dict[int, list[int]] = defaultdict(list)
    while engine.has_unfinished:
        for output in engine.step():
            tokens[output.index].append(output.token_id)
    return dict(tokens)


@dataclass
class Running:
    request: Request
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    finished: set[int] = field(default_factory=set)


class Requests(RuleBasedStateMachine):
    graph_sizes: tuple[int, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.engine: Engine = hashing_engine(
            NUM_BLOCKS,
            self.graph_sizes,
            max_num_seqs=5,
            max_num_batched_tokens=150,
            max_num_prefill_tokens_while_decoding=50,
        )
        self.running: dict[str, Running] = {}
        self.arrival: dict[Sequence, int] = {}

    @rule(
        number=st.integers(0, 1),
        length=st.integers(1, 300),
        max_tokens=st.integers(1, 140),
        sampling=st.integers(0, len(SAMPLING) - 1),
        n=st.sampled_from([1, 1, 1, 3]),
    )
    def add(self, number: int, length: int, max_tokens: int, sampling: int, n: int) -> None:
        request = Request(number, length, max_tokens, sampling, n)
        request_id = self.engine.add(request.prompt, request.params)
        self.running[request_id] = Running(request)
        for sequence in self.engine.scheduler.waiting:
            self.arrival.setdefault(sequence, len(self.arrival))

    @precondition(lambda self: self.running)
    @rule(count=st.integers(1, 60))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.running)))
        free, held = self.engine.pool.num_free, self._held(request_id)
        self.engine.abort(request_id)
        del self.running[request_id]
        still_held = {block for s in self.engine.scheduler.running for block in s.block_table}
        assert self.engine.pool.num_free == free + len(held - still_held)

    @invariant()
    def blocks(self) -> None:
        check_invariants(self.engine, self.arrival)

    def teardown(self) -> None:
        for _ in range(20_000):
            if not self.engine.has_unfinished:
                break
            self._step()
        check_empty(self.engine)
        assert not self.running, "a request starved"

    def _step(self) -> None:
        for output in self.engine.step():
            running = self.running[output.request_id]
            tokens = running.tokens[output.index]
            tokens.append(output.token_id)
            assert tokens == alone(running.request)[output.index][: len(tokens)]
            if output.finish_reason:
                assert len(tokens) == running.request.max_tokens
                running.finished.add(output.index)
            if len(running.finished) == running.request.n:
                del self.running[output.request_id]
        check_invariants(self.engine, self.arrival)

    def _held(self, request_id: str) -> set[int]:
        mine = [s for s in self.engine.scheduler.running if s.request_id == request_id]
        return {block for sequence in mine for block in sequence.block_table}


@pytest.mark.parametrize("graph_sizes", [(), (1, 2, 4, 8), (1, 2)], ids=["plain", "graphs", "groups"])
def test_random_requests(graph_sizes: tuple[int, ...]) -> None:
    if graph_sizes:
        pytest.importorskip("triton")
    machine = type("Requests", (Requests,), {"graph_sizes": graph_sizes})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=8,
            stateful_step_count=20,  # thousands of steps of the engine a machine
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],  # shrinking a failure takes minutes: add it when there is one
            suppress_health_check=list(HealthCheck),
        ),
    )
