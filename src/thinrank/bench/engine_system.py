"""Our engine as a system. Reaches it through `add`, `step` and `abort` alone, as a caller would."""

from __future__ import annotations

from torch import Tensor

from ..config import EngineConfig, SamplingParams
from ..engine.engine import Engine
from ..model.cost import kv_cache_bytes
from .shapes import BenchModel, fast_decoder
from .system import model_step_bytes

#: Output tokens that a request may have at least, so that an energy reading needs few prefills. Blocks are
#: paid for, no step gets longer: one graph serves every length.
MIN_OUTPUT = 1024


def engine_config(model: BenchModel, batch_size: int, length: int) -> EngineConfig:
    """Room for `batch_size` sequences of `length` tokens, and no more; a repeated prompt is computed again."""
    return EngineConfig(
        kv_cache_memory=kv_cache_bytes(model.config, model.dtype.itemsize, length, batch_size),
        max_model_len=length,
        max_num_seqs=batch_size,
        enable_prefix_caching=False,
    )


class EngineSystem:
    """Requests that ignore EOS; a step is whatever `Engine.step` does. temperature: 0 is greedy."""

    def __init__(self, model: BenchModel, temperature: float = 0.0):
        self.model = model
        self.temperature = temperature
        self.decoder = fast_decoder(model)
        self.engine: Engine | None = None
        self._max_tokens = 0
        self._prompts: list[list[int]] = []
        self._tokens: dict[str, int] = {}

    @property
    def room(self) -> int:
        return self._max_tokens - 1

    def prepare(self, prompt_ids: Tensor, output_len: int) -> None:
        self._prompts = prompt_ids.tolist()
        batch_size, input_len = prompt_ids.shape
        trained = self.model.config.max_position_embeddings
        length = max(input_len + output_len, min(trained, input_len + MIN_OUTPUT))
        self._max_tokens = length - input_len
        self.engine = Engine(self.decoder, engine_config(self.model, batch_size, length))

    def prefill(self) -> None:
        assert self.engine is not None, "prepare comes first"
        for request_id in self._tokens:
            self.engine.abort(request_id)
        params = SamplingParams(
            temperature=self.temperature, max_tokens=self._max_tokens, ignore_eos=True, seed=self.model.seed
        )
        self._tokens = {self.engine.add(prompt, params): 0 for prompt in self._prompts}
        self._step_until(1)

    def decode_steps(self, count: int) -> None:
        self._step_until(min(self._tokens.values()) + count)

    def rewind(self) -> None:
        self.prefill()

    def step_bytes(self, context_len: int, batch_size: int) -> int:
        return model_step_bytes(self.model, context_len, batch_size)

    def _step_until(self, target: int) -> None:
        """Step until the caller has this many tokens of every sequence in hand."""
        assert self.engine is not None, "prepare comes first"
        while min(self._tokens.values()) < target:
            for token in self.engine.step():
                self._tokens[token.request_id] += 1
