"""Frozen configurations, validated when built and passed down: the model, the engine, one request.

`ModelConfig` is built from a Hugging Face `config.json` by `model.registry.parse_config`; this module
knows nothing about files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from .errors import OptionError

#: Tokens a KV-cache block holds.
BLOCK_SIZE = 64


class LinearShape(NamedTuple):
    """Shape of one projection: weight [out_features, in_features], and whether it has a bias."""

    out_features: int
    in_features: int
    bias: bool


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; field names are those of Hugging Face's `rope_scaling`."""

    rope_theta: float = 10000.0
    rope_type: str = "default"  # default | linear | llama3 | yarn
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions


@dataclass(frozen=True)
class ModelConfig:
    """What the decoder needs to know; names verbatim from Hugging Face where they exist there."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    #: Per layer: how many tokens, itself included, a token attends to; None: all.
    sliding_windows: tuple[int | None, ...]
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    #: Module name -> rank; a module that is not listed is dense.
    ranks: Mapping[str, int] = field(default_factory=dict)
    #: Tensor name -> the tensor that holds it.
    tied_factors: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", MappingProxyType(dict(self.ranks)))
        object.__setattr__(self, "tied_factors", MappingProxyType(dict(self.tied_factors)))

    def linears(self) -> dict[str, LinearShape]:
        """Every projection of the model by module name, in the order of execution.

        `lm_head` is listed unless it is tied to the embedding.
        """
        hidden, mlp = self.hidden_size, self.intermediate_size
        q_size, kv_size = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        shapes = {
            "self_attn.q_proj": LinearShape(q_size, hidden, self.qkv_bias),
            "self_attn.k_proj": LinearShape(kv_size, hidden, self.qkv_bias),
            "self_attn.v_proj": LinearShape(kv_size, hidden, self.qkv_bias),
            "self_attn.o_proj": LinearShape(hidden, q_size, self.o_bias),
            "mlp.gate_proj": LinearShape(mlp, hidden, self.mlp_bias),
            "mlp.up_proj": LinearShape(mlp, hidden, self.mlp_bias),
            "mlp.down_proj": LinearShape(hidden, mlp, self.mlp_bias),
        }
        linears = {
            f"model.layers.{layer}.{name}": shape
            for layer in range(self.num_hidden_layers)
            for name, shape in shapes.items()
        }
        if not self.tie_word_embeddings:
            linears["lm_head"] = LinearShape(self.vocab_size, hidden, False)
        return linears

    def other_tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that belong to no projection: embedding and norms."""
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_hidden_layers):
            prefix = f"model.layers.{layer}"
            shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
            if self.qk_norm:
                shapes[f"{prefix}.self_attn.q_norm.weight"] = (self.head_dim,)
                shapes[f"{prefix}.self_attn.k_norm.weight"] = (self.head_dim,)
            shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        shapes["model.norm.weight"] = (hidden,)
        return shapes


@dataclass(frozen=True)
class EngineConfig:
    """Limits of one engine.

    kv_cache_memory: bytes for keys and values, of which no more are taken than `max_num_seqs` sequences of
    `max_model_len` tokens need; None: on a GPU what gpu_memory_utilization leaves, on a CPU 4 GiB, of which only what
    is used counts.
    gpu_memory_utilization: share of a GPU's memory that is in use when the cache is allocated, other programs'
    included. Leave some for the work on prompts.
    max_model_len: prompt and output together; None: what the model was trained for.
    max_num_seqs: sequences that run, so hold blocks, at a time.
    max_num_batched_tokens: prompt tokens that a step processes when no sequence decodes.
    max_num_prefill_tokens_while_decoding: prompt tokens that a step processes beside sequences that decode, each of
    which waits for them: the bound on the gap between two tokens of a stream.
    enable_prefix_caching: keep the blocks of prompts and outputs, and share them between requests that begin alike.
    batch_invariant: decode so that a greedy token does not depend on how many sequences decode beside it: at most 8
    rows at a time on a GPU, one on a CPU.
    """

    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_num_prefill_tokens_while_decoding: int = 512
    enable_prefix_caching: bool = True
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        for name in (
            "kv_cache_memory",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_num_prefill_tokens_while_decoding",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name} is {value}", "it must be at least 1")
        share = self.gpu_memory_utilization
        if not 0 < share <= 1:
            raise OptionError(f"gpu_memory_utilization is {share}", "it must be above 0, and at most 1")


@dataclass(frozen=True)
class SamplingParams:
    """How to continue one prompt. Names and defaults are vLLM's.

    temperature: 0 takes the most likely token. top_k: 0 or -1 for all. seed: equal seeds give equal
    samples; None draws a fresh one. stop: strings that end the text (not returned unless
    `include_stop_str_in_output`). stop_token_ids: further ids that end it, beside the model's own EOS
    ids, which `ignore_eos` switches off. Repetition penalty counts the prompt and the output, presence
    and frequency penalties the output only. logit_bias: token id -> what is added to its logit, -100 to 100.
    min_tokens: no EOS, stop token or stop string before. logprobs: how many alternatives to report per token;
    prompt_logprobs: the same for every token of the prompt but the first.

    Raises OptionError for a value out of range.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | tuple[str, ...] | list[str] | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        _require("n", self.n, self.n >= 1, "at least 1")
        _require("presence_penalty", self.presence_penalty, -2 <= self.presence_penalty <= 2, "-2 to 2")
        _require("frequency_penalty", self.frequency_penalty, -2 <= self.frequency_penalty <= 2, "-2 to 2")
        _require(
            "repetition_penalty", self.repetition_penalty, 0.01 <= self.repetition_penalty <= 2, "0.01 to 2"
        )
        _require("temperature", self.temperature, 0 <= self.temperature < float("inf"), "0 or more")
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "above 0, to 1")
        _require("top_k", self.top_k, self.top_k >= -1, "-1 or more")
        _require("min_p", self.min_p, 0 <= self.min_p <= 1, "0 to 1")
        _require("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1")
        _require("min_tokens", self.min_tokens, 0 <= self.min_tokens <= self.max_tokens, "0 to max_tokens")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            _require(name, count, count is None or 0 <= count <= 20, "0 to 20")
        for token_id, bias in (self.logit_bias or {}).items():
            _require(f"logit_bias of token {token_id}", bias, -100 <= bias <= 100, "-100 to 100")
        if self.seed is not None:
            _require("seed", self.seed, -(2**63) <= self.seed < 2**64, "a 64-bit integer")
        if any(not text for text in stop):
            raise OptionError("stop contains an empty string", "leave it out or name a text")


def _require(name: str, value: Any, valid: bool, accepted: str) -> None:
    if not valid:
        raise OptionError(f"{name} is {value}", f"it must be {accepted}")
