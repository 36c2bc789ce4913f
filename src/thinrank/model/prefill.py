"""Prefill: the layers over many tokens of several sequences, and the attention of these.

A low-rank layer of LLaMA's shape is eight to eleven GEMMs, four kernels and attention; short prompts would take as long
as the host needs to launch them, so those go through `prompt_step`. Knows nothing about decoding or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..config import ModelConfig
from ..device import upload
from ..kernels import reference as ops
from ..kernels.prefill_attention import prefill_attention
from .batch import ForwardBatch, KVLayer
from .gemm_layers import GemmLayer, add_last, run_layers

#: All but cuDNN's, which plans anew for every length of a prompt.
_SDPA_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def prefill(
    config: ModelConfig,
    layers: Sequence[GemmLayer],
    rotation: Tensor,
    hidden: Tensor,
    batch: ForwardBatch,
    kv_cache: Sequence[KVLayer] | None,
    dtype: torch.dtype,
) -> None:
    """Take the residual stream, float32 [tokens, hidden_size], through the layers, in place.

    kv_cache: one `KVLayer` a layer; needed if and only if the batch is paged. The rest as in `run_layers`.
    """
    with sdpa_kernel(_SDPA_BACKENDS):  # around all layers: entering it takes the host 20 us
        rows = _PromptRows(batch, config)
        projection, bias = run_layers(config, layers, rotation, hidden, rows, kv_cache, dtype)
    add_last(hidden, projection, bias)


class _PromptRows:
    """`Rows` of a batch's tokens, and what attention needs to know of the batch, found out once for all layers."""

    def __init__(self, batch: ForwardBatch, config: ModelConfig):
        self.batch, self.positions = batch, batch.positions
        self.slots = None if batch.paged is None else batch.paged.slots
        self.head_dim, self.scale = config.head_dim, config.head_dim**-0.5
        lens = batch.query_lens
        #: Sequences without history and of equal length run as a batch of one call of PyTorch's attention.
        self.regular = len(set(lens)) == 1 and (batch.paged is None or batch.paged.context_lens == lens)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: KVLayer | None, window: int | None) -> Tensor:
        lens, tokens = self.batch.query_lens, len(q)
        if self.regular and (window is None or window >= lens[0]):
            q, k, v = (x.view(len(lens), lens[0], -1, self.head_dim).transpose(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            return out.transpose(1, 2).reshape(tokens, -1)
        q, k, v = (x.view(tokens, -1, self.head_dim) for x in (q, k, v))
        if cache is None:
            return ops.attention(q, k, v, lens, self.scale, window).flatten(1).to(q.dtype)
        tables, query_start, context_lens = self._paged
        return prefill_attention(
            q, cache.keys, cache.values, tables, query_start, context_lens, max_query_len=max(lens),
            scale=self.scale, window=window, out=torch.empty(q.shape, dtype=q.dtype, device=q.device).flatten(1),
        )  # fmt: skip

    @cached_property
    def _paged(self) -> tuple[Tensor, Tensor, Tensor]:
        """Block tables, starts and context lengths as `prefill_attention` takes them."""
        paged = self.batch.paged
        assert paged is not None
        query_start, context_lens = (
            upload(numbers, torch.int32, paged.block_tables.device)
            for numbers in ([0, *accumulate(self.batch.query_lens)], paged.context_lens)
        )
        return paged.block_tables.int(), query_start, context_lens
