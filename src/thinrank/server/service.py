"""What all routes of one server share: the model, its worker, and how requests become prompts and generations."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..config import BLOCK_SIZE
from ..errors import ThinrankError
from ..llm import LLM
from .config import ServerConfig
from .errors import ApiError, bad_request
from .forms import grammar_source
from .generation import Generation, Prompt
from .grammar import Constraint, Grammars
from .metrics import Metrics
from .ranks import describe_ranks
from .sampling import model_defaults, sampling_params
from .schema import MAX_CHOICES, ChatCompletionRequest, ChatFields, CompletionRequest, Message
from .stats import StatsReader
from .token_text import TokenTexts
from .unknown_fields import UnknownFields
from .worker import EngineWorker

#: Characters that a text may always have, so that a client can count the tokens of more than fits into the model.
#: Tokenizers take some 2 s and 150 MB a megabyte, and nothing stops them.
_MIN_TEXT = 10**6
#: Arguments of transformers' own, which `chat_template_kwargs` must not set.
_RESERVED = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


class Service:
    """Raises RequestError for a model without tokenizer."""

    def __init__(self, llm: LLM, config: ServerConfig):
        self.config = config
        self.tokenizer = llm.tokenizer
        self.engine = llm.engine
        self.eos_token_ids = llm.eos_token_ids
        self.vocab_size = llm.config.vocab_size
        self.max_model_len = llm.engine.max_model_len
        self.worker = EngineWorker(llm.engine)
        self.stats = StatsReader(llm, self.worker.pace)
        self.ranks = describe_ranks(llm.config)
        self.metrics = Metrics(config.served_model_names[0], llm.engine.stats)
        self.token_texts = TokenTexts(llm.tokenizer)
        self.started = int(time.time())
        self.defaults = model_defaults(llm.generation_config) if config.generation_config == "auto" else {}
        self.unknown_fields = UnknownFields()
        longest_token = max(map(len, llm.tokenizer.backend.get_vocab()))
        self._max_text = max(_MIN_TEXT, self.max_model_len * longest_token)
        self._grammars = Grammars(llm.tokenizer, self.vocab_size, llm.eos_token_ids)

    def check_model(self, name: str | None) -> str:
        """The model's name in the answer. Raises ApiError for one that is not served."""
        if name is not None and name not in self.config.served_model_names:
            served = ", ".join(self.config.served_model_names)
            raise ApiError(
                404,
                f"the model {name!r} is not served; served: {served}",
                param="model",
                code="model_not_found",
            )
        return name or self.config.served_model_names[0]

    def check_options(self, request: CompletionRequest | ChatCompletionRequest) -> None:
        """Raises ApiError for what a schema cannot say of single fields."""
        if request.stream_options is not None and not request.stream:
            raise bad_request("stream_options needs stream to be true", "stream_options")
        for token_id in map(int, request.logit_bias or ()):
            if token_id >= self.vocab_size:
                raise bad_request(f"token id {token_id} is outside the vocabulary", "logit_bias")

    async def encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        """Token ids of a text, without blocking the event loop. Raises ApiError, with `param`, for one that is longer
        than anything that fits into the model."""
        if len(text) > self._max_text:
            raise bad_request(
                f"a text of {len(text)} characters is more than fits into this model's context of "
                f"{self.max_model_len} tokens: at most {self._max_text} are read",
                param,
                "context_length_exceeded",
            )
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    async def encode_chat(self, fields: ChatFields) -> Prompt:
        """The prompt of a conversation. The template writes BOS where the model wants one, so none is added."""
        options = dict(fields.chat_template_kwargs or {})
        reserved = sorted(_RESERVED & set(options))
        if reserved:
            raise bad_request(
                f"chat_template_kwargs cannot set {', '.join(reserved)}", "chat_template_kwargs"
            )
        if fields.continue_final_message:
            if fields.add_generation_prompt and "add_generation_prompt" in fields.model_fields_set:
                raise bad_request(
                    "continue_final_message and add_generation_prompt contradict each other",
                    "continue_final_message",
                )
            options["continue_final_message"] = True
        options["add_generation_prompt"] = fields.add_generation_prompt and not fields.continue_final_message
        messages = [_template_message(message) for message in fields.messages]
        text = await asyncio.to_thread(self._render, messages, options)
        return Prompt(text, await self.encode(text, add_special_tokens=False, param="messages"))

    async def generation(
        self,
        request: CompletionRequest | ChatCompletionRequest,
        prompts: Sequence[Prompt],
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
    ) -> Generation:
        """A checked request, ready to start. max_tokens: None for as many as fit.

        Raises ApiError or ThinrankError for what the client got wrong, EngineDeadError.
        """
        self.worker.check_alive()
        field = "messages" if isinstance(request, ChatCompletionRequest) else "prompt"
        choices = len(prompts) * (request.n or 1)
        if choices > MAX_CHOICES:
            raise bad_request(
                f"{choices} choices are more than {MAX_CHOICES}: send fewer prompts, or a lower n", "n"
            )
        max_tokens = self._room(prompts, max_tokens)
        if request.min_tokens is not None and request.min_tokens > max_tokens:
            raise bad_request(
                f"min_tokens is {request.min_tokens}, and at most {max_tokens} are generated", "min_tokens"
            )
        params = sampling_params(
            request, self.defaults, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs
        )
        for prompt in prompts:
            try:
                self.engine.check(prompt.token_ids, params)
            except ThinrankError as error:
                raise bad_request(str(error), field) from error
        source = grammar_source(request)
        grammar = None if source is None else await self._grammars.compile(source)
        constraint = None if grammar is None else partial(Constraint, grammar)
        return Generation(self, prompts, params, constraint, request.cache_salt or "")

    def _room(self, prompts: Sequence[Prompt], wanted: int | None) -> int:
        """Tokens to generate at most. Raises ApiError when a prompt leaves no room for what is wanted."""
        longest = max(len(prompt.token_ids) for prompt in prompts)
        room = self.max_model_len - longest
        if room < (wanted or 1):
            output = "" if wanted is None else f" and {wanted} output tokens"
            raise bad_request(
                f"{longest} prompt tokens{output} are more than this model's context of {self.max_model_len} tokens",
                "messages" if wanted is None else "max_tokens",
                "context_length_exceeded",
            )
        if wanted is not None:
            return wanted
        return max(1, min(room, self.engine.pool.num_blocks * BLOCK_SIZE - longest))

    def _render(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
        try:
            return self.tokenizer.render_chat(messages, chat_template=self.config.chat_template, **options)
        except ThinrankError as error:
            if self.tokenizer.chat_template is None and self.config.chat_template is None:
                raise bad_request(
                    "this model has no chat template: use /v1/completions, or start the server with --chat-template"
                ) from error
            raise bad_request(str(error), "messages") from error
        except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, RecursionError) as error:
            raise bad_request(f"the chat template rejects the messages: {error}", "messages") from error


def _template_message(message: Message) -> dict[str, Any]:
    """As chat templates expect it: content is one text."""
    fields: dict[str, Any] = {"role": message.role, **(message.model_extra or {})}
    if isinstance(message.content, list):
        fields["content"] = "\n".join(part.text for part in message.content)
    elif "content" in message.model_fields_set:
        fields["content"] = message.content
    return fields
