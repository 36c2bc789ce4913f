"""/v1/chat/completions through the official client, against the same model without a server."""

from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai as openai_package
import pytest
from openai import OpenAI

from served_model import NAME, load, save_model, serving
from thinrank import LLM, SamplingParams
from tiny_tokenizers import save_byte_level

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}


def expected(llm: LLM, messages: Any = MESSAGES, **params: Any) -> list[str]:
    options = {"max_tokens": 12, "temperature": 0} | params
    [result] = llm.chat(messages, SamplingParams(**options), use_tqdm=False)
    return [output.text for output in result.outputs]


def test_an_answer_is_what_the_library_returns(openai: OpenAI, reference: LLM) -> None:
    answer = openai.chat.completions.create(**GREEDY)
    [choice] = answer.choices
    assert [choice.message.content] == expected(reference)
    assert choice.message.role == "assistant" and choice.finish_reason == "length"
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    prompt_tokens = len(reference.tokenizer.encode_chat(MESSAGES))
    assert answer.usage and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        prompt_tokens,
        12,
    )


def test_max_completion_tokens_is_max_tokens(openai: OpenAI, http: httpx.Client) -> None:
    def tokens(**limits: int) -> int:
        answer = openai.chat.completions.create(model=NAME, messages=MESSAGES, temperature=0, **limits)
        assert answer.usage
        return answer.usage.completion_tokens

    assert tokens(max_completion_tokens=5) == tokens(max_tokens=5) == 5
    body = GREEDY | {"max_tokens": 5, "max_completion_tokens": 6}
    assert http.post("/v1/chat/completions", json=body).status_code == 400


def test_without_a_limit_an_answer_may_fill_the_context(folder: Path) -> None:
    """vLLM's default; a KV cache that holds less than the context is the limit then."""
    with serving(load(folder, max_model_len=100)) as served:
        answer = served.openai().chat.completions.create(
            model=NAME, messages=MESSAGES, extra_body={"ignore_eos": True}
        )
        assert answer.usage and answer.usage.total_tokens == 100
    with serving(load(folder, kv_cache_memory=2**16)) as served:
        capacity = served.llm.engine.pool.num_blocks * 64
        answer = served.openai().chat.completions.create(
            model=NAME, messages=MESSAGES, extra_body={"ignore_eos": True}
        )
        assert answer.usage and answer.usage.total_tokens == capacity < served.llm.engine.max_model_len


def test_n_answers(openai: OpenAI, reference: LLM) -> None:
    answer = openai.chat.completions.create(**GREEDY | {"temperature": 1, "seed": 3, "n": 3})
    texts = [choice.message.content for choice in answer.choices]
    assert texts == expected(reference, temperature=1, seed=3, n=3) and len(set(texts)) == 3


def test_text_parts_are_joined(openai: OpenAI, reference: LLM) -> None:
    parts = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    answer = openai.chat.completions.create(**GREEDY | {"messages": [{"role": "user", "content": parts}]})
    assert [answer.choices[0].message.content] == expected(
        reference, [{"role": "user", "content": "One.\nTwo."}]
    )


def test_logprobs(openai: OpenAI) -> None:
    choice = openai.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=2).choices[0]
    assert choice.logprobs and choice.logprobs.content and len(choice.logprobs.content) == 12
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 2
        assert token.logprob == token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
        assert token.bytes is not None
        assert bytes(token.bytes).decode("utf-8", "replace") == token.token
    data = b"".join(bytes(token.bytes or ()) for token in choice.logprobs.content)
    assert data.decode("utf-8", "replace") == choice.message.content
    bare = openai.chat.completions.create(**GREEDY, logprobs=True).choices[0]
    assert bare.logprobs and bare.logprobs.content and not bare.logprobs.content[0].top_logprobs
    assert openai.chat.completions.create(**GREEDY).choices[0].logprobs is None


def test_the_final_message_can_be_continued(openai: OpenAI, reference: LLM) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "I thi"}]
    answer = openai.chat.completions.create(
        **GREEDY | {"messages": messages},
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    prompt = reference.tokenizer.render_chat(messages, add_generation_prompt=False)
    assert prompt.endswith("I thi")
    params = SamplingParams(max_tokens=12, temperature=0)
    ids = reference.tokenizer.encode(prompt, add_special_tokens=False)
    [result] = reference.generate([ids], params, use_tqdm=False)
    assert answer.choices[0].message.content == result.outputs[0].text


def test_template_arguments(tmp_path: Path) -> None:
    llm = load(save_model(tmp_path / "model"))
    template = "{{ messages[0].content }}{{ '!' * loudness }}"
    with serving(llm, chat_template=template) as served, served.http() as http:

        def tokenize(**options: Any) -> httpx.Response:
            return http.post("/tokenize", json={"messages": MESSAGES, "chat_template_kwargs": options})

        expected = llm.tokenizer.encode("Be brief.!!!", add_special_tokens=False)
        assert tokenize(loudness=3).json()["tokens"] == expected
        for options in ({"tokenize": True}, {"chat_template": "x"}, {"messages": []}, {"loudness": {}}, {}):
            response = tokenize(**options)
            assert response.status_code == 400, options


def test_a_model_without_template_says_what_to_do(tmp_path: Path) -> None:
    llm = load(save_model(tmp_path / "model", lambda folder, template: save_byte_level(folder)))
    with serving(llm) as served:
        client = served.openai()
        with pytest.raises(openai_package.BadRequestError, match="--chat-template"):
            client.chat.completions.create(**GREEDY)
        assert client.completions.create(model=NAME, prompt="x", max_tokens=1).usage


def test_the_models_own_sampling_defaults(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    (folder / "generation_config.json").write_text('{"temperature": 1e-6, "top_k": 5, "max_length": 20}')
    request = {"model": NAME, "messages": MESSAGES, "max_tokens": 20}

    def answers(**options: Any) -> set[str | None]:
        with serving(load(folder), **options) as served:
            client = served.openai()
            return {client.chat.completions.create(**request).choices[0].message.content for _ in range(2)}

    assert len(answers()) == 1  # a temperature of nearly 0
    assert len(answers(generation_config="none")) == 2
