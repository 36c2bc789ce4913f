"""Token ids in and out: against full recomputation and Hugging Face, alone and in company."""

from collections import defaultdict
from functools import cache

import pytest
import torch

from thinrank.config import EngineConfig, SamplingParams
from thinrank.engine.engine import Engine
from thinrank.engine.sequence import TokenOutput
from thinrank.errors import OptionError, RequestError, ThinrankError
from thinrank.model.batch import ForwardBatch
from thinrank.model.decoder import Decoder
from tiny_hf_models import CONFIGS, VOCAB, decoder_of, hf_model, low_rank_pair, random_ids


def greedy(max_tokens: int = 16, **settings) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **settings)


@cache
def tiny(name: str = "llama-gqa") -> Decoder:
    return decoder_of(hf_model(CONFIGS[name]))


def drain(engine: Engine) -> dict[tuple[str, int], list[TokenOutput]]:
    outputs = defaultdict(list)
    while engine.has_unfinished:
        for output in engine.step():
            outputs[output.request_id, output.index].append(output)
    assert engine.pool.num_free == engine.pool.num_blocks, "blocks were lost"
    return outputs


def run(engine: Engine, *requests: tuple[list[int], SamplingParams]) -> list[list[int]]:
    """Token ids of each request's first sequence."""
    ids = [engine.add(prompt, params) for prompt, params in requests]
    outputs = drain(engine)
    return [[output.token_id for output in outputs[request_id, 0]] for request_id in ids]


def recompute(decoder: Decoder, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation without a cache."""
    ids = list(prompt)
    for _ in range(count):
        batch = ForwardBatch.whole_sequences([torch.tensor(ids)], decoder.device)
        ids.append(int(decoder(batch)[-1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("name", ["llama-gqa", "llama-mha-tied", "mistral-window", "qwen2-window", "qwen3"])
@pytest.mark.parametrize("chunk", [2048, 17])
def test_greedy_equals_recomputation_and_hugging_face(name: str, chunk: int) -> None:
    model = hf_model(CONFIGS[name])
    decoder = decoder_of(model)
    prompt = random_ids(53)  # the output crosses from the first block into the second
    (tokens,) = run(Engine(decoder, EngineConfig(max_num_batched_tokens=chunk)), (prompt, greedy(24)))
    assert tokens == recompute(decoder, prompt, 24)
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=0)
    assert tokens == expected[0, 53:].tolist()


def test_greedy_with_low_rank_modules() -> None:
    ranks = {f"model.layers.{i}.mlp.{m}_proj": 9 for i in range(3) for m in ("gate", "down")}
    model, decoder = low_rank_pair(CONFIGS["llama-gqa"], ranks, {})
    prompt = random_ids(130)
    (tokens,) = run(Engine(decoder), (prompt, greedy(8)))
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert tokens == expected[0, 130:].tolist()


@pytest.mark.parametrize("config", [EngineConfig(), EngineConfig(max_num_seqs=2, max_num_batched_tokens=31)])
def test_company_changes_nothing(config: EngineConfig) -> None:
    requests = [(random_ids(length, length), greedy(12)) for length in (1, 63, 64, 65, 100, 5)]
    together = run(Engine(tiny(), config), *requests)
    assert together == [run(Engine(tiny(), config), request)[0] for request in requests]


def test_identical_prompts_give_identical_answers() -> None:
    answers = run(Engine(tiny()), *[(random_ids(70), greedy(20))] * 5)
    assert answers == [answers[0]] * 5


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window"])
def test_poisoned_blocks_never_leak(name: str) -> None:
    requests = [(random_ids(length, length), greedy(20)) for length in (3, 60, 90)]
    clean, poisoned = Engine(tiny(name)), Engine(tiny(name))
    for layer in poisoned.kv_cache:
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    assert run(poisoned, *requests) == run(clean, *requests)


def test_waiting_requests_join_when_memory_is_free() -> None:
    """Room for two sequences of one block each; the third waits for the first to leave."""
    engine = Engine(tiny(), EngineConfig(kv_cache_memory=2 * 64 * 3 * 2 * 2 * 16 * 4))
    assert engine.pool.num_blocks == 2
    requests = [(random_ids(20, seed), greedy(4 + seed)) for seed in range(4)]
    ids = [engine.add(*request) for request in requests]
    outputs = drain(engine)
    for request_id, request in zip(ids, requests, strict=True):
        assert [o.token_id for o in outputs[request_id, 0]] == run(Engine(tiny()), request)[0]


def test_a_finished_row_leaves_the_others_alone() -> None:
    engine = Engine(tiny())
    short, long = engine.add(random_ids(5), greedy(2)), engine.add(random_ids(9), greedy(9))
    outputs = drain(engine)
    assert [o.finish_reason for o in outputs[short, 0]] == [None, "length"]
    assert [o.token_id for o in outputs[long, 0]] == run(Engine(tiny()), (random_ids(9), greedy(9)))[0]


def test_endings() -> None:
    prompt = random_ids(10)
    tokens = run(Engine(tiny()), (prompt, greedy(8)))[0]
    stop = next(token for token in tokens[1:] if token != tokens[0])
    end = tokens.index(stop)

    def last(params: SamplingParams, eos: list[int]) -> tuple[int, TokenOutput]:
        engine = Engine(tiny())
        request = engine.add(prompt, params, eos)
        outputs = drain(engine)[request, 0]
        return len(outputs), outputs[-1]

    count, output = last(greedy(8), [stop])
    assert (count, output.finish_reason, output.stop_reason) == (end + 1, "stop", None)
    count, output = last(greedy(8, stop_token_ids=[stop]), [])
    assert (count, output.finish_reason, output.stop_reason) == (end + 1, "stop", stop)
    count, output = last(greedy(8, ignore_eos=True), [stop])
    assert (count, output.finish_reason) == (8, "length")
    count, output = last(greedy(8, min_tokens=8), [stop])
    assert count == 8 and output.finish_reason in ("length", "stop")


def test_max_tokens_is_clipped_to_the_model_length() -> None:
    engine = Engine(tiny(), EngineConfig(max_model_len=20))
    request = engine.add(random_ids(15), greedy(100))
    outputs = drain(engine)[request, 0]
    assert len(outputs) == 5 and outputs[-1].finish_reason == "length"


def test_abort() -> None:
    engine = Engine(tiny(), EngineConfig(max_num_seqs=1))
    running, waiting = engine.add(random_ids(5), greedy(9)), engine.add(random_ids(5), greedy(9))
    engine.step()
    engine.abort(running)
    engine.abort(waiting)
    engine.abort("unknown")
    assert not engine.has_unfinished and engine.step() == []
    assert engine.pool.num_free == engine.pool.num_blocks


def test_several_sequences_of_one_request() -> None:
    engine = Engine(tiny())
    request = engine.add(random_ids(5), SamplingParams(n=3, seed=1, max_tokens=12))
    outputs = drain(engine)
    texts = {tuple(o.token_id for o in outputs[request, index]) for index in range(3)}
    assert len(texts) == 3


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 4, "the prompt is empty"),
        ([3, VOCAB], 4, f"token id {VOCAB} is outside the vocabulary of {VOCAB}"),
        ([-1, 3], 4, "token id -1 is outside"),
        ([3] * 300, 4, "300 tokens; with the output it may have 300"),
        ([3] * 100, 100, "100 prompt tokens and 100 output tokens do not fit.*holds 128.*kv_cache_memory"),
    ],
)
def test_impossible_requests(prompt: list[int], max_tokens: int, message: str) -> None:
    engine = Engine(tiny(), EngineConfig(max_model_len=300, kv_cache_memory=2 * 64 * 3 * 2 * 2 * 16 * 4))
    with pytest.raises(RequestError, match=message):
        engine.add(prompt, greedy(max_tokens))
    assert not engine.has_unfinished


def test_a_bias_outside_the_vocabulary() -> None:
    with pytest.raises(RequestError, match=f"logit_bias names token id {VOCAB}"):
        Engine(tiny()).add([3], greedy(logit_bias={5: 1, VOCAB: 1}))


def test_every_sequence_has_a_grammar_of_its_own() -> None:
    class Counted:
        """Token 10, then 11, then the end."""

        def __init__(self) -> None:
            self.next = 10

        @property
        def finished(self) -> bool:
            return self.next == 12

        def fill_mask(self, mask: torch.Tensor) -> None:
            mask[0] = 1 << self.next

        def accept(self, token_id: int) -> None:
            assert token_id == self.next
            self.next += 1

    engine = Engine(tiny())
    request = engine.add(random_ids(9), SamplingParams(n=2, max_tokens=9), constraint=Counted)
    plain = engine.add(random_ids(9), greedy(4))
    outputs = drain(engine)
    for index in range(2):
        assert [o.token_id for o in outputs[request, index]] == [10, 11]
        assert [o.finish_reason for o in outputs[request, index]] == [None, "stop"]
    assert [o.token_id for o in outputs[plain, 0]] == run(Engine(tiny()), (random_ids(9), greedy(4)))[0]


def test_max_model_len_beyond_the_model() -> None:
    with pytest.raises(OptionError, match="trained for 512"):
        Engine(tiny(), EngineConfig(max_model_len=513))


def test_undefined_logits_are_an_error() -> None:
    state = hf_model(CONFIGS["llama-gqa"]).state_dict()
    state["model.norm.weight"] = torch.full_like(state["model.norm.weight"], float("nan"))
    engine = Engine(Decoder.build(tiny().config, state.__getitem__))
    engine.add([3], greedy())
    with pytest.raises(ThinrankError, match="undefined logits"):
        engine.step()
