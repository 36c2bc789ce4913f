"""Adapter for GGUF files of the llama architecture (Llama, Mistral, SmolLM and their like).

Reads the header, translates names, undoes the row order that llama.cpp gives to `attn_q` and `attn_k`,
and promises each tensor dequantised. The header is parsed here rather than with `gguf.GGUFReader`, which
loops for ever on a damaged array length; the `gguf` package only unpacks quantised blocks, so a file
without any can be read without it. Knows nothing about vocabularies (`gguf_tokenizer`), other
architectures, split files or big-endian files.

Layout and keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, overload

import numpy as np
import torch

from ...errors import CheckpointError, ThinrankError, UnsupportedModelError
from ...model.registry import parse_config
from ..format import expected_tensors
from ..tensors import LazyTensor
from .gguf_tokenizer import special_token_ids, tokenizer_files

FAMILY = "gguf"

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)

# Bounds far above any real header (a vocabulary of 256k tokens takes about 15 MB), so that a damaged
# length is an error rather than an allocation.
_MOST_HEADER_BYTES = 2**28
_MOST_ITEMS = 2**22
_MOST_NAME_CHARACTERS = 1024

_STRING, _ARRAY = 8, 9
_NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}

_PLAIN_TYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}

_TOP_LEVEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FREQ_FACTORS = "rope_freqs.weight"

#: `llama.*` keys that are read, or that say nothing about the mathematics.
_KNOWN_KEYS = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.finetuned",
    "tensor_data_layout",
}
#: `llama.*` keys that change the mathematics, with the values that do not. Any other key is refused.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "use_parallel_residual": (False,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scaling.yarn_attn_factor": (1.0, -1.0),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}

T = TypeVar("T")


class Metadata(dict[str, Any]):
    """The key-value pairs of a header: int, float, bool, str, list[str] or a NumPy array of numbers."""

    @overload
    def typed(self, key: str, kind: type[T]) -> T | None: ...
    @overload
    def typed(self, key: str, kind: type[T], default: T) -> T: ...
    def typed(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        """The value of `key`, or the default when it is absent.

        Raises CheckpointError when it is there with another type.
        """
        value = self.get(key)
        if value is None:
            return default
        if type(value) is not kind:
            raise CheckpointError(
                f"the GGUF key {key} holds a {type(value).__name__}, not a {kind.__name__}",
                "the file is damaged; download it again",
            )
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A positive number; a list that repeats one number for each layer counts as that number.

        Raises CheckpointError when it is missing or no sensible number, UnsupportedModelError when the
        layers differ.
        """
        value = self.get(key)
        if isinstance(value, np.ndarray):
            distinct = set(value.tolist())
            if len(distinct) > 1:
                raise UnsupportedModelError(
                    f"the GGUF key {key} differs from layer to layer", "this is not implemented"
                )
            value = distinct.pop() if distinct else None
        if value is None:
            value = default
        if type(value) is not int or not 1 <= value <= 2**28:
            raise CheckpointError(
                f"the GGUF key {key} is {value!r}, not a positive number", "the file is damaged or incomplete"
            )
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0. Raises CheckpointError when it is missing or anything else."""
        value = self.typed(key, float)
        if value is None:
            value = default
        if value is None or not 0 < value < math.inf:
            raise CheckpointError(
                f"the GGUF key {key} is {value!r}, not a number above 0", "the file is damaged or incomplete"
            )
        return value


class _Entry(NamedTuple):
    """One line of the tensor list: shape as PyTorch has it, type number, offset into the data."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


class _Header(NamedTuple):
    metadata: Metadata
    entries: list[_Entry]
    data_start: int
    file_size: int


@dataclass(frozen=True)
class _Encoding:
    """How one tensor type is stored: blocks of `block_size` numbers in `block_bytes` bytes."""

    name: str
    block_size: int
    block_bytes: int
    dtype: torch.dtype
    #: (bytes, number of rows) -> the numbers, in order, of `dtype`.
    decode: Callable[[bytearray, int], torch.Tensor]


@dataclass(frozen=True, eq=False)
class GGUFModel:
    """A GGUF file in Hugging Face's terms.

    config: content of a config.json. tensors: every tensor of the model under its Hugging Face name, in
    the model's order. tokenizer_files: file name -> content; always generation_config.json, and
    tokenizer.json and tokenizer_config.json if the file has a vocabulary. dropped: one line for each
    thing that is left out or guessed. base_model: the repository that the file says it was made from.
    """

    config: dict[str, Any]
    tensors: dict[str, LazyTensor]
    tokenizer_files: dict[str, bytes]
    dropped: list[str] = field(default_factory=list)
    base_model: str | None = None


def is_gguf(path: Path) -> bool:
    """Whether the file starts as a GGUF file does. False for folders and unreadable files."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def read(path: Path) -> GGUFModel:
    """Describe a GGUF file; tensors are read and dequantised one by one, when asked for.

    F16 and BF16 tensors keep their type. F32 and every quantised type become float32: rounding a
    dequantised value to 16 bits moves the logits.

    Raises CheckpointError for a damaged file, UnsupportedModelError for an architecture, setting, tensor
    or tokenizer that is not implemented, ThinrankError when the file is quantised and `gguf` is missing.
    """
    header = _read_header(path)
    metadata = header.metadata
    _refuse_unsupported(metadata)
    entries = {entry.name: entry for entry in header.entries}
    if len(entries) != len(header.entries):
        raise CheckpointError(f"{path.name} lists a tensor twice", "the file is damaged; download it again")

    encodings: dict[int, _Encoding] = {}
    stored: dict[str, LazyTensor] = {}
    for name, entry in entries.items():
        if entry.type_id not in encodings:
            encodings[entry.type_id] = _encoding(entry)
        stored[name] = _lazy_tensor(path, header, entry, encodings[entry.type_id])

    config = _config(metadata, stored)
    return GGUFModel(
        config=config,
        tensors=_translate(config, stored),
        tokenizer_files=tokenizer_files(metadata, config["vocab_size"]),
        dropped=list(_left_out(metadata)),
        base_model=_origin(metadata),
    )


# --- header ------------------------------------------------------------------------------------------


class _FieldReader:
    """Takes the fields of a header one after the other, and never more than the file has."""

    def __init__(self, file: BinaryIO, file_size: int, name: str):
        self.position = 0
        self._file = file
        self._limit = min(file_size, _MOST_HEADER_BYTES)
        self._name = name

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._name}: {what}", "the file is damaged or incomplete; download it again"
        )

    def take(self, length: int) -> bytes:
        if length > self._limit - self.position:
            raise self.damaged("the header runs past the end of the file")
        data = self._file.read(length)
        if len(data) != length:
            raise self.damaged("the file ends inside its header")
        self.position += length
        return data

    def integer(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def items(self, what: str) -> int:
        """A 64-bit number of things that follow."""
        count = self.integer(8)
        if count > _MOST_ITEMS:
            raise self.damaged(f"the header announces {count} {what}")
        return count

    def text(self) -> str:
        try:
            return self.take(self.integer(8)).decode()
        except UnicodeDecodeError:
            raise self.damaged("a string in the header is not UTF-8") from None

    def name(self) -> str:
        """A string that error messages may show."""
        name = self.text()
        if len(name) > _MOST_NAME_CHARACTERS or not name.isprintable():
            raise self.damaged("the header holds a name that is none")
        return name

    def value(self) -> Any:
        """A type number and a value of that type; see `Metadata` for the Python types."""
        kind = self.integer(4)
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            kind = self.integer(4)
            count = self.items("array elements")
            if kind == _STRING:
                return [self.text() for _ in range(count)]
            dtype = self._number_type(kind)
            return np.frombuffer(self.take(count * dtype.itemsize), dtype)
        dtype = self._number_type(kind)
        number = np.frombuffer(self.take(dtype.itemsize), dtype)[0]
        # The shortest decimal that names the same float32: 1e-05, not 9.999999747378752e-06.
        return float(str(number)) if kind == 6 else number.item()

    def _number_type(self, kind: int) -> np.dtype[Any]:
        if kind not in _NUMBERS:
            raise self.damaged(f"the header holds a value of unknown type {kind}")
        return _NUMBERS[kind]


def _read_header(path: Path) -> _Header:
    try:
        file_size = path.stat().st_size
        with path.open("rb") as file:
            return _parse_header(_FieldReader(file, file_size, path.name), file_size)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read", error.strerror or "check the path") from error


def _parse_header(reader: _FieldReader, file_size: int) -> _Header:
    if reader.take(len(_MAGIC)) != _MAGIC:
        raise reader.damaged("the file does not start as a GGUF file does")
    version = reader.integer(4)
    if version not in _VERSIONS:
        # A big-endian file shows its version in the upper bytes.
        what = "is big-endian" if version and version & 0xFFFF == 0 else f"has GGUF version {version}"
        raise UnsupportedModelError(
            f"the file {what}", "little-endian files of versions 2 and 3 are read; convert the model anew"
        )
    tensor_count, key_count = reader.items("tensors"), reader.items("keys")
    metadata = Metadata()
    for _ in range(key_count):
        key = reader.name()
        if key in metadata:
            raise reader.damaged(f"the key {key} appears twice")
        metadata[key] = reader.value()

    entries = []
    for _ in range(tensor_count):
        name = reader.name()
        dimensions = reader.integer(4)
        if not 1 <= dimensions <= 4:
            raise reader.damaged(f"the tensor {name} has {dimensions} dimensions")
        # GGUF lists the fastest-running dimension first, PyTorch last.
        shape = tuple(reader.integer(8) for _ in range(dimensions))[::-1]
        entries.append(_Entry(name, shape, reader.integer(4), reader.integer(8)))

    alignment = metadata.typed("general.alignment", int, 32)
    if not 1 <= alignment <= 2**20:
        raise reader.damaged(f"general.alignment is {alignment}")
    data_start = -(-reader.position // alignment) * alignment
    return _Header(metadata, entries, data_start, file_size)


# --- tensors -----------------------------------------------------------------------------------------


def _encoding(entry: _Entry) -> _Encoding:
    """How the tensor is stored.

    Raises ThinrankError when `gguf` is needed and missing, UnsupportedModelError for a type it cannot
    unpack.
    """
    if entry.type_id in _PLAIN_TYPES:
        dtype = _PLAIN_TYPES[entry.type_id]
        return _Encoding(
            str(dtype), 1, dtype.itemsize, dtype, lambda data, _rows: torch.frombuffer(data, dtype=dtype)
        )
    try:
        import gguf
        from gguf.quants import dequantize
    except ImportError as error:
        raise ThinrankError(
            f"the tensor {entry.name} is quantised and the gguf package is missing",
            "pip install 'thinrank[gguf]'",
        ) from error

    def decode(data: bytearray, rows: int) -> torch.Tensor:
        packed = np.frombuffer(data, np.uint8).reshape(rows, -1)
        with np.errstate(all="ignore"):  # damaged scales may be infinite
            return torch.from_numpy(np.ascontiguousarray(dequantize(packed, kind), dtype=np.float32))

    try:
        kind = gguf.GGMLQuantizationType(entry.type_id)
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        decode(bytearray(block_bytes), 1)  # Some types have a size, but nothing that unpacks them.
    except (ValueError, KeyError, NotImplementedError):
        raise UnsupportedModelError(
            f"the tensor {entry.name} is stored as GGML type {entry.type_id}, which cannot be unpacked",
            "quantise the model to another type, or update the gguf package",
        ) from None
    return _Encoding(kind.name, block_size, block_bytes, torch.float32, decode)


def _lazy_tensor(path: Path, header: _Header, entry: _Entry, encoding: _Encoding) -> LazyTensor:
    """Check that the tensor lies inside the file, and promise it. Raises CheckpointError."""
    numel = math.prod(entry.shape)
    if numel == 0 or entry.shape[-1] % encoding.block_size:
        raise CheckpointError(
            f"{path.name}: the tensor {entry.name} has the shape {list(entry.shape)}",
            f"rows of {encoding.name} hold a multiple of {encoding.block_size} numbers; the file is damaged",
        )
    start = header.data_start + entry.offset
    nbytes = numel // encoding.block_size * encoding.block_bytes
    if start + nbytes > header.file_size:
        raise CheckpointError(
            f"{path.name} ends before the tensor {entry.name} does",
            "the file is incomplete; download it again",
        )

    def read_tensor() -> torch.Tensor:
        data = bytearray(nbytes)
        try:
            with path.open("rb") as file:
                file.seek(start)
                length = file.readinto(data)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read", error.strerror or "check the path") from error
        if length != nbytes:
            raise CheckpointError(f"{path.name} became shorter while it was read", "download it again")
        return encoding.decode(data, numel // entry.shape[-1]).reshape(entry.shape)

    return LazyTensor(entry.shape, encoding.dtype, read_tensor)


def _translate(config: dict[str, Any], stored: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Name and arrange tensors as Hugging Face does.

    Raises UnsupportedModelError for a tensor that has no place in the model, CheckpointError for one that
    is missing or has the wrong shape.
    """
    expected = expected_tensors(parse_config(config))
    tensors: dict[str, LazyTensor] = {}
    for name, tensor in stored.items():
        if name == _FREQ_FACTORS:
            continue  # it is in the config
        target = _hugging_face_name(name)
        if target not in expected:
            raise UnsupportedModelError(
                f"the GGUF file has a tensor {name}", "a llama model has no place for it"
            )
        if tensor.shape != expected[target]:
            raise CheckpointError(
                f"the tensor {name} has the shape {list(tensor.shape)}",
                f"the metadata asks for {list(expected[target])}; the file is damaged",
            )
        if ".q_proj." in target:
            tensor = _unpermuted(tensor, config["num_attention_heads"])
        elif ".k_proj." in target:
            tensor = _unpermuted(tensor, config["num_key_value_heads"])
        tensors[target] = tensor
    for name, shape in expected.items():
        if name in tensors:
            continue
        # llama.cpp takes each bias that it finds; Hugging Face's switch is one for all projections.
        if not name.endswith(".bias"):
            raise CheckpointError(f"the GGUF file has no tensor for {name}", "the file is incomplete")
        tensors[name] = LazyTensor.of(torch.zeros(shape))
    return {name: tensors[name] for name in expected}


def _hugging_face_name(name: str) -> str | None:
    match = re.fullmatch(r"blk\.(0|[1-9]\d{0,4})\.(\w+)\.(weight|bias)", name, re.ASCII)
    if match is None:
        return _TOP_LEVEL_NAMES.get(name)
    layer, part, suffix = match.groups()
    return f"model.layers.{layer}.{_BLOCK_NAMES[part]}.{suffix}" if part in _BLOCK_NAMES else None


def _unpermuted(tensor: LazyTensor, heads: int) -> LazyTensor:
    """Rows of a query or key projection in Hugging Face's order; [heads * head_dim, ...] stays so.

    RoPE rotates pairs of rows. llama.cpp's llama graph wants the two of a pair side by side and its
    converter moves them there; Hugging Face keeps all first ones of a head before all second ones.
    """

    def read_tensor() -> torch.Tensor:
        rows = tensor.read()
        pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1)
        return pairs.transpose(1, 2).reshape(rows.shape).contiguous()

    return LazyTensor(tensor.shape, tensor.dtype, read_tensor)


# --- config ------------------------------------------------------------------------------------------


def _refuse_unsupported(metadata: Metadata) -> None:
    """Raise UnsupportedModelError for files that are no single llama model, and for unknown settings."""
    architecture = metadata.typed("general.architecture", str)
    if architecture is None:
        raise CheckpointError("the GGUF file has no general.architecture", "it does not hold a model")
    kind = metadata.typed("general.type", str, "model")
    if kind != "model":
        raise UnsupportedModelError(f"the GGUF file holds a {kind}, not a model", "name the model's own file")
    if architecture != "llama":
        raise UnsupportedModelError(
            f"the GGUF architecture {architecture!r} is not implemented",
            "implemented: llama; convert other models from their Hugging Face folder",
        )
    parts = metadata.typed("split.count", int, 1)
    if parts > 1:
        raise UnsupportedModelError(
            f"the model is split into {parts} GGUF files", "join them first with llama-gguf-split --merge"
        )
    experts = metadata.typed("llama.expert_count", int, 0)
    if experts:
        raise UnsupportedModelError(f"the model is a mixture of {experts} experts", "this is not implemented")
    for key, value in metadata.items():
        setting = key.removeprefix("llama.")
        if setting == key or setting in _KNOWN_KEYS:
            continue
        neutral = _NEUTRAL_VALUES.get(setting, ())
        if not isinstance(value, bool | int | float) or value not in neutral:
            shown = value if isinstance(value, bool | int | float) else "a list or text"
            raise UnsupportedModelError(f"the GGUF file sets {key} to {shown}", "this is not implemented")


def _config(metadata: Metadata, stored: dict[str, LazyTensor]) -> dict[str, Any]:
    """The Hugging Face config that the metadata and the tensor list amount to."""
    hidden_size = metadata.count("llama.embedding_length")
    layers = metadata.count("llama.block_count")
    heads = metadata.count("llama.attention.head_count")
    head_dim = metadata.count("llama.attention.key_length", max(hidden_size // heads, 1))
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if metadata.count(key, head_dim) != head_dim:
            raise UnsupportedModelError(
                f"the GGUF file sets {key} to {metadata.count(key)} with heads of {head_dim}",
                "this is not implemented; both must be equal",
            )
    # Also bounds what is built from the count.
    if layers > len(stored):
        raise CheckpointError(
            f"the GGUF file announces {layers} layers and has {len(stored)} tensors",
            "the file is damaged or incomplete",
        )
    embedding = stored.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError("the GGUF file has no token_embd.weight matrix", "the file is incomplete")
    vocab_size = embedding.shape[0]
    if metadata.count("llama.vocab_size", vocab_size) != vocab_size:
        raise CheckpointError(
            f"llama.vocab_size is {metadata['llama.vocab_size']}, token_embd.weight has {vocab_size} rows",
            "the file is damaged",
        )
    theta = metadata.positive("llama.rope.freq_base", 10000.0)
    context_length = metadata.count("llama.context_length")
    dtypes = {tensor.dtype for tensor in stored.values() if len(tensor.shape) == 2}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": metadata.count("llama.feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": metadata.positive("llama.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": context_length,
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(metadata, stored.get(_FREQ_FACTORS), theta, head_dim, context_length),
        "attention_bias": any(re.search(r"\.attn_(q|k|v|output)\.bias$", name) for name in stored),
        "mlp_bias": any(re.search(r"\.ffn_(gate|up|down)\.bias$", name) for name in stored),
        "tie_word_embeddings": "output.weight" not in stored,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **special_token_ids(metadata, vocab_size),
    }


def _rope_scaling(
    metadata: Metadata, freq_factors: LazyTensor | None, theta: float, head_dim: int, context_length: int
) -> dict[str, Any] | None:
    """Hugging Face's `rope_scaling`, from metadata (linear, yarn) or from `rope_freqs.weight` (llama3)."""
    # llama.cpp: a factor of 0 means none, one without a type is linear; `scale_linear` is its old name.
    factor = metadata.typed("llama.rope.scaling.factor", float, 0.0)
    factor = factor or metadata.typed("llama.rope.scale_linear", float, 0.0)
    kind = metadata.typed("llama.rope.scaling.type", str, "linear")
    scaling: dict[str, Any] | None = None
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"the GGUF file sets the RoPE scaling {kind!r}", "implemented: none, linear, yarn, llama3"
        )
    if kind != "none" and factor not in (0.0, 1.0):
        if not 0 < factor < math.inf:
            raise CheckpointError(f"llama.rope.scaling.factor is {factor}", "the file is damaged")
        scaling = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = metadata.count(
                "llama.rope.scaling.original_context_length", context_length
            )
            for name in ("beta_fast", "beta_slow"):
                if f"llama.rope.scaling.yarn_{name}" in metadata:
                    scaling[name] = metadata.positive(f"llama.rope.scaling.yarn_{name}")
    if freq_factors is None:
        return scaling
    llama3 = _llama3_scaling(freq_factors, theta, head_dim)
    if scaling and llama3:
        raise UnsupportedModelError(
            f"the GGUF file has both {_FREQ_FACTORS} and {kind} RoPE scaling", "this is not implemented"
        )
    return scaling or llama3


def _llama3_scaling(freq_factors: LazyTensor, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The llama3 rule that gives these divisors of the RoPE frequencies; None if they are all 1.

    The file has the divisors only. All Llama 3.x models share every setting but the factor, which is
    the largest divisor; computing the rule anew tells whether it is the right one. Raises
    UnsupportedModelError when it is not.
    """
    if freq_factors.shape != (head_dim // 2,):
        raise CheckpointError(
            f"{_FREQ_FACTORS} has the shape {list(freq_factors.shape)}", f"[{head_dim // 2}] is needed"
        )
    divisors = freq_factors.read().double()
    if bool((divisors == 1).all()):
        return None
    factor, low, high, original = float(divisors.max()), 1.0, 4.0, 8192
    wavelengths = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    if not torch.allclose(1 / ((1 - smooth) / factor + smooth), divisors, rtol=1e-4, atol=0):
        raise UnsupportedModelError(
            f"{_FREQ_FACTORS} does not follow the llama3 rule (low 1, high 4, original length 8192)",
            "this is not implemented",
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _left_out(metadata: Metadata) -> Iterator[str]:
    """A line for what the result lacks or guesses."""
    for key in metadata:
        if key.startswith("tokenizer.chat_template."):
            yield f"{key}: only the default chat template is kept"
    if metadata.get("tokenizer.ggml.model") == "gpt2" and "tokenizer.ggml.pre" not in metadata:
        yield "tokenizer.ggml.pre is missing: text is split as llama.cpp does by default"


def _origin(metadata: Metadata) -> str | None:
    """The Hugging Face repository that the file says it was converted from."""
    for key in ("general.source.huggingface.repository", "general.source.repo_url", "general.repo_url"):
        value = metadata.get(key)
        if isinstance(value, str) and value:
            return value.removeprefix("https://huggingface.co/")
    return None
