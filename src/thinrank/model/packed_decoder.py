"""The decoder on a GPU: weights in one arena, a decode step of nine launches a layer, more rows as packed GEMMs.

Same inputs and outputs as `Decoder`. Everything that changes from step to step lies in a `DecodeState`, in device
memory at fixed addresses, so that one captured graph serves every step. Knows nothing about requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import ModelConfig
from ..errors import UnsupportedModelError
from ..kernels.add_rms_norm import add_rms_norm
from ..kernels.decode_attention import DecodeWorkspace, decode_attention, decode_attention_workspace
from ..kernels.embed import embed
from ..kernels.gemv import SQUARES_GROUP
from ..kernels.greedy import greedy, greedy_workspace
from ..kernels.l2_fetch import fetch_whole_lines
from ..kernels.norm_project import norm_project
from ..kernels.paged import HEAD_DIMS
from ..kernels.project import project, project_residual
from ..kernels.project_rope import project_rope
from ..kernels.project_silu_mul import project_silu_mul
from ..kernels.sample import RowSampling, SampleWorkspace, sample
from ..kernels.settings_file import settings_for
from ..kernels.tuning import MAX_SPLITS, GemvConfig, Launch, LaunchSettings
from ..kernels.workspace import SplitWorkspace
from .batch import ForwardBatch, KVLayer
from .gemm_layers import GemmLayer, add_last, run_layers
from .gemms import multiply_into
from .layers import TensorSource
from .packing import ALIGNMENT, ArenaBuilder, Matrix, PackedLayer, PackedProjections, padded
from .prefill import prefill
from .prompt_step import PromptState
from .rope import RotaryEmbedding
from .wide_step import SequenceRows

#: Batch sizes that a decode step is built for; a smaller batch is padded to the next one.
DECODE_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)

#: Up to so many rows are multiplied as vectors, more as matrices.
MAX_GEMV_ROWS = 8

#: Steps whose tokens stay readable while later steps run.
HISTORY_SLOTS = 8


@dataclass(frozen=True, eq=False)
class DecodeState:
    """What a decode step reads and advances, in device memory, for a fixed batch size.

    token_ids: int64 [batch], the last token of each row; replaced by the next one. positions: int32 [batch], where
    it stands; context_lens: int32 [batch], positions + 1. block_tables: int32 [batch, blocks]. history: int64
    [HISTORY_SLOTS, batch]: the token at position p is also in slot p % HISTORY_SLOTS, -1 there if the logits were
    undefined. logits: float32 [batch, vocab_size] of the last step. sampling: how each row chooses. Workspaces are
    scratch.
    """

    token_ids: Tensor
    positions: Tensor
    context_lens: Tensor
    block_tables: Tensor
    history: Tensor
    logits: Tensor
    attention_workspace: DecodeWorkspace
    greedy_workspace: tuple[Tensor, ...]
    sampling: RowSampling
    sample_workspace: SampleWorkspace


@dataclass(frozen=True, eq=False)
class GemvState(DecodeState):
    """Of at most `MAX_GEMV_ROWS` rows, with what one launch of a step leaves to the next."""

    hidden: Tensor
    scaled: Tensor
    squares: Tensor
    latents: Tensor
    queries: Tensor
    attended: Tensor
    activated: Tensor
    splits: SplitWorkspace


@dataclass(frozen=True, eq=False)
class PackedDecoder:
    """rotation: float32 [positions, 2, head_dim/2], cos and sin. norm: float32 [hidden_size]."""

    config: ModelConfig
    arena: Tensor
    embed_tokens: Tensor
    layers: tuple[PackedLayer, ...]
    norm: Tensor
    lm_head: PackedProjections
    rotation: Tensor
    pdl: bool
    launch_settings: LaunchSettings = field(default_factory=LaunchSettings)

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
        lm_head = builder.lm_head()
        if config.tie_word_embeddings:
            embed_tokens = lm_head.outputs[0].view(builder.arena)
        else:
            embed_tokens = get("model.embed_tokens.weight").to(device=device, dtype=dtype)
        rope = RotaryEmbedding.build(config.rope, config.head_dim, device)
        rotation = torch.stack(rope.rotation(torch.arange(max_model_len, device=device)), dim=1).contiguous()
        pdl = False
        if device.type == "cuda":
            fetch_whole_lines(device)
            pdl = torch.cuda.get_device_capability(device) >= (9, 0)
        return PackedDecoder(
            config, builder.arena, embed_tokens, tuple(layers), norm("model.norm"), lm_head, rotation, pdl,
            settings_for(device),
        )  # fmt: skip

    @property
    def device(self) -> torch.device:
        return self.arena.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, and so of the KV cache."""
        return self.arena.dtype

    # Decode

    def decode_state(self, batch_size: int, max_blocks: int, idle_block: int) -> DecodeState:
        """A state whose rows all stand at position 0 of `idle_block`. batch_size: one of `DECODE_BATCH_SIZES`."""
        assert batch_size in DECODE_BATCH_SIZES
        config, device = self.config, self.device
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        state = DecodeState(
            token_ids=torch.zeros(batch_size, dtype=torch.int64, device=device),
            positions=torch.zeros(batch_size, dtype=torch.int32, device=device),
            context_lens=torch.ones(batch_size, dtype=torch.int32, device=device),
            block_tables=torch.full((batch_size, max_blocks), idle_block, dtype=torch.int32, device=device),
            history=torch.zeros(HISTORY_SLOTS, batch_size, dtype=torch.int64, device=device),
            logits=torch.zeros(batch_size, config.vocab_size, dtype=torch.float32, device=device),
            attention_workspace=decode_attention_workspace(batch_size, heads, kv_heads, head_dim, device),
            greedy_workspace=greedy_workspace(batch_size, config.vocab_size, device),
            sampling=RowSampling.allocate(batch_size, device),
            sample_workspace=SampleWorkspace.allocate(batch_size, config.vocab_size, device),
        )
        return self._with_scratch(state) if batch_size <= MAX_GEMV_ROWS else state

    def _with_scratch(self, state: DecodeState) -> GemvState:
        config, device, batch_size = self.config, self.device, len(state.token_ids)

        def vector(width: int) -> Tensor:
            return torch.zeros(batch_size, width, dtype=torch.float32, device=device)

        def parts(width: int) -> Tensor:
            return torch.zeros(batch_size, 2, width, dtype=self.dtype, device=device)

        latent_width = max(
            packed.latent_width
            for layer in self.layers
            for packed in (layer.qkv, layer.o, layer.gate_up, layer.down, self.lm_head)
        )
        attention_width = config.num_attention_heads * config.head_dim
        return GemvState(
            **vars(state),
            hidden=vector(config.hidden_size),
            scaled=parts(config.hidden_size),
            squares=vector(config.hidden_size // SQUARES_GROUP),
            latents=parts(max(latent_width, ALIGNMENT)),
            queries=vector(attention_width),
            attended=parts(attention_width),
            activated=parts(config.intermediate_size),
            splits=SplitWorkspace.allocate(
                max(config.vocab_size, config.hidden_size, config.intermediate_size, latent_width),
                MAX_SPLITS,
                device,
            ),
        )

    def decode_step(self, state: DecodeState, kv_cache: Sequence[KVLayer]) -> None:
        """Advance every row of the state by one token, the most likely one; logits stay in the state.

        Reads and writes device memory only and launches the same kernels every time. What it allocates above
        `MAX_GEMV_ROWS` rows, a graph can hold.
        """
        assert len(kv_cache) == len(self.layers)
        if isinstance(state, GemvState):
            self.embed_step(state)
            for index, cache in enumerate(kv_cache):
                self.layer_step(state, index, cache)
            self.head_step(state)
        else:
            self._wide_step(state, kv_cache)

    def _wide_step(self, state: DecodeState, kv_cache: Sequence[KVLayer]) -> None:
        """`decode_step` of rows that are multiplied as matrices, as those of a prompt are."""
        rows = SequenceRows.of(
            state.positions, state.context_lens, state.block_tables, state.attention_workspace, self.pdl
        )
        hidden = F.embedding(state.token_ids, self.embed_tokens).float()
        projection, bias = run_layers(
            self.config, self._gemm_layers, self.rotation, hidden, rows, kv_cache, self.dtype
        )
        self._logits(hidden, projection, bias, state.logits)
        self._choose(state)

    def embed_step(self, state: GemvState) -> None:
        """Begin the residual stream with the last token of each row."""
        embed(
            state.token_ids, self.embed_tokens, self.layers[0].input_layernorm,
            state.hidden, state.scaled, state.squares, pdl=self.pdl,
        )  # fmt: skip

    def layer_step(self, state: GemvState, index: int, cache: KVLayer) -> None:
        """One decoder layer."""
        self.qkv_step(state, index, cache)
        self.attention_step(state, index, cache)
        self.output_step(state, index)
        self.gate_up_step(state, index)
        self.down_step(state, index)

    def qkv_step(self, state: GemvState, index: int, cache: KVLayer) -> None:
        """Queries of the token into the state, its key and value into the cache."""
        layer = self.layers[index]
        self._latents(state, layer.qkv)
        segments = layer.qkv.factor_out
        project_rope(
            state.latents, state.scaled, state.squares, self.config.rms_norm_eps, self.arena, segments,
            layer.qkv.bias, layer.qk_norm, self.rotation, state.queries, cache.keys, cache.values,
            state.positions, state.block_tables,
            config=self.settings(layer.rope_op, sum(segments.rows), *segments.widths), pdl=self.pdl,
        )  # fmt: skip

    def attention_step(self, state: GemvState, index: int, cache: KVLayer) -> None:
        """Attention of the queries over the cache."""
        config = self.config
        decode_attention(
            state.queries.view(len(state.queries), config.num_attention_heads, config.head_dim),
            cache.keys, cache.values, state.block_tables, state.context_lens, scale=config.head_dim**-0.5,
            window=self.layers[index].sliding_window, out=state.attended, workspace=state.attention_workspace,
            pdl=self.pdl,
        )  # fmt: skip

    def output_step(self, state: GemvState, index: int) -> None:
        """Add what attention gave to the residual stream."""
        layer = self.layers[index]
        self._add(state, layer.o, state.attended, layer.post_attention_layernorm)

    def gate_up_step(self, state: GemvState, index: int) -> None:
        """The MLP's inner vector into the state."""
        layer = self.layers[index]
        self._latents(state, layer.gate_up)
        segments = layer.gate_up.factor_out
        project_silu_mul(
            state.latents, state.scaled, state.squares, self.config.rms_norm_eps, self.arena, segments,
            layer.gate_up.bias, state.activated,
            config=self.settings("project_silu_mul", segments.rows[0], *segments.widths[:2]),
            pdl=self.pdl,
        )  # fmt: skip

    def down_step(self, state: GemvState, index: int) -> None:
        """Add what the MLP gave to the residual stream; the next norm is the next layer's or the last one."""
        last = index + 1 == len(self.layers)
        next_norm = self.norm if last else self.layers[index + 1].input_layernorm
        self._add(state, self.layers[index].down, state.activated, next_norm)

    def head_step(self, state: GemvState) -> None:
        """Logits, the most likely token, and the state advanced to it."""
        matrix = self.lm_head.outputs[0]
        if self.lm_head.inputs:
            self._latents(state, self.lm_head)
            self._project(state, state.latents, matrix, state.logits)
        else:
            norm_project(
                state.scaled, state.squares, self.config.rms_norm_eps, self.arena, self.lm_head.factor_out,
                state.logits, state.splits,
                config=self.settings("norm_project", matrix.rows, matrix.width), pdl=self.pdl,
            )  # fmt: skip
        self._choose(state)

    def _choose(self, state: DecodeState) -> None:
        greedy(
            state.logits, state.token_ids, state.positions, state.context_lens, state.history,
            state.greedy_workspace, pdl=self.pdl,
        )  # fmt: skip

    def sample_step(self, state: DecodeState) -> None:
        """After `decode_step`: replace the most likely token in the rows that sample. As `decode_step` otherwise."""
        sample(
            state.logits, state.token_ids, state.positions, state.history, state.sampling,
            state.sample_workspace, pdl=self.pdl,
        )  # fmt: skip

    def settings(self, op: str, rows: int, *widths: int) -> GemvConfig:
        """Launch settings of an op for matrices of these widths, `rows` together, whatever the batch."""
        return self.launch_settings.config(Launch.of(op, rows, *widths))

    def _latents(self, state: GemvState, packed: PackedProjections) -> None:
        """The first step of projections that read the normed residual stream; nothing if all are dense."""
        if packed.factor_in is None:
            return
        rows = sum(packed.factor_in.rows)
        norm_project(
            state.scaled, state.squares, self.config.rms_norm_eps, self.arena, packed.factor_in, state.latents,
            state.splits, config=self.settings("norm_project", rows, self.config.hidden_size), pdl=self.pdl,
        )  # fmt: skip

    def _project(self, state: GemvState, x: Tensor, matrix: Matrix, out: Tensor) -> None:
        project(
            x, self.arena, matrix.offset, matrix.rows, matrix.width, out, state.splits,
            config=self.settings("project", matrix.rows, matrix.width), pdl=self.pdl,
        )  # fmt: skip

    def _add(self, state: GemvState, packed: PackedProjections, x: Tensor, next_norm: Tensor) -> None:
        """Add one projection of x to the residual stream."""
        if packed.inputs:
            self._project(state, x, packed.inputs[0], state.latents)
            x = state.latents
        matrix = packed.outputs[0]
        project_residual(
            x, self.arena, matrix.offset, matrix.rows, matrix.width, packed.bias, state.hidden, next_norm,
            state.scaled, state.squares, state.splits,
            config=self.settings("project_residual", matrix.rows, matrix.width), pdl=self.pdl,
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
        prefill(self.config, self._gemm_layers, self.rotation, hidden, batch, kv_cache, self.dtype)
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        """The final norm and `lm_head`: float32 [rows, hidden_size] -> float32 logits [rows, vocab_size]."""
        logits = torch.empty(len(hidden), self.config.vocab_size, dtype=torch.float32, device=self.device)
        self._logits(hidden, None, None, logits)
        return logits

    def _logits(self, hidden: Tensor, projection: Tensor | None, bias: Tensor | None, logits: Tensor) -> None:
        """The head of `hidden` plus what it still lacks (`run_layers`), into `logits`."""
        normed = torch.empty(hidden.shape, dtype=self.dtype, device=self.device)
        add_rms_norm(hidden, projection, bias, self.norm, self.config.rms_norm_eps, normed)
        for matrix in self.lm_head.inputs:
            normed = torch.mm(normed, matrix.view(self.arena, padded(matrix.rows)).t())
        multiply_into(logits, normed, self.lm_head.outputs[0].view(self.arena).t())

    def prompt_state(self, tokens: int, sequences: int, max_blocks: int, idle_block: int) -> PromptState:
        """For up to so many new tokens of so many sequences of up to `max_blocks` blocks."""
        config = self.config
        return PromptState.allocate(
            tokens, sequences, max_blocks, idle_block, config.num_attention_heads * config.head_dim,
            config.hidden_size, config.vocab_size, self.dtype, self.device,
        )  # fmt: skip

    def prompt_step(self, state: PromptState, kv_cache: Sequence[KVLayer]) -> None:
        """Prefill of what the state holds; the residual stream and logits stay there. Reads and writes device memory
        only and launches the same kernels every time; a graph can hold what it allocates."""
        state.hidden.copy_(F.embedding(state.token_ids, self.embed_tokens))
        projection, bias = run_layers(
            self.config, self._gemm_layers, self.rotation, state.hidden, state, kv_cache, self.dtype
        )
        add_last(state.hidden, projection, bias)
        self._logits(state.hidden[state.last], None, None, state.logits)

    @cached_property
    def _gemm_layers(self) -> tuple[GemmLayer, ...]:
        return tuple(GemmLayer.of(layer, self.arena) for layer in self.layers)


def _check_sizes(config: ModelConfig) -> None:
    """The kernels read rows in whole groups of 64; ranks are padded to that, the model's own sizes are not. And they
    are written for some sizes of heads.

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
    if config.head_dim not in HEAD_DIMS:
        raise UnsupportedModelError(
            f"head_dim is {config.head_dim}, none of {', '.join(map(str, HEAD_DIMS))}",
            "such models run with device='cpu' only",
        )
