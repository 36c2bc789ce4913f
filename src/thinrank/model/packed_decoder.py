"""The decoder on a GPU: weights in one arena, a decode step of nine launches a layer, prefill as packed GEMMs.

Same inputs and outputs as `Decoder`. Everything that changes from step to step lies in a `DecodeState`, in device
memory at fixed addresses, so that one captured graph serves every step. Knows nothing about requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import ModelConfig
from ..errors import UnsupportedModelError
from ..kernels import reference as ops
from ..kernels.decode_attention import DecodeWorkspace, decode_attention, decode_attention_workspace
from ..kernels.embed import embed
from ..kernels.gemv import SQUARES_GROUP
from ..kernels.greedy import greedy, greedy_workspace
from ..kernels.norm_project import norm_project
from ..kernels.prefill_attention import prefill_attention
from ..kernels.project import project, project_residual
from ..kernels.project_rope import project_rope
from ..kernels.project_silu_mul import project_silu_mul
from ..kernels.segments import Segments
from ..kernels.tuning import GemvConfig, gemv_config
from ..kernels.workspace import SplitWorkspace
from .batch import ForwardBatch, KVLayer
from .layers import TensorSource
from .packing import ALIGNMENT, ArenaBuilder, Matrix, PackedLayer, PackedProjections, padded
from .rope import RotaryEmbedding

#: Batch sizes that a decode step is built for; a smaller batch is padded to the next one.
DECODE_BATCH_SIZES = (1, 2, 4, 8)

#: Steps whose tokens stay readable while later steps run.
HISTORY_SLOTS = 8


@dataclass(frozen=True, eq=False)
class DecodeState:
    """What a decode step reads and advances, in device memory, for a fixed batch size.

    token_ids: int64 [batch], the last token of each row; replaced by the next one. positions: int32 [batch], where
    it stands; context_lens: int32 [batch], positions + 1. block_tables: int32 [batch, blocks]. history: int64
    [HISTORY_SLOTS, batch]: the token at position p is also in slot p % HISTORY_SLOTS. logits: float32 [batch,
    vocab_size] of the last step. The rest is scratch.
    """

    token_ids: Tensor
    positions: Tensor
    context_lens: Tensor
    block_tables: Tensor
    history: Tensor
    logits: Tensor
    hidden: Tensor
    scaled: Tensor
    squares: Tensor
    latents: Tensor
    queries: Tensor
    attended: Tensor
    activated: Tensor
    splits: SplitWorkspace
    attention_workspace: DecodeWorkspace
    greedy_workspace: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class PackedDecoder:
    """rotation: float32 [positions, 2, head_dim/2], cos and sin. norm: float32 [hidden_size]."""

    config: ModelConfig
    arena: Tensor
    embed_tokens: Tensor
    layers: tuple[PackedLayer, ...]
    norm: Tensor
    lm_head: Matrix
    rotation: Tensor
    pdl: bool
    batch_invariant: bool = False

    @staticmethod
    def build(
        config: ModelConfig, get: TensorSource, dtype: torch.dtype, device: torch.device, max_model_len: int
    ) -> PackedDecoder:
        """Assemble the model; `get` is asked once for every stored tensor. All weights are cast to `dtype`."""
        _check_sizes(config)
        builder = ArenaBuilder(config, get, dtype, device)

        def norm(name: str) -> Tensor:
            return get(f"{name}.weight").to(device=device, dtype=torch.float32)

        layers = []
        for index, window in enumerate(config.sliding_windows):
            prefix = f"model.layers.{index}"

            def modules(*names: str, prefix: str = prefix) -> list[str]:
                return [f"{prefix}.{name}" for name in names]

            qk_norm = None
            if config.qk_norm:
                names = modules("self_attn.q_norm.weight", "self_attn.k_norm.weight")
                qk_norm = torch.stack([get(name).float().to(device) for name in names])
            layers.append(
                PackedLayer(
                    qkv=builder.projections(
                        modules("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
                    ),
                    o=builder.projections(modules("self_attn.o_proj")),
                    gate_up=builder.projections(modules("mlp.gate_proj", "mlp.up_proj")),
                    down=builder.projections(modules("mlp.down_proj")),
                    input_layernorm=norm(f"{prefix}.input_layernorm"),
                    post_attention_layernorm=norm(f"{prefix}.post_attention_layernorm"),
                    qk_norm=qk_norm,
                    sliding_window=window,
                )
            )
        shape = (config.vocab_size, config.hidden_size)
        if config.tie_word_embeddings:
            lm_head = builder.dense("model.embed_tokens.weight", *shape)
            embed_tokens = lm_head.view(builder.arena)
        else:
            lm_head = builder.projections(["lm_head"]).outputs[0]
            embed_tokens = get("model.embed_tokens.weight").to(device=device, dtype=dtype)
        rope = RotaryEmbedding.build(config.rope, config.head_dim, device)
        rotation = torch.stack(rope.rotation(torch.arange(max_model_len, device=device)), dim=1).contiguous()
        pdl = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        return PackedDecoder(
            config, builder.arena, embed_tokens, tuple(layers), norm("model.norm"), lm_head, rotation, pdl
        )

    @property
    def device(self) -> torch.device:
        return self.arena.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, and so of the KV cache."""
        return self.arena.dtype

    # Decode

    def decode_state(self, batch_size: int, max_blocks: int, idle_block: int) -> DecodeState:
        """A state whose rows all stand at position 0 of `idle_block`. batch_size: 1, 2, 4 or 8."""
        assert batch_size in DECODE_BATCH_SIZES
        config, device = self.config, self.device
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim

        def vector(width: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.zeros(batch_size, width, dtype=dtype, device=device)

        latent_width = max(
            packed.latent_width
            for layer in self.layers
            for packed in (layer.qkv, layer.o, layer.gate_up, layer.down)
        )
        return DecodeState(
            token_ids=torch.zeros(batch_size, dtype=torch.int64, device=device),
            positions=torch.zeros(batch_size, dtype=torch.int32, device=device),
            context_lens=torch.ones(batch_size, dtype=torch.int32, device=device),
            block_tables=torch.full((batch_size, max_blocks), idle_block, dtype=torch.int32, device=device),
            history=torch.zeros(HISTORY_SLOTS, batch_size, dtype=torch.int64, device=device),
            logits=vector(config.vocab_size, torch.float32),
            hidden=vector(config.hidden_size, torch.float32),
            scaled=vector(config.hidden_size),
            squares=vector(config.hidden_size // SQUARES_GROUP, torch.float32),
            latents=vector(max(latent_width, 1)),
            queries=vector(heads * head_dim),
            attended=vector(heads * head_dim),
            activated=vector(config.intermediate_size),
            splits=SplitWorkspace.allocate(config.vocab_size, 8, device),
            attention_workspace=decode_attention_workspace(batch_size, heads, kv_heads, head_dim, device),
            greedy_workspace=greedy_workspace(batch_size, config.vocab_size, device),
        )

    def decode_step(self, state: DecodeState, kv_cache: Sequence[KVLayer]) -> None:
        """Advance every row of the state by one token, the most likely one; logits stay in the state.

        Reads and writes device memory only, allocates nothing, and launches the same kernels every time.
        """
        config, pdl = self.config, self.pdl
        eps, arena = config.rms_norm_eps, self.arena
        embed(
            state.token_ids, self.embed_tokens, self.layers[0].input_layernorm,
            state.hidden, state.scaled, state.squares, pdl=pdl,
        )  # fmt: skip
        next_norms = [layer.input_layernorm for layer in self.layers[1:]] + [self.norm]
        for layer, cache, next_norm in zip(self.layers, kv_cache, next_norms, strict=True):
            self._latents(state, layer.qkv)
            segments = layer.qkv.factor_out
            project_rope(
                state.latents, state.scaled, state.squares, eps, arena, segments, layer.qkv.bias, layer.qk_norm,
                self.rotation, state.queries, cache.keys, cache.values, state.positions, state.block_tables,
                config=self._settings(
                    state, "project_rope" if layer.qk_norm is None else "project_head_rope",
                    sum(segments.rows), max(segments.widths),
                ), pdl=pdl,
            )  # fmt: skip
            decode_attention(
                state.queries.view(len(state.queries), config.num_attention_heads, config.head_dim),
                cache.keys, cache.values, state.block_tables, state.context_lens, scale=config.head_dim**-0.5,
                window=layer.sliding_window, out=state.attended, workspace=state.attention_workspace, pdl=pdl,
            )  # fmt: skip
            self._add(state, layer.o, state.attended, layer.post_attention_layernorm)
            self._latents(state, layer.gate_up)
            segments = layer.gate_up.factor_out
            project_silu_mul(
                state.latents, state.scaled, state.squares, eps, arena, segments, layer.gate_up.bias,
                state.activated,
                config=self._settings(state, "project_silu_mul", segments.rows[0], max(segments.widths)), pdl=pdl,
            )  # fmt: skip
            self._add(state, layer.down, state.activated, next_norm)
        head = Segments.of([(self.lm_head.offset, self.lm_head.rows, self.lm_head.width, 0, 0)])
        norm_project(
            state.scaled, state.squares, eps, arena, head, state.logits, state.splits,
            config=self._settings(state, "norm_project", self.lm_head.rows, self.lm_head.width), pdl=pdl,
        )  # fmt: skip
        greedy(
            state.logits, state.token_ids, state.positions, state.context_lens, state.history,
            state.greedy_workspace, pdl=pdl,
        )  # fmt: skip

    def _settings(self, state: DecodeState, op: str, rows: int, width: int) -> GemvConfig:
        """Launch settings of an op; batch 1 has its own way to multiply unless results must not depend on it."""
        return gemv_config(op, rows, width, vector=len(state.token_ids) == 1 and not self.batch_invariant)

    def _latents(self, state: DecodeState, packed: PackedProjections) -> None:
        """The first step of projections that read the normed residual stream; nothing if all are dense."""
        if packed.factor_in is None:
            return
        rows = sum(packed.factor_in.rows)
        norm_project(
            state.scaled, state.squares, self.config.rms_norm_eps, self.arena, packed.factor_in, state.latents,
            state.splits, config=self._settings(state, "norm_project", rows, self.config.hidden_size), pdl=self.pdl,
        )  # fmt: skip

    def _add(self, state: DecodeState, packed: PackedProjections, x: Tensor, next_norm: Tensor) -> None:
        """Add one projection of x to the residual stream."""
        if packed.inputs:
            matrix = packed.inputs[0]
            project(
                x, self.arena, matrix.offset, matrix.rows, matrix.width, state.latents, state.splits,
                config=self._settings(state, "project", matrix.rows, matrix.width), pdl=self.pdl,
            )  # fmt: skip
            x = state.latents
        matrix = packed.outputs[0]
        project_residual(
            x, self.arena, matrix.offset, matrix.rows, matrix.width, packed.bias, state.hidden, next_norm,
            state.scaled, state.squares, state.splits,
            config=self._settings(state, "project_residual", matrix.rows, matrix.width), pdl=self.pdl,
        )  # fmt: skip

    # Prefill

    def __call__(
        self,
        batch: ForwardBatch,
        kv_cache: Sequence[KVLayer] | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """float32 logits [rows, vocab_size]; as `Decoder.__call__`."""
        hidden = self.hidden(batch, kv_cache)
        return self.head(hidden if rows is None else hidden[rows])

    def hidden(self, batch: ForwardBatch, kv_cache: Sequence[KVLayer] | None = None) -> Tensor:
        """The residual stream after the last layer: float32 [tokens, hidden_size]."""
        hidden = F.embedding(batch.token_ids, self.embed_tokens).float()
        cos, sin = self.rotation[batch.positions].unbind(1)
        for index, layer in enumerate(self.layers):
            cache = None if kv_cache is None else kv_cache[index]
            hidden += self._attention(hidden, layer, batch, cache, (cos, sin))
            gate, up = self._project(self._normed(hidden, layer.post_attention_layernorm), layer.gate_up)
            hidden += self._project(ops.silu_mul(gate, up), layer.down)[0]
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        """The final norm and `lm_head`: float32 [rows, hidden_size] -> float32 logits [rows, vocab_size]."""
        return F.linear(self._normed(hidden, self.norm), self.lm_head.view(self.arena)).float()

    def _normed(self, hidden: Tensor, norm: Tensor) -> Tensor:
        return ops.rms_norm(hidden, norm, self.config.rms_norm_eps).to(self.dtype)

    def _project(self, x: Tensor, packed: PackedProjections) -> list[Tensor]:
        """All projections of x [tokens, in], each [tokens, rows] in the weights' dtype."""
        if packed.inputs:
            latents = self._first_step(x, packed.inputs)
            sources = [
                latents[:, start : start + matrix.width] if start >= 0 else x
                for start, matrix in zip(packed.in_offsets, packed.outputs, strict=True)
            ]
        else:
            sources = [x] * len(packed.outputs)
        outputs = [
            F.linear(source, matrix.view(self.arena))
            for source, matrix in zip(sources, packed.outputs, strict=True)
        ]
        if packed.bias is not None:
            biases = packed.bias.split([matrix.rows for matrix in packed.outputs])
            outputs = [output + bias.to(output.dtype) for output, bias in zip(outputs, biases, strict=True)]
        return outputs

    def _first_step(self, x: Tensor, inputs: tuple[Matrix, ...]) -> Tensor:
        """Latents [tokens, sum of padded ranks]; one GEMM where the matrices lie one after the other."""
        counts = [padded(matrix.rows) for matrix in inputs]
        adjacent = all(
            before.offset + count * before.width == after.offset
            for before, count, after in zip(inputs, counts, inputs[1:], strict=False)
        )
        if adjacent:
            return F.linear(x, inputs[0].view(self.arena, sum(counts)))
        parts = [F.linear(x, m.view(self.arena, count)) for m, count in zip(inputs, counts, strict=True)]
        return torch.cat(parts, dim=1)

    def _attention(
        self,
        hidden: Tensor,
        layer: PackedLayer,
        batch: ForwardBatch,
        cache: KVLayer | None,
        rotation: tuple[Tensor, Tensor],
    ) -> Tensor:
        config = self.config
        heads = [
            part.unflatten(-1, (-1, config.head_dim))
            for part in self._project(self._normed(hidden, layer.input_layernorm), layer.qkv)
        ]
        q, k, v = (head.float() for head in heads)
        if layer.qk_norm is not None:
            q, k = (
                ops.rms_norm(x, w, config.rms_norm_eps) for x, w in zip((q, k), layer.qk_norm, strict=True)
            )
        q, k = ops.apply_rope(q, *rotation).to(self.dtype), ops.apply_rope(k, *rotation).to(self.dtype)
        scale, window = config.head_dim**-0.5, layer.sliding_window
        if cache is not None and batch.paged is not None:
            ops.write_kv(k, v, cache.keys, cache.values, batch.paged.slots)
        if batch.paged is None or batch.paged.context_lens == batch.query_lens:
            out = ops.attention(q, k, heads[2], batch.query_lens, scale, window)
        else:
            assert cache is not None, "a paged batch needs the cache that its slots refer to"
            starts = torch.tensor([0, *batch.query_lens], device=q.device).cumsum(0).int()
            out = prefill_attention(
                q, cache.keys, cache.values, batch.paged.block_tables.int(), starts,
                torch.tensor(batch.paged.context_lens, dtype=torch.int32, device=q.device),
                max_query_len=max(batch.query_lens), scale=scale, window=window, out=torch.empty_like(q.flatten(1)),
            )  # fmt: skip
        return self._project(out.reshape(len(q), -1).to(self.dtype), layer.o)[0]


def _check_sizes(config: ModelConfig) -> None:
    """The kernels read rows in whole groups of 64; ranks are padded to that, the model's own sizes are not.

    Raises UnsupportedModelError.
    """
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads * head_dim": config.num_attention_heads * config.head_dim,
    }
    for name, size in sizes.items():
        if size % ALIGNMENT:
            raise UnsupportedModelError(
                f"{name} is {size}, no multiple of {ALIGNMENT}", "such models run with device='cpu' only"
            )
