"""/v1/completions through the official client, against the same model without a server."""

from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch
from openai import OpenAI

from served_model import NAME, load, save_model, serving
from thinrank import LLM, SamplingParams
from tiny_tokenizers import save_sentence_piece_like

PROMPT = "The quick brown fox"
GREEDY = {"model": NAME, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
RANDOM = {"model": NAME, "prompt": PROMPT, "max_tokens": 24, "temperature": 1, "seed": 5}


def expected(llm: LLM, prompt: Any = PROMPT, **params: Any) -> list[str]:
    defaults = {"max_tokens": 12, "temperature": 0}
    [result] = llm.generate(prompt, SamplingParams(**defaults | params), use_tqdm=False)
    return [output.text for output in result.outputs]


def test_a_completion_is_what_the_library_returns(openai: OpenAI, reference: LLM) -> None:
    completion = openai.completions.create(**GREEDY)
    assert [choice.text for choice in completion.choices] == expected(reference)
    assert completion.object == "text_completion" and completion.id.startswith("cmpl-")
    assert completion.model == NAME and completion.choices[0].finish_reason == "length"
    prompt_tokens = len(reference.tokenizer.encode(PROMPT))
    usage = completion.usage
    assert usage and (usage.prompt_tokens, usage.completion_tokens) == (prompt_tokens, 12)
    assert usage.total_tokens == prompt_tokens + 12


def test_every_form_of_prompt(openai: OpenAI, reference: LLM) -> None:
    ids = reference.tokenizer.encode(PROMPT)
    [text] = expected(reference)
    [other] = expected(reference, "Hello")
    for prompt in (PROMPT, ids, [PROMPT], [ids]):
        completion = openai.completions.create(**GREEDY | {"prompt": prompt})
        assert [choice.text for choice in completion.choices] == [text]
    for prompt in ([PROMPT, "Hello"], [ids, reference.tokenizer.encode("Hello")]):
        completion = openai.completions.create(**GREEDY | {"prompt": prompt})
        assert [(choice.index, choice.text) for choice in completion.choices] == [(0, text), (1, other)]


def test_n_continuations_of_several_prompts(openai: OpenAI, reference: LLM) -> None:
    completion = openai.completions.create(**RANDOM | {"prompt": [PROMPT, "Hello"], "n": 3})
    params = {"temperature": 1, "seed": 5, "n": 3, "max_tokens": 24}
    texts = expected(reference, PROMPT, **params) + expected(reference, "Hello", **params)
    assert [(choice.index, choice.text) for choice in completion.choices] == list(enumerate(texts))
    assert len(set(texts)) == 6


def test_seeds(openai: OpenAI) -> None:
    def sample(**changes: Any) -> str:
        return openai.completions.create(**RANDOM | changes).choices[0].text

    assert sample() == sample()
    assert sample() != sample(seed=6)
    assert sample(seed=None) != sample(seed=None)


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 3},
        {"top_p": 0.3},
        {"min_p": 0.4},
        {"presence_penalty": 1.5},
        {"frequency_penalty": -1.5},
        {"repetition_penalty": 1.7},
        {"min_tokens": 20},
        {"ignore_eos": True, "max_tokens": 60},
        {"stop_token_ids": [7, 33]},
        {"logit_bias": {"65": 100.0}},
        {"skip_special_tokens": False},
        {"temperature": 1e-7},
    ],
    ids=lambda params: next(iter(params)),
)
def test_parameters_reach_the_engine(openai: OpenAI, reference: LLM, params: dict[str, Any]) -> None:
    known = {"top_p", "presence_penalty", "frequency_penalty", "logit_bias", "temperature", "max_tokens"}
    request = RANDOM | {name: value for name, value in params.items() if name in known}
    extra = {name: value for name, value in params.items() if name not in known}
    text = openai.completions.create(**request, extra_body=extra).choices[0].text
    if "logit_bias" in params:
        params = {"logit_bias": {65: 100.0}}
    assert [text] == expected(reference, **{"temperature": 1, "seed": 5, "max_tokens": 24} | params)


def test_null_stands_for_the_default(http: httpx.Client) -> None:
    body = {"model": NAME, "prompt": PROMPT, "seed": 5}
    nulls = dict.fromkeys(("max_tokens", "temperature", "top_p", "n", "stop", "logit_bias", "stream", "echo"))
    texts = {
        http.post("/v1/completions", json=each).json()["choices"][0]["text"] for each in (body, body | nulls)
    }
    assert len(texts) == 1


def test_a_stop_string_ends_the_text_before_itself(openai: OpenAI) -> None:
    full = openai.completions.create(**RANDOM).choices[0].text
    stop = full[5:8]
    choice = openai.completions.create(**RANDOM, stop=["never there", stop]).choices[0]
    assert choice.text == full[: full.index(stop)] and choice.finish_reason == "stop"
    assert choice.stop_reason == stop
    kept = openai.completions.create(
        **RANDOM, stop=stop, extra_body={"include_stop_str_in_output": True}
    ).choices[0]
    assert kept.text == full[: full.index(stop) + len(stop)]


def test_a_stop_token_ends_the_text(openai: OpenAI, reference: LLM) -> None:
    params = SamplingParams(seed=5, max_tokens=24)
    ids = reference.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids
    choice = openai.completions.create(**RANDOM, extra_body={"stop_token_ids": [ids[4]]}).choices[0]
    assert choice.finish_reason == "stop" and choice.stop_reason == ids[4]
    assert choice.text == reference.tokenizer.decode(ids[: ids.index(ids[4])])


def test_eos_ends_the_text(openai: OpenAI) -> None:
    eos = {"logit_bias": {"2": 100.0}}
    choice = openai.completions.create(**GREEDY, **eos).choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("", "stop", None)
    ignored = openai.completions.create(**GREEDY, **eos, extra_body={"ignore_eos": True}).choices[0]
    assert ignored.finish_reason == "length"
    late = openai.completions.create(**GREEDY, **eos, extra_body={"min_tokens": 3})
    assert late.usage and late.usage.completion_tokens == 4  # EOS is the fourth


def test_logprobs(openai: OpenAI, reference: LLM) -> None:
    """The logits of a forward pass over prompt and output are the reference; float32 sums differ in order."""
    choice = openai.completions.create(**GREEDY, logprobs=3).choices[0]
    ids = reference.tokenizer.encode(PROMPT)
    [output] = reference.generate(PROMPT, SamplingParams(max_tokens=12, temperature=0), use_tqdm=False)[
        0
    ].outputs
    logprobs = reference.logits(ids + output.token_ids).log_softmax(-1)[len(ids) - 1 : -1]
    assert choice.logprobs and choice.logprobs.token_logprobs and choice.logprobs.top_logprobs
    chosen = logprobs[range(12), output.token_ids]
    torch.testing.assert_close(torch.tensor(choice.logprobs.token_logprobs), chosen, atol=1e-4, rtol=0)
    for row, top in zip(logprobs, choice.logprobs.top_logprobs, strict=True):
        assert top and len(top) <= 3
        assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-4)
    assert choice.logprobs.tokens and len(choice.logprobs.tokens) == 12


def test_logprobs_of_zero_alternatives(openai: OpenAI) -> None:
    choice = openai.completions.create(**GREEDY, logprobs=0).choices[0]
    assert choice.logprobs and choice.logprobs.token_logprobs and choice.logprobs.top_logprobs == [None] * 12


def test_tokens_as_ids(openai: OpenAI, reference: LLM) -> None:
    extra = {"return_tokens_as_token_ids": True}
    choice = openai.completions.create(**GREEDY, logprobs=1, extra_body=extra).choices[0]
    [output] = reference.generate(PROMPT, SamplingParams(max_tokens=12, temperature=0), use_tqdm=False)[
        0
    ].outputs
    assert choice.logprobs and choice.logprobs.tokens == [f"token_id:{i}" for i in output.token_ids]


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_with_prompt_logprobs(openai: OpenAI, reference: LLM, max_tokens: int, as_ids: bool) -> None:
    ids = reference.tokenizer.encode(PROMPT)
    request = GREEDY | {"prompt": ids if as_ids else PROMPT, "max_tokens": max_tokens}
    completion = openai.completions.create(**request, echo=True, logprobs=2)
    [choice] = completion.choices
    [generated] = expected(reference, max_tokens=max(1, max_tokens))
    assert choice.text == PROMPT + (generated if max_tokens else "")
    assert completion.usage and completion.usage.completion_tokens == max_tokens
    assert choice.logprobs and choice.logprobs.token_logprobs and choice.logprobs.text_offset
    assert choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.token_logprobs) == len(ids) + max_tokens
    logprobs = reference.logits(ids).log_softmax(-1)
    torch.testing.assert_close(
        torch.tensor(choice.logprobs.token_logprobs[1 : len(ids)]),
        logprobs[range(len(ids) - 1), ids[1:]],
        atol=1e-4,  # float32, summed in another order
        rtol=0,
    )
    assert choice.logprobs.text_offset[len(ids) - 1] < len(PROMPT)
    if max_tokens:
        assert choice.logprobs.text_offset[len(ids)] == len(PROMPT)


def test_echo_without_logprobs_for_several_choices(openai: OpenAI, reference: LLM) -> None:
    completion = openai.completions.create(**RANDOM, n=2, echo=True)
    texts = expected(reference, n=2, temperature=1, seed=5, max_tokens=24)
    assert [choice.text for choice in completion.choices] == [PROMPT + text for text in texts]
    scored = openai.completions.create(**RANDOM, n=2, echo=True, logprobs=1)
    assert [choice.text for choice in scored.choices] == [PROMPT + text for text in texts]


def test_a_second_request_with_the_same_prompt_is_cached(openai: OpenAI) -> None:
    prompt = "cached " * 40
    first, second, salted = (
        openai.completions.create(**GREEDY | {"prompt": prompt}, extra_body=extra)
        for extra in ({}, {}, {"cache_salt": "mine"})
    )
    assert first.choices[0].text == second.choices[0].text == salted.choices[0].text
    cached = [each.usage.prompt_tokens_details.cached_tokens for each in (first, second, salted)]  # type: ignore[union-attr]
    assert cached[0] == cached[2] == 0 and cached[1] >= 64


def test_the_model_is_called_as_the_client_calls_it(openai: OpenAI, http: httpx.Client) -> None:
    assert openai.completions.create(**GREEDY | {"model": "alias"}).model == "alias"
    assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).json()["model"] == NAME
    assert [model.id for model in openai.models.list()] == [NAME, "alias"]
    assert openai.models.retrieve("alias").id == "alias"


def test_bos_is_added_once(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", save_sentence_piece_like)
    with serving(load(folder)) as served, served.http() as http:

        def count(**body: Any) -> int:
            return http.post("/tokenize", json=body).json()["tokens"].count(1)

        message = [{"role": "user", "content": "Hello"}]
        assert count(prompt="Hello") == count(prompt="<s>Hello") == count(messages=message) == 1
        assert count(prompt="Hello", add_special_tokens=False) == 0
        body = {"prompt": "Hello there", "echo": True, "logprobs": 0, "max_tokens": 1}
        [choice] = http.post("/v1/completions", json=body).json()["choices"]
        assert choice["logprobs"]["tokens"].count("<s>") == 1
        assert choice["text"].startswith("Hello there")
        assert choice["logprobs"]["text_offset"][-1] == len("Hello there")
