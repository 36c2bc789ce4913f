"""What a benchmark needs of a system, and the half that all systems with a static cache share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from ..model.cost import decode_step_bytes
from .shapes import BenchModel
from .timing import synchronize


class System(Protocol):
    """One way to run a model greedily on a batch of prompts of equal length.

    A method returns when its result is there; it may have launched work for a later call.

    model: its shape and weights. room: decode steps that are possible after a prefill before `rewind`.
    """

    model: BenchModel

    @property
    def room(self) -> int: ...

    def prepare(self, prompt_ids: Tensor, output_len: int) -> None:
        """Get ready for int64 prompts [batch, input_len] and outputs of `output_len` tokens."""

    def prefill(self) -> None:
        """Run the prompts, from an empty cache, up to the first output token of each."""

    def decode_steps(self, count: int) -> None:
        """Add `count` tokens to every sequence."""

    def rewind(self) -> None:
        """Back to where `prefill` ends."""

    def step_bytes(self, context_len: int, batch_size: int) -> int:
        """Bytes that one decode step must read, with `context_len` tokens cached for each sequence."""


def model_step_bytes(model: BenchModel, context_len: int, batch_size: int) -> int:
    """`System.step_bytes` for weights and a cache in the model's dtype: true ranks, no padding."""
    return decode_step_bytes(model.config, model.dtype.itemsize, [context_len] * batch_size)


class StaticCacheSystem(ABC):
    """A cache of fixed size, one sequence a row; tokens stay on the device, only the last is waited for."""

    def __init__(self, model: BenchModel):
        self.model = model
        self.prompt_ids = torch.empty(0, 0, dtype=torch.int64)
        self.output_len = 0

    @property
    def room(self) -> int:
        return self.output_len - 1

    @torch.inference_mode()
    def prepare(self, prompt_ids: Tensor, output_len: int) -> None:
        self.prompt_ids, self.output_len = prompt_ids.to(self.model.device), output_len
        self._allocate(prompt_ids.shape[0], prompt_ids.shape[1] + output_len)
        self._first = torch.zeros(len(prompt_ids), 1, dtype=torch.int64, device=self.model.device)
        self._token = self._first.clone()
        self._position = torch.zeros(1, dtype=torch.int64, device=self.model.device)

    @torch.inference_mode()
    def prefill(self) -> None:
        self._empty()
        self._first.copy_(self._prefill(self.prompt_ids).argmax(-1, keepdim=True))
        self._start()
        synchronize(self.model.device)

    @torch.inference_mode()
    def decode_steps(self, count: int) -> None:
        for _ in range(count):
            # A compiled step writes into memory that its next call reuses.
            self._token = self._decode(self._token, self._position).clone()
            self._position += 1
        synchronize(self.model.device)

    @torch.inference_mode()
    def rewind(self) -> None:
        self._truncate(self.prompt_ids.shape[1])
        self._start()

    def step_bytes(self, context_len: int, batch_size: int) -> int:
        return model_step_bytes(self.model, context_len, batch_size)

    def _start(self) -> None:
        self._token = self._first.clone()
        self._position.fill_(self.prompt_ids.shape[1])

    @abstractmethod
    def _allocate(self, batch_size: int, length: int) -> None:
        """A cache for `length` tokens of each sequence."""

    @abstractmethod
    def _empty(self) -> None:
        """Forget all that is cached."""

    @abstractmethod
    def _truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens of each sequence."""

    @abstractmethod
    def _prefill(self, token_ids: Tensor) -> Tensor:
        """int64 [batch, tokens] from position 0 -> logits of the last one, [batch, vocab_size]."""

    @abstractmethod
    def _decode(self, token: Tensor, position: Tensor) -> Tensor:
        """int64 [batch, 1] at int64 [1] -> the most likely next one, int64 [batch, 1]."""
