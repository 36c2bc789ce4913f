"""Log-probabilities of prompts: those of the model without a cache, however the prompt is cut."""

from functools import cache
from typing import Any

import pytest
import torch

from thinrank.config import EngineConfig, SamplingParams
from thinrank.engine import logprobs
from thinrank.engine.engine import Engine
from thinrank.engine.logprobs import logprobs_of_prompt, token_logprobs
from thinrank.engine.sequence import TokenOutput
from thinrank.errors import OptionError
from thinrank.model.batch import ForwardBatch
from thinrank.model.decoder import Decoder
from tiny_hf_models import CONFIGS, decoder_of, hf_model, random_ids


@cache
def decoder() -> Decoder:
    return decoder_of(hf_model(CONFIGS["llama-gqa"]))


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 3, "prompt_logprobs": 2, **settings})


def run(engine: Engine) -> list[TokenOutput]:
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    return outputs


def check(ids: list[int], output: TokenOutput, count: int) -> None:
    """Every entry against a pass without a cache; float32, so 1e-4 is the order of summation."""
    found = output.prompt_logprobs
    assert found is not None and len(found) == len(ids) and found[0] is None
    if len(ids) == 1:
        return
    expected = decoder()(ForwardBatch.whole_sequences([torch.tensor(ids)], decoder().device)).log_softmax(-1)
    for token_id, row, entry in zip(ids[1:], expected, found[1:], strict=False):
        assert entry is not None and len(entry) == 1 + count
        own, *best = entry
        assert own.token_id == token_id and own.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        assert own.rank == int((row > row[token_id]).sum()) + 1
        assert [each.rank for each in best] == list(range(1, count + 1))
        assert [each.token_id for each in best] == row.topk(count).indices.tolist()


@pytest.mark.parametrize("chunk", [2048, 64, 17, 1])
@pytest.mark.parametrize("length", [1, 2, 65, 130])
def test_they_are_the_models_own(chunk: int, length: int) -> None:
    engine = Engine(decoder(), EngineConfig(max_num_batched_tokens=chunk))
    ids = random_ids(length)
    engine.add(ids, params())
    outputs = run(engine)
    check(ids, outputs[0], 2)
    assert all(output.prompt_logprobs is None for output in outputs[1:])


def test_the_prefix_cache_is_left_out_but_filled() -> None:
    engine, ids = Engine(decoder()), random_ids(130)
    engine.add(ids, params())
    run(engine)
    engine.add(ids, params())
    check(ids, run(engine)[0], 2)
    assert engine.stats().prefix_cache_queries == 0
    engine.add(ids, params(prompt_logprobs=None))
    assert run(engine)[0].prompt_logprobs is None
    assert engine.stats().prefix_cache_hits == 128


def test_one_sequence_of_a_request_has_them_and_is_the_first() -> None:
    engine, ids = Engine(decoder()), random_ids(130)
    engine.add(ids, params(prompt_logprobs=None))
    run(engine)
    engine.add(ids, params(n=3, prompt_logprobs=0, temperature=1.0, seed=1))
    outputs = run(engine)
    assert outputs[0].index == 0
    check(ids, outputs[0], 0)
    assert sum(output.prompt_logprobs is not None for output in outputs) == 1


def test_a_preempted_prompt_goes_on_where_it_was() -> None:
    engine, ids = Engine(decoder(), EngineConfig(max_num_batched_tokens=40)), random_ids(130)
    engine.add(ids, params())
    engine.step()
    engine.step()
    (sequence,) = engine.scheduler.running
    assert len(sequence.prompt_logprobs) == 81
    engine.scheduler.running.remove(sequence)
    engine.scheduler._free(sequence)
    engine.scheduler.waiting.appendleft(sequence)
    check(ids, run(engine)[0], 2)


def test_logits_of_few_rows_exist_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "ROWS_AT_A_TIME", 3)
    weights, hidden = torch.randn(5, 11), torch.randn(8, 5)
    sizes = []

    def head(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return rows @ weights

    ids = [1, 5, 3, 10, 0, 2, 2, 7]
    found = logprobs_of_prompt(hidden, head, ids, 4)
    assert sizes == [3, 3, 2]
    expected = token_logprobs(hidden @ weights, ids, 4)
    for ours, theirs in zip(found, expected, strict=True):
        assert [(e.token_id, e.rank) for e in ours] == [(e.token_id, e.rank) for e in theirs]


def test_range() -> None:
    with pytest.raises(OptionError, match="prompt_logprobs is 21"):
        params(prompt_logprobs=21)
