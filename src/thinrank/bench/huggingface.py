"""Hugging Face transformers with a static cache: what most people run. The same factors, as plain Linears."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from .shapes import BenchModel
from .system import StaticCacheSystem


class LowRankModule(nn.Module):
    """Two `nn.Linear`, as the public compressors' own code runs a factored projection."""

    def __init__(self, factor_in: nn.Parameter, factor_out: nn.Parameter, bias: nn.Parameter | None):
        super().__init__()
        self.factor_in = linear(factor_in, None)
        self.factor_out = linear(factor_out, bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.factor_out(self.factor_in(x))
        return out


def linear(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    """An `nn.Linear` around existing tensors: weight [out, in], bias [out]."""
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    module.weight, module.bias = weight, bias  # type: ignore[assignment]
    return module


def low_rank_or_dense(config: ModelConfig, name: str, get: Parameters) -> nn.Module:
    """The projection `name` as one or two Linears."""
    bias = config.linears()[name].bias
    if name not in config.ranks:
        return linear(get(f"{name}.weight"), get(f"{name}.bias") if bias else None)
    factor_in = f"{name}.factor_in.weight"
    return LowRankModule(
        get(config.tied_factors.get(factor_in, factor_in)),
        get(f"{name}.factor_out.weight"),
        get(f"{name}.factor_out.bias") if bias else None,
    )


class Parameters:
    """The model's tensors as parameters, each drawn once, so that a shared factor is one tensor."""

    def __init__(self, model: BenchModel):
        self._model = model
        self._shared = dict.fromkeys(model.config.tied_factors.values())
        self._kept: dict[str, nn.Parameter] = {}

    def __call__(self, name: str) -> nn.Parameter:
        if name in self._kept:
            return self._kept[name]
        parameter = nn.Parameter(self._model.get(name).to(self._model.dtype), requires_grad=False)
        if name in self._shared:
            self._kept[name] = parameter
        return parameter


def build_model(model: BenchModel) -> Any:
    """`AutoModelForCausalLM` made on the meta device, with the model's tensors put in place."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {key: value for key, value in model.hf_config.items() if key != "model_type"}
    hf_config = AutoConfig.for_model(model.hf_config["model_type"], **settings)
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(hf_config, dtype=model.dtype, attn_implementation="sdpa")
    get = Parameters(model)
    for name in model.config.other_tensors():
        hf.get_submodule(name.removesuffix(".weight")).weight = get(name)
    for name in model.config.linears():
        parent, _, child = name.rpartition(".")
        setattr(hf.get_submodule(parent), child, low_rank_or_dense(model.config, name, get))
    if model.config.tie_word_embeddings:
        hf.lm_head.weight = hf.model.embed_tokens.weight
    # Its buffers were computed on the meta device, which is to say not at all.
    hf.model.rotary_emb = type(hf.model.rotary_emb)(hf_config).to(model.device)
    meta = [name for name, tensor in [*hf.named_parameters(), *hf.named_buffers()] if tensor.is_meta]
    assert not meta, f"not filled in: {meta}"
    return hf.eval()


class HuggingFaceSystem(StaticCacheSystem):
    """StaticCache; eager, or with the decode step under torch.compile in its mode for small batches."""

    def __init__(self, model: BenchModel, compiled: bool = False):
        super().__init__(model)
        self.hf = build_model(model)
        self._compiled = compiled
        self._cache: Any = None
        # transformers 5.24 renamed it.
        parameters = inspect.signature(self.hf.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    def _allocate(self, batch_size: int, length: int) -> None:
        from transformers import StaticCache

        self._cache = StaticCache(config=self.hf.config, max_cache_len=length)
        self._step = (
            torch.compile(self.hf.forward, mode="reduce-overhead", fullgraph=False)
            if self._compiled
            else self.hf.forward
        )

    def _empty(self) -> None:
        self._cache.reset()

    def _truncate(self, length: int) -> None:
        if any(layer.is_sliding for layer in self._cache.layers):
            self.prefill()  # a sliding layer has overwritten what it would need
            return
        for layer in self._cache.layers:
            layer.cumulative_length.fill_(length)

    @torch.inference_mode()
    def logits(self, token_ids: Tensor, start: int, keep: int = 1) -> Tensor:
        """Eager logits of the last `keep` of some tokens that enter the prepared cache at position `start`.

        token_ids: int64 [batch, tokens] on the model's device. Returns [batch, keep, vocab_size] in the
        model's dtype.
        """
        positions = torch.arange(start, start + token_ids.shape[1], device=token_ids.device)
        return self._logits(self.hf.forward, token_ids, positions.unsqueeze(0), keep)

    def _prefill(self, token_ids: Tensor) -> Tensor:
        return self.logits(token_ids, 0)[:, -1]

    def _decode(self, token: Tensor, position: Tensor) -> Tensor:
        if self._compiled:
            torch.compiler.cudagraph_mark_step_begin()
        return self._logits(self._step, token, position.unsqueeze(0))[:, -1].argmax(-1, keepdim=True)

    def _logits(self, forward: Any, token_ids: Tensor, positions: Tensor, keep: int = 1) -> Tensor:
        out = forward(
            input_ids=token_ids,
            position_ids=positions.expand(len(token_ids), -1),
            use_cache=True,
            logits_to_keep=keep,
            **{self._cache_argument: self._cache},
        )
        logits: Tensor = out.logits
        return logits
