"""A decoder whose next token is a hash of all tokens before it, as it finds them in the cache.

Exact and fast: a block that is lost, shared wrongly, or written by somebody else shows as a wrong token. And graphs of
decode steps and short prompts that run on it without CUDA.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from thinrank.config import BLOCK_SIZE, EngineConfig
from thinrank.engine.engine import Engine
from thinrank.engine.kv_cache import blocks_for
from thinrank.kernels import reference as ops
from thinrank.model.batch import ForwardBatch, KVLayer, PagedContext
from thinrank.model.registry import parse_config
from tiny_models import tiny_config

CPU = torch.device("cpu")
VOCAB, POSITIONS = 89, 1024
_CONFIG = parse_config(
    tiny_config(
        vocab_size=VOCAB,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=POSITIONS,
    )
)
BLOCK_BYTES = BLOCK_SIZE * 2 * 8 * 4  # tokens, keys and values, head_dim, bytes
#: Of prompt graphs. Some prompts are longer.
PROMPT_TOKENS = (64, 128)
_MODULUS = 10_007  # float32 holds it
_WEIGHTS = torch.randint(1, _MODULUS, (POSITIONS,), generator=torch.Generator().manual_seed(0))


class HashingDecoder:
    config, device, dtype = _CONFIG, CPU, torch.float32

    def hidden(self, batch: ForwardBatch, kv_cache: list[KVLayer]) -> Tensor:
        assert batch.paged is not None
        stored, slots = kv_cache[0].keys[:, 0, :, 0], batch.paged.slots
        stored[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = batch.token_ids.float()
        rows = zip(batch.paged.block_tables, batch.query_lens, batch.paged.context_lens, strict=True)
        return torch.cat([_hashes(stored, *row) for row in rows]).float().unsqueeze(1)

    def prompt_step(self, state: Any, kv_cache: list[KVLayer]) -> None:
        """As `PackedDecoder.prompt_step`."""
        stored = kv_cache[0].keys[:, 0, :, 0]
        stored[state.slots // BLOCK_SIZE, state.slots % BLOCK_SIZE] = state.token_ids.float()
        starts = state.query_start.tolist()
        for table, start, end, context_len in zip(
            state.block_tables.long(), starts, starts[1:], state.context_lens.tolist(), strict=False
        ):
            if start < end:
                state.hidden[start:end, 0] = _hashes(stored, table, end - start, context_len).float()
        state.logits.copy_(self.head(state.hidden[state.last]))

    def head(self, hidden: Tensor) -> Tensor:
        return 4 * torch.sin(hidden * torch.arange(1, VOCAB + 1) * 0.37)

    def __call__(self, batch: ForwardBatch, kv_cache: Any, rows: Tensor | None = None) -> Tensor:
        hidden = self.hidden(batch, kv_cache)
        return self.head(hidden if rows is None else hidden[rows])


def _hashes(stored: Tensor, table: Tensor, query_len: int, context_len: int) -> Tensor:
    """Of the last tokens of a sequence, each with all before it: [query_len]."""
    tokens = stored[table[: blocks_for(context_len)]].flatten()[:context_len].long()
    sums = ((tokens + 1) * _WEIGHTS[:context_len]).cumsum(0) % _MODULUS
    return sums[-query_len:]


def hash_continuation(prompt: list[int], count: int) -> list[int]:
    """The greedy tokens, from the definition."""
    decoder, ids = HashingDecoder(), list(prompt)
    for _ in range(count):
        total = (
            sum((token + 1) * int(weight) for token, weight in zip(ids, _WEIGHTS, strict=False)) % _MODULUS
        )
        ids.append(int(decoder.head(torch.tensor([[float(total)]])).argmax()))
    return ids[len(prompt) :]


def hashing_engine(num_blocks: int = 64, graph_sizes: tuple[int, ...] = (), **settings: Any) -> Engine:
    """An engine whose empty blocks are poisoned. graph_sizes: of decode graphs, if it is to have any; then it has some
    of prompts as well."""
    decoder: Any = HashingDecoder()
    engine = Engine(decoder, EngineConfig(num_blocks * BLOCK_BYTES, **settings))
    assert engine.pool.num_blocks == num_blocks
    for tensor in engine.kv_cache[0]:
        tensor.fill_(float("nan"))
    if graph_sizes:
        from thinrank.engine.decode_graphs import DecodeGraphs
        from thinrank.engine.prompt_graphs import PROMPT_SEQUENCES, PromptGraphs
        from thinrank.model.prompt_step import PromptState

        graphs = [eager_graph(engine, size) for size in graph_sizes]
        engine.graphs = engine.runner.graphs = DecodeGraphs(graphs)
        sizes = (PROMPT_SEQUENCES, blocks_for(engine.max_model_len), num_blocks, 1, 1, VOCAB)
        states = [PromptState.allocate(tokens, *sizes, torch.float32, CPU) for tokens in PROMPT_TOKENS]
        prompts = [eager_prompt_graph(decoder, engine.kv_cache, state, num_blocks) for state in states]
        engine.prompt_graphs = engine.runner.prompt_graphs = PromptGraphs(prompts)
    return engine


def eager_graph(engine: Engine, batch_size: int) -> Any:
    """A `DecodeGraph` without CUDA. Launches happen at once, copies of the history as late as they may."""
    from thinrank.engine.graph import DecodeGraph
    from thinrank.kernels.sample import RowSampling
    from thinrank.model.packed_decoder import HISTORY_SLOTS

    idle_block = engine.pool.num_blocks
    max_blocks = blocks_for(engine.max_model_len)

    class EagerGraph(DecodeGraph):
        def __init__(self) -> None:
            self.state: Any = SimpleNamespace(
                token_ids=torch.zeros(batch_size, dtype=torch.int64),
                positions=torch.zeros(batch_size, dtype=torch.int32),
                context_lens=torch.ones(batch_size, dtype=torch.int32),
                block_tables=torch.full((batch_size, max_blocks), idle_block, dtype=torch.int32),
                history=torch.zeros(HISTORY_SLOTS, batch_size, dtype=torch.int64),
                logits=torch.zeros(batch_size, VOCAB),
                sampling=RowSampling.allocate(batch_size, CPU),
            )
            self._idle_block, self._samples = idle_block, False
            self._copied: Any = None
            self._fetched: list[list[int]] | None = None
            self.loads = self.launches = 0

        def load(self, *args: Any) -> None:
            self.loads += 1
            super().load(*args)

        def forward(self) -> None:
            state, self.launches = self.state, self.launches + 1
            assert torch.equal(state.context_lens, state.positions + 1)
            positions, tables = state.positions.long(), state.block_tables.long()
            blocks = tables.gather(1, positions[:, None] // BLOCK_SIZE)[:, 0]
            paged = PagedContext(
                tuple(state.context_lens.tolist()), tables, blocks * BLOCK_SIZE + positions % BLOCK_SIZE
            )
            batch = ForwardBatch(state.token_ids, positions, (1,) * batch_size, paged)
            state.logits = engine.decoder(batch, engine.kv_cache)
            state.positions += 1
            state.context_lens += 1
            self._choose(state.logits.argmax(-1))

        def launch(self) -> Any:
            self.forward()
            state = self.state
            temperature, top_p, min_p = state.sampling.floats
            top_k, seed, stream = state.sampling.integers
            logits = ops.filter_logits(ops.apply_temperature(state.logits, temperature), top_k, top_p, min_p)
            drawn = ops.sample(logits, ops.philox_uniform(seed, stream, state.positions.long()))
            if self._samples:
                self._choose(torch.where(temperature > 0, drawn, state.token_ids))

        def fetch(self, launched: Any) -> None:
            self._copied, self._fetched = True, None

        def history(self) -> list[list[int]]:
            self._wait_for_copy(True)
            assert self._fetched is not None
            return self._fetched

        def _wait_for_copy(self, copied: Any) -> None:
            if self._fetched is None:
                self._fetched = self.state.history.tolist()

        def _choose(self, token_ids: Tensor) -> None:
            self.state.token_ids = token_ids.clone()
            slots = self.state.positions.long() % HISTORY_SLOTS
            self.state.history[slots, torch.arange(batch_size)] = token_ids

    return EagerGraph()


def eager_prompt_graph(decoder: Any, kv_cache: Any, state: Any, idle_block: int) -> Any:
    """A `PromptGraph` without CUDA: a replay is a step."""
    from thinrank.engine.prompt_graphs import PromptGraph

    class EagerPromptGraph(PromptGraph):
        def __init__(self) -> None:
            self.state, self._idle_slot = state, idle_block * BLOCK_SIZE
            self._graph: Any = SimpleNamespace(replay=self._replay)
            self.replays = 0

        def _replay(self) -> None:
            self.replays += 1
            decoder.prompt_step(state, kv_cache)

    return EagerPromptGraph()
