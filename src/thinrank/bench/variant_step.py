"""The decode step of one variant, at batch 1, on the engine's own weights and kernels. Imports triton.

The engine has one way to run a step; the others are here, for the ablation only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import BLOCK_SIZE
from ..engine.graph import capture
from ..engine.kv_cache import allocate_kv_cache, blocks_for
from ..kernels import reference as ops
from ..kernels.norm_project import norm_project
from ..kernels.project import project
from ..kernels.project_rope import project_rope
from ..kernels.segments import Segments
from ..model.batch import KVLayer
from ..model.packed_decoder import GemvState, PackedDecoder
from ..model.packing import PackedProjections
from .variants import Variant

#: Stands for a projection that a launch leaves out.
NOTHING = (0, 0, 0, 0, 0)


class LatentHistory(NamedTuple):
    """What k and v of one layer are made from: [tokens, rank padded to 64] each, in the weights' dtype."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, eq=False)
class FilledCache:
    """One sequence of `context_len` tokens that all variants continue, in blocks 0, 1, 2, ...

    What it holds is random. A low-rank model's has latents too, and the keys and values that these give, so that
    variants with and without dense keys and values compute the same. latents: one a layer; none of a dense model.
    room: steps that may follow before the context is full. Every run starts there, so that it reads nothing of what
    an earlier one has written.
    """

    decoder: PackedDecoder
    context_len: int
    room: int
    state: GemvState
    kv_cache: list[KVLayer]
    latents: list[LatentHistory]

    @staticmethod
    def build(decoder: PackedDecoder, context_len: int, room: int, seed: int) -> FilledCache:
        """Room for `context_len` tokens, rounded up to whole blocks, and all of it filled."""
        blocks = blocks_for(context_len)
        state = decoder.decode_state(1, blocks, idle_block=0)
        assert isinstance(state, GemvState)
        state.block_tables.copy_(torch.arange(blocks, dtype=torch.int32))
        kv_cache = allocate_kv_cache(decoder.config, blocks, decoder.dtype, decoder.device)
        generator = torch.Generator(decoder.device).manual_seed(seed)
        latents = []
        for index, (layer, cache) in enumerate(zip(decoder.layers, kv_cache, strict=True)):
            if decoder.config.ranks:
                assert min(layer.qkv.in_offsets) >= 0, "every projection is low-rank, or none"
                widths = [matrix.width for matrix in layer.qkv.outputs[1:]]
                history = LatentHistory(*(cache.keys.new_empty(blocks * BLOCK_SIZE, n) for n in widths))
                for tensor in history:
                    tensor.normal_(generator=generator)
                latents.append(history)
                rebuild(decoder, index, history, cache)
            else:
                for tensor in cache:
                    tensor.normal_(generator=generator)
        return FilledCache(decoder, context_len, room, state, kv_cache, latents)

    def rewind(self) -> None:
        """To where every run starts."""
        position = self.context_len - self.room
        self.state.token_ids.fill_(0)
        self.state.positions.fill_(position)
        self.state.context_lens.fill_(position + 1)


def rebuild(decoder: PackedDecoder, index: int, latents: LatentHistory, cache: KVLayer) -> None:
    """Keys and values of every token from its latents, with plain GEMMs, into blocks 0, 1, 2, ... of the cache.

    As a runtime does that caches latents (FlashSVD v1.5, arXiv 2605.08314, Figure 2). The number of rows is that
    of `latents`, whatever the step's position, so that a CUDA graph can hold it.
    """
    config, packed = decoder.config, decoder.layers[index].qkv
    parts = [
        F.linear(latent, matrix.view(decoder.arena))
        for latent, matrix in zip(latents, packed.outputs[1:], strict=True)
    ]
    if packed.bias is not None:
        biases = packed.bias.split([matrix.rows for matrix in packed.outputs])[1:]
        parts = [part + bias for part, bias in zip(parts, biases, strict=True)]
    keys, values = (part.float().unflatten(1, (-1, config.head_dim)) for part in parts)
    qk_norm = decoder.layers[index].qk_norm
    if qk_norm is not None:
        keys = ops.rms_norm(keys, qk_norm[1], config.rms_norm_eps)
    keys = ops.apply_rope(keys, *decoder.rotation[: len(keys)].unbind(1))
    for tokens, blocks in zip((keys, values), cache, strict=True):
        blocks.copy_(tokens.unflatten(0, (-1, BLOCK_SIZE)).transpose(1, 2))


class VariantStep:
    """A step that continues `filled`; calling it launches one.

    Tokens stay on the device. Nothing is copied between graphs either: all state lies at fixed addresses.
    """

    def __init__(self, filled: FilledCache, variant: Variant):
        """Captures what the variant captures. Raises ThinrankError when CUDA refuses."""
        config = filled.decoder.config
        self.filled, self.variant = filled, variant
        self.decoder = replace(filled.decoder, pdl=variant.pdl)
        self._inner = torch.empty(2, 1, config.intermediate_size, device=self.decoder.device)
        self._unused = torch.empty_like(filled.kv_cache[0].keys)
        filled.rewind()
        self._launches = self._prepare()

    def __call__(self) -> None:
        for launch in self._launches:
            launch()

    def _prepare(self) -> list[Callable[[], None]]:
        """The launches of a step, one after the other."""
        if self.variant.graph == "none":
            return [self._step]
        pool = torch.cuda.graph_pool_handle()

        def captured(launch: Callable[[], None]) -> Callable[[], None]:
            return capture(launch, self.decoder.device, pool).replay

        if self.variant.graph == "model":
            return [captured(self._step)]
        launches = [captured(self._embed)]
        for index in range(len(self.decoder.layers)):
            if self.variant.graph == "layer":
                launches.append(captured(partial(self._layer, index)))
            else:
                launches.append(captured(partial(self._before_attention, index)))
                launches.append(partial(self._attention, index))
                launches.append(captured(partial(self._after_attention, index)))
        return [*launches, captured(self._head)]

    # Pieces, the smallest that a graph may hold

    def _step(self) -> None:
        self._embed()
        for index in range(len(self.decoder.layers)):
            self._layer(index)
        self._head()

    def _embed(self) -> None:
        self.decoder.embed_step(self.filled.state)

    def _layer(self, index: int) -> None:
        self._before_attention(index)
        self._attention(index)
        self._after_attention(index)

    def _before_attention(self, index: int) -> None:
        if not self.variant.dense_kv:
            self._queries_and_history(index)
        elif self.variant.pack_qkv:
            self.decoder.qkv_step(self.filled.state, index, self.filled.kv_cache[index])
        else:
            self._qkv_apart(index)

    def _attention(self, index: int) -> None:
        self.decoder.attention_step(self.filled.state, index, self.filled.kv_cache[index])

    def _after_attention(self, index: int) -> None:
        self.decoder.output_step(self.filled.state, index)
        if self.variant.pack_mlp:
            self.decoder.gate_up_step(self.filled.state, index)
        else:
            self._gate_up_apart(index)
        self.decoder.down_step(self.filled.state, index)

    def _head(self) -> None:
        self.decoder.head_step(self.filled.state)

    # What the engine does not do

    def _qkv_apart(self, index: int) -> None:
        """A launch for each factor of q, k and v. RoPE and the cache write are part of the second ones."""
        cache = self.filled.kv_cache[index]
        self._first_factors(self.decoder.layers[index].qkv, packed=False)
        self._rope(index, 0, KVLayer(cache.keys[:, :0], cache.values[:, :0]))
        self._rope(index, 1, KVLayer(cache.keys, self._unused))
        self._rope(index, 2, KVLayer(self._unused, cache.values))

    def _queries_and_history(self, index: int) -> None:
        """Queries of the token; its latents join the history, and all keys and values are rebuilt from that."""
        state, packed = self.filled.state, self.decoder.layers[index].qkv
        cache, history = self.filled.kv_cache[index], self.filled.latents[index]
        self._first_factors(packed, packed=self.variant.pack_qkv)
        self._rope(index, 0, KVLayer(cache.keys[:, :0], cache.values[:, :0]))
        position = state.positions.long()
        for latents, offset in zip(history, packed.in_offsets[1:], strict=True):
            latents.index_copy_(0, position, state.latents[:, 0, offset : offset + latents.shape[1]])
        rebuild(self.decoder, index, history, cache)

    def _gate_up_apart(self, index: int) -> None:
        """A launch for each factor of gate and up, then SiLU and the product as PyTorch operations.

        They cannot be part of a launch that has only one of the two.
        """
        state, packed = self.filled.state, self.decoder.layers[index].gate_up
        self._first_factors(packed, packed=False)
        for which, out in enumerate(self._inner):
            self._project(packed, which, out)
        if packed.bias is not None:
            self._inner += packed.bias.view(2, 1, -1)
        gate, up = self._inner
        state.activated.copy_(ops.in_two_parts(ops.silu_mul(gate, up), self.decoder.dtype))

    def _first_factors(self, projections: PackedProjections, *, packed: bool) -> None:
        """To the latents, in one launch or one after the other; nothing if all are dense."""
        if projections.factor_in is None:
            return
        if packed:
            self._norm_project(projections.factor_in, self.filled.state.latents)
            return
        offsets = [offset for offset in projections.in_offsets if offset >= 0]
        for matrix, offset in zip(projections.inputs, offsets, strict=True):
            alone = Segments.of([(matrix.offset, matrix.rows, matrix.width, 0, offset)])
            self._norm_project(alone, self.filled.state.latents)

    def _rope(self, index: int, which: int, cache: KVLayer) -> None:
        """One of q, k and v (0, 1, 2) in a launch of its own.

        `project_rope` takes the number of query heads from q's segment and of kv heads from the cache. It computes
        k and v as a pair, so the one that is left out is zeros, and goes into a cache that nobody reads.
        """
        decoder, state, layer = self.decoder, self.filled.state, self.decoder.layers[index]
        matrix, in_offset = layer.qkv.outputs[which], layer.qkv.in_offsets[which]
        entries = [NOTHING] * 3
        entries[which] = (matrix.offset, matrix.rows, matrix.width, in_offset, 0)
        bias = layer.qkv.bias
        if bias is not None and which > 0:
            bias = bias[layer.qkv.outputs[0].rows :]
        project_rope(
            state.latents, state.scaled, state.squares, decoder.config.rms_norm_eps, decoder.arena,
            Segments.of(entries), bias, layer.qk_norm, decoder.rotation, state.queries, cache.keys, cache.values,
            state.positions, state.block_tables,
            config=decoder.settings(layer.rope_op, matrix.rows, matrix.width), pdl=decoder.pdl,
        )  # fmt: skip

    def _project(self, packed: PackedProjections, which: int, out: Tensor) -> None:
        """The last factor of one projection, without its bias."""
        decoder, state = self.decoder, self.filled.state
        matrix, in_offset = packed.outputs[which], packed.in_offsets[which]
        if in_offset < 0:
            self._norm_project(Segments.of([(matrix.offset, matrix.rows, matrix.width, 0, 0)]), out)
            return
        project(
            state.latents[:, :, in_offset:], decoder.arena, matrix.offset, matrix.rows, matrix.width, out, state.splits,
            config=decoder.settings("project", matrix.rows, matrix.width), pdl=decoder.pdl,
        )  # fmt: skip

    def _norm_project(self, segments: Segments, out: Tensor) -> None:
        decoder, state = self.decoder, self.filled.state
        norm_project(
            state.scaled, state.squares, decoder.config.rms_norm_eps, decoder.arena, segments, out, state.splits,
            config=decoder.settings("norm_project", sum(segments.rows), decoder.config.hidden_size),
            pdl=decoder.pdl,
        )  # fmt: skip
