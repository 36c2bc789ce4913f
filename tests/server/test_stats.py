"""/stats and /ranks: the numbers are the engine's and the checkpoint's."""

from collections.abc import Callable
from pathlib import Path

import httpx2 as httpx
import pytest

from served_model import Served, load, serving
from thinrank import LLM, SamplingParams
from thinrank.engine.engine import Engine
from thinrank.errors import ThinrankError
from thinrank.model.cost import decode_step_bytes, kv_cache_bytes, linear_parameters, parameters
from thinrank.server.pace import Pace
from thinrank.server.ranks import describe_ranks

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def test_stats_count_what_happens(folder: Path) -> None:
    with serving(load(folder)) as served, served.http() as http:
        before = http.get("/stats").json()
        config = served.llm.config
        assert before["generation_tokens"] == before["decode_steps"] == before["num_requests_running"] == 0
        assert before["decode_step_bytes"] == decode_step_bytes(config, 4)
        assert before["weight_bytes"] == 4 * parameters(config)
        blocks = served.llm.engine.pool.num_blocks
        assert before["kv_cache_bytes"] == kv_cache_bytes(config, 4, 64 * blocks) <= 2**25
        assert (before["device"], before["dtype"]) == ("cpu", "float32")
        for unknown in ("read_bandwidth", "device_memory_used", "device_memory_total"):
            assert before[unknown] is None

        http.post("/v1/completions", json={"prompt": [5] * 100, "max_tokens": 9, "ignore_eos": True})
        after = http.get("/stats").json()
        assert (after["prompt_tokens"], after["generation_tokens"]) == (100, 9)
        # The first token comes with the prompt.
        assert after["decode_steps"] == 8
        assert 0 < after["decode_seconds"] < after["time"] - before["time"]

        long = {"prompt": [5] * 100, "max_tokens": 9000, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=long) as stream:
            lines = stream.iter_lines()  # the connection closes when this is gone
            next(lines)
            running = http.get("/stats").json()
        assert running["num_requests_running"] == 1 and running["kv_cache_usage"] > 0
        cached = (running["decode_step_bytes"] - before["decode_step_bytes"]) // kv_cache_bytes(config, 4, 64)
        assert cached >= 1, "the keys and values of a hundred tokens are more than those of a block"


def test_a_dead_engine_has_no_stats(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(load(folder)) as served, served.http() as http:
        monkeypatch.setattr(Engine, "step", lambda self: 1 / 0)
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
        assert http.get("/stats").status_code == 503
        assert http.get("/ranks").status_code == 200


def test_a_step_with_a_prompt_is_no_decode_step(reference: LLM) -> None:
    engine, pace = reference.engine, Pace(reference.engine)

    def steps_while(action: Callable[[], object]) -> int:
        before = pace.decode.steps
        action()
        pace.step()
        return pace.decode.steps - before

    assert steps_while(lambda: engine.add([5] * 10, GREEDY)) == 0
    assert steps_while(lambda: None) == 1
    assert steps_while(lambda: engine.add([6] * 10, GREEDY)) == 0
    while engine.has_unfinished:
        assert steps_while(lambda: None) == 1
    # Time in which nothing ran is nobody's: the first step after it does not count, whatever it does.
    assert steps_while(lambda: engine.add([7], GREEDY)) == 0
    while engine.has_unfinished:
        pace.step()
    assert pace.decode.seconds > 0


def test_a_failed_step_is_not_timed(reference: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, pace = reference.engine, Pace(reference.engine)
    engine.add([5] * 10, GREEDY)
    pace.step()

    def fail() -> None:
        raise ThinrankError("no", "no")

    with monkeypatch.context() as patch, pytest.raises(ThinrankError):
        patch.setattr(engine, "step", fail)
        pace.step()
    pace.step()
    assert pace.decode.steps == 0
    while engine.has_unfinished:
        pace.step()
    assert pace.decode.steps > 0


def test_ranks_of_a_dense_model(http: httpx.Client, served: Served) -> None:
    ranks = http.get("/ranks").json()
    modules = ranks["modules"]
    assert [each["module"] for each in modules] == list(served.llm.config.linears())
    assert all(each["rank"] is None and not each["shared_with"] for each in modules)
    assert all(each["parameters"] == each["dense_parameters"] for each in modules)
    assert ranks["parameters"] == ranks["dense_parameters"] == parameters(served.llm.config)


def test_ranks_of_a_compressed_model(converted: Callable[[str], Path]) -> None:
    llm = load(converted("basis_sharing-share2-20"))
    config = llm.config
    ranks = describe_ranks(config)
    by_name = {each.module: each for each in ranks.modules}
    assert {name: each.rank for name, each in by_name.items() if each.rank is not None} == dict(config.ranks)
    assert ranks.linear_parameters == linear_parameters(config) == sum(m.parameters for m in ranks.modules)
    assert ranks.linear_parameters < ranks.dense_linear_parameters

    head = by_name["lm_head"]
    assert (head.layer, head.name, head.rank) == (None, "lm_head", None)
    first, second = (by_name[f"model.layers.{layer}.self_attn.q_proj"] for layer in (0, 1))
    assert (second.layer, second.name) == (1, "self_attn.q_proj")
    assert first.shared_with == [second.module] and second.shared_with == [first.module]
    assert first.full_rank == min(first.out_features, first.in_features)
    # The one that stores the shared factor_in [rank, in] has that much more.
    assert first.rank is not None
    assert first.parameters - second.parameters == first.rank * first.in_features
