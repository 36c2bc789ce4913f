"""The ways that logits and greedy tokens can come about: thinrank's own, and Hugging Face's for comparison."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..bench.engine_system import engine_config
from ..bench.huggingface import HuggingFaceSystem
from ..bench.shapes import BenchModel
from ..config import SamplingParams
from ..engine.engine import Engine
from ..model.batch import ForwardBatch
from ..model.decoder import Decoder
from .forcing import decode_logits, prefill_logits

if TYPE_CHECKING:
    from ..model.packed_decoder import PackedDecoder

TokenIds = list[list[int]]


class ComputePath(Protocol):
    """One way. continuations: one a prompt, all of the same length."""

    def logits(self, prompts: TokenIds, continuations: TokenIds) -> Iterator[Tensor]:
        """For each prompt, the logits from which each token of its continuation would be chosen.

        float32 [output_len, vocab_size] on the model's device.
        """

    def generate(self, prompts: TokenIds, output_len: int) -> TokenIds | None:
        """Greedy continuations, not ended by EOS; None if nothing generates this way."""


class ReferencePath:
    """The plain decoder in float32: logits without a cache."""

    def __init__(self, decoder: Decoder, model: BenchModel, rows: int, length: int):
        self._decoder = decoder
        self._engine = Engine(decoder, engine_config(model, rows, length))

    @torch.inference_mode()
    def logits(self, prompts: TokenIds, continuations: TokenIds) -> Iterator[Tensor]:
        device = self._decoder.device
        for prompt, continuation in zip(prompts, continuations, strict=True):
            ids = torch.tensor([*prompt, *continuation[:-1]])
            rows = torch.arange(len(prompt) - 1, len(ids), device=device)
            yield self._decoder(ForwardBatch.whole_sequences([ids], device), rows=rows)

    def generate(self, prompts: TokenIds, output_len: int) -> TokenIds:
        return _greedy(self._engine, prompts, output_len)


class PrefillPath:
    """Prompt and continuation in one pass, or in chunks of so many tokens."""

    def __init__(
        self, decoder: Decoder | PackedDecoder, model: BenchModel, length: int, chunk: int | None = None
    ):
        self._engine, self._chunk = Engine(decoder, engine_config(model, 1, length)), chunk

    def logits(self, prompts: TokenIds, continuations: TokenIds) -> Iterator[Tensor]:
        for prompt, continuation in zip(prompts, continuations, strict=True):
            passes = prefill_logits(self._engine, [*prompt, *continuation[:-1]], self._chunk)
            yield torch.cat(list(passes))[len(prompt) - 1 :]

    def generate(self, prompts: TokenIds, output_len: int) -> None:
        return None


class DecodePath:
    """The continuation one token a step, `rows` sequences at a time; on a GPU by the captured graph."""

    def __init__(self, decoder: Decoder | PackedDecoder, model: BenchModel, length: int, rows: int):
        self._engine, self._rows = Engine(decoder, engine_config(model, rows, length)), rows

    def logits(self, prompts: TokenIds, continuations: TokenIds) -> Iterator[Tensor]:
        for start in range(0, len(prompts), self._rows):
            group = slice(start, start + self._rows)
            steps = decode_logits(self._engine, prompts[group], continuations[group])
            yield from torch.stack([logits.clone() for logits in steps], dim=1)

    def generate(self, prompts: TokenIds, output_len: int) -> TokenIds:
        return _greedy(self._engine, prompts, output_len)


class HuggingFacePath:
    """transformers with a StaticCache, eager, one sequence at a time. decode: as in `DecodePath`."""

    def __init__(self, system: HuggingFaceSystem, decode: bool):
        self._system, self._decode = system, decode

    def logits(self, prompts: TokenIds, continuations: TokenIds) -> Iterator[Tensor]:
        for prompt, continuation in zip(prompts, continuations, strict=True):
            keep = len(continuation)
            ids = self._prepare([*prompt, *continuation[:-1]], output_len=1)
            if self._decode:
                first = ids.shape[1] - keep
                if first:
                    self._system.logits(ids[:, :first], 0)
                steps = [self._system.logits(ids[:, at : at + 1], at) for at in range(first, ids.shape[1])]
                yield torch.cat(steps, dim=1)[0].float()
            else:
                yield self._system.logits(ids, 0, keep)[0].float()

    def generate(self, prompts: TokenIds, output_len: int) -> TokenIds | None:
        return [self._greedy(prompt, output_len) for prompt in prompts] if self._decode else None

    def _greedy(self, prompt: list[int], output_len: int) -> list[int]:
        token, start = self._prepare(prompt, output_len), 0
        chosen = []
        for _ in range(output_len):
            logits, start = self._system.logits(token, start), start + token.shape[1]
            token = logits[:, -1].argmax(-1, keepdim=True)
            chosen.append(int(token))
        return chosen

    def _prepare(self, token_ids: list[int], output_len: int) -> Tensor:
        """int64 [1, tokens] on the device, before an empty cache."""
        self._system.prepare(torch.tensor([token_ids]), output_len)
        return self._system.prompt_ids


def _greedy(engine: Engine, prompts: TokenIds, output_len: int) -> TokenIds:
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    outputs: dict[str, list[int]] = {engine.add(prompt, params): [] for prompt in prompts}
    while engine.has_unfinished:
        for token in engine.step():
            outputs[token.request_id].append(token.token_id)
    return list(outputs.values())
