"""A real model over HTTP, on the CPU: it answers, in the given form, and stops by itself."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from served_model import NAME, Served, serving
from thinrank import LLM, convert


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    convert(smollm2_gguf, folder, progress=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    with serving(LLM(folder, device="cpu", max_model_len=1024)) as served:
        yield served
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_it_answers(smollm2: Served) -> None:
    client = smollm2.openai(timeout=300)
    question: Any = [{"role": "user", "content": "What is the capital of France?"}]
    request: dict[str, Any] = {"model": NAME, "messages": question, "max_tokens": 40, "temperature": 0}
    answer = client.chat.completions.create(**request).choices[0]
    assert answer.message.content and "Paris" in answer.message.content and answer.finish_reason == "stop"
    chunks = list(client.chat.completions.create(**request, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer.message.content
    cut = client.chat.completions.create(**request, stop=["Paris"]).choices[0]
    assert cut.message.content == answer.message.content.partition("Paris")[0] and cut.finish_reason == "stop"

    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "capital", "schema": schema}}
    formed = client.chat.completions.create(**request, response_format=form).choices[0]
    assert json.loads(formed.message.content or "")["city"] and formed.finish_reason == "stop"

    scored = client.completions.create(
        model=NAME, prompt="The capital of France is Paris", max_tokens=0, echo=True, logprobs=1
    ).choices[0]
    assert scored.logprobs and scored.logprobs.top_logprobs
    assert " Paris" in (scored.logprobs.top_logprobs[-1] or {})
