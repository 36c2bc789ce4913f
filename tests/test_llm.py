"""`LLM` over tiny checkpoint folders: text in and out, streaming, chat, logits, errors."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from thinrank import LLM, SamplingParams
from thinrank.errors import CheckpointError, OptionError, RequestError
from thinrank.outputs import CompletionChunk, CompletionOutput
from tiny_hf_models import CONFIGS, hf_model, random_ids
from tiny_tokenizers import CHAT_TEMPLATE, save_byte_level, save_sentence_piece_like

CONFIG = LlamaConfig(**{**CONFIGS["llama-gqa"].to_dict(), "vocab_size": 400})
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
RANDOM = SamplingParams(seed=3, max_tokens=40, ignore_eos=True)


def save_model(folder: Path) -> Path:
    hf_model(CONFIG).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[save_byte_level, save_sentence_piece_like])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = save_model(tmp_path_factory.mktemp("model"))
    request.param(folder, CHAT_TEMPLATE)
    return LLM(folder, device="cpu", max_num_batched_tokens=16)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A model without tokenizer."""
    return LLM(save_model(tmp_path_factory.mktemp("bare")), device="cpu")


def generate(llm: LLM, prompt: Any, params: SamplingParams = GREEDY) -> CompletionOutput:
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]


def joined(chunks: list[CompletionChunk], index: int = 0) -> CompletionOutput:
    mine = [chunk for chunk in chunks if chunk.index == index]
    assert all(chunk.finish_reason is None for chunk in mine[:-1])
    return CompletionOutput(
        index,
        "".join(chunk.text for chunk in mine),
        [token for chunk in mine for token in chunk.token_ids],
        None,
        None,
        mine[-1].finish_reason,
        mine[-1].stop_reason,
    )


def test_every_form_of_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.encode("The quick")
    expected = generate(llm, "The quick")
    assert expected.finish_reason == "length" and len(expected.token_ids) == 20
    for prompt in (ids, {"prompt_token_ids": ids}, {"prompt": "The quick"}, ["The quick"], [ids]):
        assert generate(llm, prompt) == expected
    outputs = llm.generate(["The quick", ids, {"prompt_token_ids": ids}], GREEDY, use_tqdm=False)
    assert [output.outputs[0] for output in outputs] == [expected] * 3
    assert [output.prompt for output in outputs] == ["The quick", None, None]
    assert all(output.prompt_token_ids == ids and output.finished for output in outputs)
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_one_sampling_params_a_prompt(llm: LLM) -> None:
    params = [replace(GREEDY, max_tokens=n) for n in (3, 1, 9)]
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 1, 9]
    with pytest.raises(OptionError, match="3 sampling_params for 2 prompts"):
        llm.generate(["a", "b"], params, use_tqdm=False)


@pytest.mark.parametrize("params", [GREEDY, RANDOM, replace(RANDOM, n=3)])
def test_stream_equals_generate(llm: LLM, params: SamplingParams) -> None:
    expected = llm.generate("Hello", params, use_tqdm=False)[0].outputs
    chunks = list(llm.stream("Hello", params))
    assert [joined(chunks, index) for index in range(params.n)] == expected
    assert len({tuple(output.token_ids) for output in expected}) == params.n


def test_text_is_the_decoded_tokens(llm: LLM) -> None:
    """Random models write random bytes, so this covers incomplete characters at the end as well."""
    if "<0x00>" in llm.tokenizer.backend.get_vocab():
        pytest.skip("runs of byte-fallback tokens that are not UTF-8 are no text")
    for seed in range(5):
        output = generate(llm, "Hello", replace(RANDOM, seed=seed))
        assert output.text == llm.tokenizer.decode(output.token_ids)


def test_stop_string_across_tokens(llm: LLM) -> None:
    whole = generate(llm, "Hello", RANDOM).text
    stop = whole[9:13]
    before = whole[: whole.index(stop)]
    params = replace(RANDOM, stop=[stop, "never there"])
    output = generate(llm, "Hello", params)
    assert (output.text, output.finish_reason, output.stop_reason) == (before, "stop", stop)
    assert joined(list(llm.stream("Hello", params))) == output
    included = generate(llm, "Hello", replace(params, include_stop_str_in_output=True))
    assert included.text == before + stop
    assert not llm.engine.has_unfinished
    assert stop in generate(llm, "Hello", replace(params, min_tokens=40)).text


def test_stop_token_and_eos_are_no_text(llm: LLM) -> None:
    tokens = generate(llm, "Hello", RANDOM).token_ids
    params = replace(RANDOM, stop_token_ids=[tokens[4]])
    output = generate(llm, "Hello", params)
    end = tokens.index(tokens[4])
    assert output.token_ids == tokens[: end + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", tokens[4])
    shorter = generate(llm, "Hello", replace(RANDOM, max_tokens=end)) if end else None
    assert output.text == (shorter.text if shorter else "")


def test_eos_is_the_union_of_all_sources(tmp_path: Path) -> None:
    save_byte_level(save_model(tmp_path))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert LLM(tmp_path, device="cpu").eos_token_ids == {2, 7, 8}


def test_logprobs(llm: LLM) -> None:
    output = generate(llm, "Hello", replace(GREEDY, logprobs=2))
    assert output.logprobs is not None and len(output.logprobs) == 20
    total = 0.0
    for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert len(entry) == 2 and entry[token_id].rank == 1
        assert entry[token_id].decoded_token == llm.tokenizer.decode([token_id], skip_special_tokens=False)
        total += entry[token_id].logprob
    assert output.cumulative_logprob == pytest.approx(total)
    ids = llm.tokenizer.encode("Hello")
    logprobs = llm.logits(ids + output.token_ids)[len(ids) - 1 : -1].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(output.token_ids).unsqueeze(1)).sum()
    assert output.cumulative_logprob == pytest.approx(float(expected), abs=1e-3)


def test_prompt_logprobs(llm: LLM) -> None:
    params = replace(GREEDY, prompt_logprobs=2)
    output = llm.generate("The quick", params, use_tqdm=False)[0]
    ids = output.prompt_token_ids
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(ids)
    first, *others = output.prompt_logprobs
    assert first is None
    expected = llm.logits(ids).log_softmax(-1)
    for token_id, row, entry in zip(ids[1:], expected, others, strict=False):
        assert entry is not None and len(entry) in (2, 3)
        assert entry[token_id].logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        assert entry[token_id].decoded_token == llm.tokenizer.decode([token_id], skip_special_tokens=False)
    chunks = list(llm.stream("The quick", params))
    assert chunks[0].prompt_logprobs == output.prompt_logprobs
    assert all(chunk.prompt_logprobs is None for chunk in chunks[1:])
    assert llm.generate("The quick", GREEDY, use_tqdm=False)[0].prompt_logprobs is None


def test_cached_tokens_and_times(bare: LLM) -> None:
    ids = random_ids(150, 5)
    outputs = [
        bare.generate({"prompt_token_ids": ids, "cache_salt": salt}, GREEDY, use_tqdm=False)[0]
        for salt in ("a", "a", "b")
    ]
    assert [output.num_cached_tokens for output in outputs] == [0, 128, 0]
    assert outputs[0].outputs == outputs[1].outputs == outputs[2].outputs
    metrics = outputs[0].outputs[0].metrics
    assert metrics is not None and metrics.first_token is not None and metrics.finished is not None
    assert metrics.arrival < metrics.first_token < metrics.finished
    stats = bare.engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0) and stats.prefix_cache_hits >= 128


def test_options_of_the_engine(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    llm = LLM(
        folder,
        device="cpu",
        enable_prefix_caching=False,
        batch_invariant=True,
        max_num_prefill_tokens_while_decoding=7,
    )
    assert llm.engine.prefix_cache is None and llm.engine.runner.max_rows == 1
    assert llm.engine.scheduler.config.max_num_prefill_tokens_while_decoding == 7
    with pytest.raises(OptionError, match="max_num_prefill_tokens_while_decoding is 0"):
        LLM(folder, device="cpu", max_num_prefill_tokens_while_decoding=0)


def test_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "fox"}]
    output = llm.chat(messages, GREEDY, use_tqdm=False)[0]
    assert output.prompt == "<s>[user]fox[assistant]"
    assert output.prompt_token_ids == llm.tokenizer.encode_chat(messages)
    assert joined(list(llm.stream_chat(messages, GREEDY))) == output.outputs[0]
    two = llm.chat([messages, messages], GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert [each.prompt for each in two] == ["<s>[user]fox"] * 2


def test_streams_can_be_interleaved_and_closed(llm: LLM) -> None:
    expected = [generate(llm, prompt).text for prompt in ("Hello", "The quick")]
    first, second = llm.stream("Hello", GREEDY), llm.stream("The quick", GREEDY)
    texts = ["", ""]
    for a, b in zip(first, second, strict=True):
        texts[0] += a.text
        texts[1] += b.text
    assert texts == expected
    closed = llm.stream("Hello", GREEDY)
    next(closed)
    assert llm.engine.has_unfinished
    closed.close()
    assert not llm.engine.has_unfinished
    assert llm.engine.pool.num_free == llm.engine.pool.num_blocks


def test_logits(bare: LLM) -> None:
    rows = torch.tensor([random_ids(11), random_ids(11, 1)])
    with torch.no_grad():
        expected = hf_model(CONFIG)(rows).logits
    logits = bare.logits(rows)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(bare.logits(rows[1].tolist()), expected[1], atol=1e-4, rtol=1e-4)
    for wrong, message in (
        ([], "empty"),
        ([400], "outside the vocabulary of 400"),
        ([[[1]]], "shape"),
        (torch.tensor([1.5]), "float32"),
        ([3] * 513, "513 tokens"),
    ):
        with pytest.raises(RequestError, match=message):
            bare.logits(wrong)  # type: ignore[arg-type]


def test_without_a_tokenizer(bare: LLM, tmp_path: Path) -> None:
    output = generate(bare, [5, 6, 7])
    assert len(output.token_ids) == 20 and output.text == ""
    assert joined(list(bare.stream([5, 6, 7], GREEDY))) == output
    for call in (
        partial(generate, bare, "text"),
        partial(generate, bare, [5], replace(GREEDY, stop="x")),
        partial(bare.stream_chat, [{"role": "user", "content": "x"}]),
    ):
        with pytest.raises(RequestError, match=r"no tokenizer|none"):
            call()
    save_model(tmp_path / "model")
    other = LLM(tmp_path / "model", tokenizer=save_byte_level(tmp_path / "tokenizer"), device="cpu")
    assert generate(other, "Hello").token_ids


def test_impossible_requests_leave_nothing_behind(bare: LLM) -> None:
    for prompt, message in (
        ([[5], []], "empty"),
        ([[5], [400]], "outside the vocabulary"),
        ([[5], [5] * 600], "600 tokens"),
        ([["a", "b"]], "something else than token ids"),
    ):
        with pytest.raises(RequestError, match=message):
            bare.generate(prompt, GREEDY, use_tqdm=False)
        assert not bare.engine.has_unfinished
    with pytest.raises(RequestError, match="empty"):
        bare.stream([])


def test_bad_options(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        LLM(tmp_path / "nowhere")
    folder = save_model(tmp_path / "model")
    with pytest.raises(OptionError, match="unknown device 'tpu'"):
        LLM(folder, device="tpu")
    with pytest.raises(OptionError, match="max_num_seqs is 0"):
        LLM(folder, device="cpu", max_num_seqs=0)
    with pytest.raises(OptionError, match="less than one block"):
        LLM(folder, device="cpu", kv_cache_memory=10)
    if not torch.cuda.is_available():
        with pytest.raises(OptionError, match="'cuda' is not available"):
            LLM(folder, device="cuda")
