"""`LLM`: text in, text out, over one checkpoint folder. Names and defaults follow vLLM where it has them."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from .checkpoint.load import load_model
from .config import EngineConfig, SamplingParams
from .engine.engine import Engine
from .errors import OptionError, RequestError
from .model.batch import ForwardBatch, check_token_ids
from .model.registry import token_ids as parse_token_ids
from .outputs import CompletionChunk, Continuation, RequestOutput, RunningRequest
from .text import Messages, Tokenizer, has_tokenizer

#: A text, token ids, or a mapping with "prompt_token_ids" or "prompt", and "cache_salt" if it has one.
Prompt = str | Sequence[int] | Mapping[str, Any]
#: Closing it aborts the request.
Chunks = Generator[CompletionChunk, None, None]


class Encoded(NamedTuple):
    """A prompt as the engine takes it. text: None if it came as token ids. cache_salt: as in `Engine.add`."""

    text: str | None
    token_ids: list[int]
    cache_salt: str = ""


class LLM:
    """A loaded model.

    model: a folder that `thinrank convert` wrote, or a dense Hugging Face one. tokenizer: another folder to
    take the tokenizer from. device: "auto", "cpu", "cuda", "cuda:<index>". dtype: "auto", "float32",
    "float16", "bfloat16". The rest is `EngineConfig`.

    Raises CheckpointError or UnsupportedModelError for a folder that cannot be loaded, OptionError for an
    option that is out of range. Not thread-safe.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | Path | None = None,
        device: str | torch.device = "auto",
        dtype: str = "auto",
        max_model_len: int | None = EngineConfig.max_model_len,
        kv_cache_memory: int | None = EngineConfig.kv_cache_memory,
        gpu_memory_utilization: float = EngineConfig.gpu_memory_utilization,
        max_num_seqs: int = EngineConfig.max_num_seqs,
        max_num_batched_tokens: int = EngineConfig.max_num_batched_tokens,
        max_num_prefill_tokens_while_decoding: int = EngineConfig.max_num_prefill_tokens_while_decoding,
        enable_prefix_caching: bool = EngineConfig.enable_prefix_caching,
        batch_invariant: bool = EngineConfig.batch_invariant,
    ):
        engine_config = EngineConfig(
            kv_cache_memory=kv_cache_memory,
            gpu_memory_utilization=gpu_memory_utilization,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_prefill_tokens_while_decoding=max_num_prefill_tokens_while_decoding,
            enable_prefix_caching=enable_prefix_caching,
            batch_invariant=batch_invariant,
        )
        checkpoint = load_model(model, device, dtype)
        self.config = checkpoint.config
        self.engine = Engine(checkpoint.decoder, engine_config)
        self.generation_config = checkpoint.generation_config
        self._tokenizer_path = Path(checkpoint.path if tokenizer is None else tokenizer)
        self._tokenizer_is_named = tokenizer is not None
        self._running: dict[str, RunningRequest] = {}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Loaded on first use. Raises RequestError when there is none, CheckpointError when it is damaged."""
        return Tokenizer(self._tokenizer_path)

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Every id that the config, the generation config or the tokenizer calls EOS."""
        ids = {*self.config.eos_token_ids, *parse_token_ids(self.generation_config.get("eos_token_id"))}
        tokenizer = self._optional_tokenizer()
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            ids.add(tokenizer.eos_token_id)
        return frozenset(ids)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue every prompt; results in the order of the prompts.

        prompts: one or several of: a text, token ids, {"prompt_token_ids": ids}, {"prompt": text}; a mapping may
        have a "cache_salt" as well, and shares cached blocks with prompts of the same salt only.
        sampling_params: one for all, or one a prompt; None: the defaults of `SamplingParams`.
        Raises RequestError for a prompt that cannot be served, before any is started.
        """
        encoded = [self._encode(prompt) for prompt in _as_list(prompts)]
        return self._generate(encoded, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one or several conversations. template_options: those of `Tokenizer.render_chat`.

        Raises RequestError as `generate` does, and when there is no chat template.
        """
        encoded = [
            self._encode_chat(conversation, template_options) for conversation in _conversations(messages)
        ]
        return self._generate(encoded, sampling_params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Chunks:
        """Continue one prompt and yield what every step adds. Closing the iterator aborts the request.

        Raises RequestError at the call, not at the first chunk.
        """
        return self._stream(self._encode(prompt), sampling_params or SamplingParams())

    def stream_chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None, **template_options: Any
    ) -> Chunks:
        """`stream` for one conversation; options as in `chat`."""
        return self._stream(
            self._encode_chat(messages, template_options), sampling_params or SamplingParams()
        )

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int] | Tensor) -> Tensor:
        """Next-token logits at every position, without a cache.

        token_ids: [tokens] or [sequences, tokens]. Returns float32 [tokens, vocab_size] or
        [sequences, tokens, vocab_size] on the model's device. Raises RequestError for ids outside the
        vocabulary, or more tokens than `max_model_len`.
        """
        ids = torch.as_tensor(token_ids)
        if ids.numel() == 0:
            raise RequestError("the sequence is empty", "give at least one token")
        if ids.dim() not in (1, 2) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise RequestError(
                f"token ids have shape {list(ids.shape)} and dtype {ids.dtype}",
                "integers of shape [tokens] or [sequences, tokens] are needed",
            )
        check_token_ids([int(ids.min()), int(ids.max())], self.config.vocab_size)
        if ids.shape[-1] > self.engine.max_model_len:
            raise RequestError(
                f"{ids.shape[-1]} tokens are more than max_model_len = {self.engine.max_model_len}",
                "split the sequence",
            )
        rows = ids.long().reshape(-1, ids.shape[-1])
        decoder = self.engine.decoder
        logits = decoder(ForwardBatch.whole_sequences(list(rows), decoder.device))
        return logits.reshape(*ids.shape, -1)

    def _generate(
        self,
        prompts: list[Encoded],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = _params_per_prompt(sampling_params, len(prompts))
        for prompt, each in zip(prompts, params, strict=True):
            self._check(prompt.token_ids, each)
        requests = [self._start(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        try:
            with tqdm(total=len(requests), desc="Prompts", disable=not use_tqdm) as progress:
                finished = 0
                while finished < len(requests):
                    self._step()
                    before, finished = finished, sum(request.finished for request in requests)
                    progress.update(finished - before)
        finally:
            for request in requests:
                self._end(request)
        return [request.output() for request in requests]

    def _stream(self, prompt: Encoded, params: SamplingParams) -> Chunks:
        self._check(prompt.token_ids, params)

        def chunks() -> Chunks:
            request = self._start(prompt, params)
            try:
                while request.chunks or not request.finished:
                    if not request.chunks:
                        self._step()
                    while request.chunks:
                        yield request.chunks.popleft()
            finally:
                self._end(request)

        return chunks()

    def _start(self, prompt: Encoded, params: SamplingParams) -> RunningRequest:
        text, token_ids, cache_salt = prompt
        request_id = self.engine.add(token_ids, params, self.eos_token_ids, cache_salt=cache_salt)
        tokenizer = self._optional_tokenizer()
        request = RunningRequest(
            request_id,
            text,
            token_ids,
            [Continuation(request_id, index, token_ids, params, tokenizer) for index in range(params.n)],
        )
        self._running[request_id] = request
        return request

    def _step(self) -> None:
        """Advance the engine; give every new token to its request, whoever is waiting for which."""
        for token in self.engine.step():
            request = self._running[token.request_id]
            chunk = request.continuations[token.index].push(token)
            request.chunks.append(chunk)
            if chunk.finish_reason and not token.finish_reason:
                self.engine.abort(token.request_id, token.index)

    def _end(self, request: RunningRequest) -> None:
        if not request.finished:
            self.engine.abort(request.request_id)
        del self._running[request.request_id]

    def _check(self, token_ids: list[int], params: SamplingParams) -> None:
        self.engine.check(token_ids, params)
        if params.stop and self._optional_tokenizer() is None:
            raise RequestError("stop strings need a tokenizer, and this model has none", "use stop_token_ids")

    def _optional_tokenizer(self) -> Tokenizer | None:
        """None when the folder has none and no other was named: token ids work without."""
        return self.tokenizer if self._tokenizer_is_named or has_tokenizer(self._tokenizer_path) else None

    def _encode(self, prompt: Prompt) -> Encoded:
        if isinstance(prompt, Mapping):
            text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            token_ids = self.tokenizer.encode(text or "") if token_ids is None else list(token_ids)
            return Encoded(text, token_ids, prompt.get("cache_salt", ""))
        if isinstance(prompt, str):
            return Encoded(prompt, self.tokenizer.encode(prompt))
        if not all(isinstance(token_id, int) for token_id in prompt):
            raise RequestError(
                f"a prompt is a {type(prompt).__name__} of something else than token ids",
                "pass a text, a list of integers, or {'prompt_token_ids': [...]}",
            )
        return Encoded(None, list(prompt))

    def _encode_chat(self, messages: Messages, options: Mapping[str, Any]) -> Encoded:
        text = self.tokenizer.render_chat(messages, **options)
        return Encoded(text, self.tokenizer.encode(text, add_special_tokens=False))


def _as_list(prompts: Any) -> list[Any]:
    """Several prompts, from one or several."""
    single = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return [prompts] if single else list(prompts)


def _conversations(messages: Any) -> list[Messages]:
    """Several conversations, from one or several."""
    return [messages] if len(messages) > 0 and isinstance(messages[0], Mapping) else list(messages)


def _params_per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise OptionError(
            f"{len(params)} sampling_params for {count} prompts", "give one for all, or one each"
        )
    return list(params)
