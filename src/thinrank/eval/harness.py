"""A thinrank model as lm-evaluation-harness sees one, under the name "thinrank".

Importing this module registers it: `lm_eval.simple_evaluate(model="thinrank", model_args="pretrained=FOLDER")`.
Tokens, windows and stops are those of the harness's own class for transformers, so that scores can be compared.
Needs the package lm-eval, an extra.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm

from ..config import SamplingParams
from ..errors import OptionError, RequestError, ThinrankError, unknown_name
from ..llm import LLM
from ..model.batch import ForwardBatch, check_token_ids

#: Tokens of a forward pass, where no batch_size is given; bounds the activations.
BATCH_TOKENS = 4096
#: Single logits in memory at a time, 256 MiB of float32: bounds the rows that the lm_head sees together.
HEAD_LOGITS = 2**26

#: What a task's generation_kwargs may hold; the harness has more names for max_gen_toks.
GENERATION_ARGUMENTS = (
    "do_sample", "max_gen_toks", "min_p", "repetition_penalty", "temperature", "top_k", "top_p", "until"
)  # fmt: skip

#: Input tokens, and the requests (number, tokens to score at its end) that this one pass answers.
Scored = tuple[tuple[int, ...], list[tuple[int, list[int]]]]


@register_model("thinrank")
class ThinrankLM(TemplateLM):  # type: ignore[misc]
    """pretrained: a checkpoint folder, or a loaded `LLM`, which settles device, dtype, max_length and
    kv_cache_memory. batch_size: sequences of a forward pass; "auto": as many as `BATCH_TOKENS` hold.
    max_length: tokens of a sequence; None: what the model was trained for. max_gen_toks: of tasks that set no
    limit. progress: show bars.

    Raises what `LLM` raises, RequestError for a model without a tokenizer, OptionError for a batch_size.
    """

    def __init__(
        self,
        pretrained: str | Path | LLM,
        *,
        tokenizer: str | Path | None = None,
        batch_size: int | str = "auto",
        device: str = "auto",
        dtype: str = "auto",
        max_length: int | None = None,
        kv_cache_memory: int | None = None,
        max_gen_toks: int = 256,
        progress: bool = True,
    ):
        super().__init__()
        self._sequences_per_pass = sequences_per_pass(batch_size)
        if not isinstance(pretrained, LLM):
            pretrained = LLM(
                pretrained,
                tokenizer=tokenizer,
                device=device,
                dtype=dtype,
                max_model_len=max_length,
                kv_cache_memory=kv_cache_memory,
            )
        self.llm = pretrained
        self.tokenizer = pretrained.tokenizer
        self.max_gen_toks = max_gen_toks
        self._progress = progress

    @property
    def max_length(self) -> int:
        return self.llm.engine.max_model_len

    @property
    def eot_token_id(self) -> int:
        """Raises RequestError for a tokenizer without EOS."""
        if self.tokenizer.eos_token_id is None:
            raise RequestError("the tokenizer has no EOS token", "name one in tokenizer_config.json")
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What a text without context is conditioned on: BOS, or EOS for a tokenizer without."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.path.as_posix().replace("/", "__")

    @property
    def device(self) -> torch.device:
        return self.llm.engine.decoder.device

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Raises RequestError for ids that the model has not."""
        ids = self.tokenizer.encode(string, add_special_tokens=add_special_tokens is not False)
        if ids:
            check_token_ids(ids, self.llm.config.vocab_size)
        return ids

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Raises RequestError when there is no template, or it rejects the messages."""
        return self.tokenizer.render_chat(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        results: list[tuple[float, bool]] = super().loglikelihood(
            requests, disable_tqdm or not self._progress
        )
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Of each text, every token once, in windows of `max_length` with as much context as they hold."""
        texts = [request.args[0] for request in requests]
        windows = [
            [
                (None, *make_disjoint_window(window))
                for window in get_rolling_token_windows(
                    self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1
                )
            ]
            for text in texts
        ]
        scores = iter(self._loglikelihood_tokens([w for each in windows for w in each], disable_tqdm))
        totals = [sum(next(scores)[0] for _ in each) for each in windows]
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether greedy decoding would have written it.

        requests: a key for the cache, context and continuation; what is too long loses its first tokens.
        """
        shared: dict[tuple[int, ...], list[tuple[int, list[int]]]] = defaultdict(list)
        for number, (_, context, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                raise RequestError(
                    f"a continuation has {len(continuation)} tokens, a sequence may have {self.max_length}",
                    "raise max_length",
                )
            if continuation:
                tokens = (context + continuation)[-(self.max_length + 1) : -1]
                shared[tuple(tokens)].append((number, continuation))
        results = [(0.0, True)] * len(requests)  # an empty continuation is certain
        hidden = disable_tqdm or not self._progress
        with tqdm(total=len(shared), desc="Log-likelihoods", disable=hidden) as bar:
            for batch in self._batches(shared):
                for number, result in self._score(batch):
                    results[number] = result
                    if requests[number][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[number][0], result)
                bar.update(len(batch))
        return results

    def _batches(self, shared: dict[tuple[int, ...], list[tuple[int, list[int]]]]) -> Iterator[list[Scored]]:
        """The longest first, so that memory runs out at once if it does."""
        rest = sorted(shared.items(), key=lambda item: len(item[0]), reverse=True)
        while rest:
            size = self._sequences_per_pass or max(1, BATCH_TOKENS // len(rest[0][0]))
            yield rest[:size]
            rest = rest[size:]

    def _score(self, batch: list[Scored]) -> Iterator[tuple[int, tuple[float, bool]]]:
        """One forward pass. Sequences are padded at their ends, which no token sees: equal lengths run fastest."""
        decoder = self.llm.engine.decoder
        width = len(batch[0][0])
        padded = [torch.tensor([*tokens, *[0] * (width - len(tokens))]) for tokens, _ in batch]
        hidden = decoder.hidden(ForwardBatch.whole_sequences(padded, decoder.device))
        numbers, continuations = [], []
        rows: list[int] = []
        for index, (tokens, wanted) in enumerate(batch):
            end = index * width + len(tokens)
            for number, continuation in wanted:
                numbers.append(number)
                continuations.append(continuation)
                rows += range(end - len(continuation), end)
        targets = torch.tensor([token for each in continuations for token in each], device=decoder.device)
        losses, greedy = [], []
        step = max(1, HEAD_LOGITS // self.llm.config.vocab_size)
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            logits = decoder.head(hidden[torch.tensor(rows[part], device=decoder.device)])
            losses.append(cross_entropy(logits, targets[part], reduction="none"))
            greedy.append(logits.argmax(-1) == targets[part])
        lengths = [len(each) for each in continuations]
        for number, loss, equal in zip(
            numbers,
            torch.cat(losses).cpu().split(lengths),
            torch.cat(greedy).cpu().split(lengths),
            strict=True,
        ):
            if not loss.isfinite().all():
                raise ThinrankError(
                    "the model computed infinite or undefined logits",
                    "try dtype float32, or check the checkpoint",
                )
            yield number, (-float(loss.double().sum()), bool(equal.all()))

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each context up to the first of its stops, without it.

        A context that leaves no room for max_gen_toks loses its first tokens. Sampling is seeded by the
        request's number. Raises OptionError for an argument that is unknown or out of range.
        """
        prompts, params = [], []
        for number, (context, arguments) in enumerate(request.args for request in requests):
            each = self._sampling_params(arguments, number)
            room = self.max_length - each.max_tokens
            if room < 1:
                raise OptionError(
                    f"max_gen_toks is {each.max_tokens}, a sequence may have {self.max_length} tokens",
                    "lower it with --gen-kwargs",
                )
            prompts.append((self.tok_encode(context) or [self.prefix_token_id])[-room:])
            params.append(each)
        outputs = self.llm.generate(prompts, params, use_tqdm=self._progress and not disable_tqdm)
        texts = []
        for request, output, each in zip(requests, outputs, params, strict=True):
            # Decoded without its prompt, as transformers does; LLM keeps the space before a first word.
            text = self.tokenizer.decode(output.outputs[0].token_ids)
            for stop in each.stop or ():
                text = text.partition(stop)[0]
            texts.append(text)
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _sampling_params(self, arguments: dict[str, Any], number: int) -> SamplingParams:
        normal = normalize_gen_kwargs(arguments, self.max_gen_toks)
        for name in normal:
            if name not in GENERATION_ARGUMENTS:
                raise unknown_name("generation argument", name, list(GENERATION_ARGUMENTS))
        eos = self.tokenizer.decode([self.eot_token_id], skip_special_tokens=False)
        return SamplingParams(
            temperature=normal.get("temperature", 0.0) if normal["do_sample"] else 0.0,
            max_tokens=normal["max_gen_toks"],
            stop=tuple(stop for stop in [*normal["until"], eos] if stop),
            seed=number,
            **{
                name: normal[name]
                for name in ("min_p", "repetition_penalty", "top_k", "top_p")
                if name in normal
            },
        )


def sequences_per_pass(batch_size: int | str) -> int | None:
    """The number; None for "auto". Raises OptionError for anything else."""
    if batch_size == "auto":
        return None
    if not str(batch_size).isdecimal() or int(batch_size) < 1:
        raise OptionError(f"batch_size is {batch_size}", 'it must be "auto" or at least 1')
    return int(batch_size)
