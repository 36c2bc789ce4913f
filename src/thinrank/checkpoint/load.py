"""Loads a thinrank (or plain dense Hugging Face) folder: strict, one tensor at a time, onto one device.

Every name and shape is compared with what the config promises before the first byte of data is read.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..config import ModelConfig
from ..device import resolve_device
from ..errors import CheckpointError, unknown_name
from ..model.decoder import Decoder
from .detect import detect_family
from .folder import read_json, read_shards, weight_files
from .format import CONFIG_NAME, LowRankSection, expected_tensors, read_config
from .safetensors_reader import read_safetensors
from .tensors import LazyTensor

if TYPE_CHECKING:
    from ..model.packed_decoder import PackedDecoder

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint whose names and shapes are proven complete and whose tensors are still on disk.

    raw_config: config.json as it is. section: None for a plain dense folder.
    """

    path: Path
    config: ModelConfig
    raw_config: Mapping[str, Any]
    section: LowRankSection | None
    tensors: Mapping[str, LazyTensor]

    def generation_config(self) -> dict[str, Any]:
        path = self.path / "generation_config.json"
        return read_json(path) if path.is_file() else {}

    def read(self, name: str, device: torch.device, dtype: str) -> torch.Tensor:
        """One tensor on `device`. dtype: a name of `DTYPES`, or "auto" as `load_model` has it."""
        tensor = self.tensors[name].read()
        return tensor.to(device=device, dtype=compute_dtype(tensor.dtype, device, dtype))


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A model ready to run."""

    path: Path
    config: ModelConfig
    decoder: Decoder | PackedDecoder
    generation_config: Mapping[str, Any]


def open_checkpoint(path: str | Path) -> OpenCheckpoint:
    """Open and validate a folder without reading tensor data.

    Raises CheckpointError when the folder is missing, foreign (the message has the `thinrank convert`
    command to run), or when tensors are missing, unexpected or mis-shaped; UnsupportedModelError for
    an architecture or setting that is not implemented.
    """
    folder = Path(path)
    if not folder.exists():
        raise CheckpointError(f"{folder} does not exist", "name a folder that thinrank convert wrote")
    if folder.is_dir() and not any(folder.iterdir()):
        raise CheckpointError(f"{folder} is empty", "name a folder that thinrank convert wrote")
    files = weight_files(folder, "model", "safetensors") if folder.is_dir() else []
    if not files or not (folder / CONFIG_NAME).is_file():
        raise _foreign(folder)
    raw_config = read_json(folder / CONFIG_NAME)
    tensors = read_shards(files, read_safetensors)
    if raw_config.get("quantization_config") is None and detect_family(raw_config, tensors) != "hf-dense":
        raise _foreign(folder)
    config, section = read_config(raw_config)
    tensors = {name: t for name, t in tensors.items() if not is_redundant(name, config)}
    check_tensors(config, tensors, str(folder))
    return OpenCheckpoint(folder, config, raw_config, section, tensors)


def load_model(
    path: str | Path, device: str | torch.device = "auto", dtype: str = "auto"
) -> LoadedCheckpoint:
    """Load a checkpoint onto one device.

    dtype: "float32", "float16" or "bfloat16" for all weights, or "auto": 16-bit weights stay as they
    are; float32 stays on the CPU and becomes bfloat16 on a GPU. Peak host memory is one tensor beyond
    the model.

    Raises what `open_checkpoint` raises; OptionError for an unknown device or dtype.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise unknown_name("dtype", dtype, ["auto", *DTYPES])
    target = resolve_device(device)
    checkpoint = open_checkpoint(path)
    decoder = build_decoder(checkpoint, target, dtype)
    return LoadedCheckpoint(checkpoint.path, checkpoint.config, decoder, checkpoint.generation_config())


def build_decoder(checkpoint: OpenCheckpoint, device: torch.device, dtype: str) -> Decoder | PackedDecoder:
    """The packed decoder on a GPU, the reference decoder elsewhere."""
    config = checkpoint.config
    if device.type != "cuda":
        return Decoder.build(config, lambda name: checkpoint.read(name, device, dtype))
    from ..model.packed_decoder import PackedDecoder

    return PackedDecoder.build(
        config,
        lambda name: checkpoint.tensors[name].read().to(device),
        arena_dtype(checkpoint, dtype),
        device,
        config.max_position_embeddings,
    )


def arena_dtype(checkpoint: OpenCheckpoint, dtype: str) -> torch.dtype:
    """The one dtype of all weights on a GPU. "auto": float16 if every projection is stored so, else bfloat16,
    whose range takes whatever was stored."""
    if dtype != "auto":
        return DTYPES[dtype]
    matrices = {
        tensor.dtype
        for name, tensor in checkpoint.tensors.items()
        if len(tensor.shape) == 2 and name != "model.embed_tokens.weight"
    }
    return torch.float16 if matrices == {torch.float16} else torch.bfloat16


def compute_dtype(stored: torch.dtype, device: torch.device, dtype: str) -> torch.dtype:
    """The dtype that a weight stored as `stored` is computed with; see `load_model`."""
    if dtype != "auto":
        return DTYPES[dtype]
    if stored.itemsize <= 2:
        return stored
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def is_redundant(name: str, config: ModelConfig) -> bool:
    """Tensors that old Hugging Face checkpoints carry and nobody needs."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def check_tensors(config: ModelConfig, tensors: Mapping[str, LazyTensor], where: str) -> None:
    """Compare names and shapes with what the config promises, and weights with what can be computed with.

    Raises CheckpointError naming the first few that differ.
    """
    expected = expected_tensors(config)
    problems = (
        ("lacks", [name for name in expected if name not in tensors]),
        ("has the unexpected", [name for name in tensors if name not in expected]),
        (
            "has the wrong shape for",
            [
                f"{name} ({list(tensors[name].shape)}, the config says {list(shape)})"
                for name, shape in expected.items()
                if name in tensors and tensors[name].shape != shape
            ],
        ),
        (
            "stores no floating-point numbers in",
            [
                f"{name} ({str(tensor.dtype).removeprefix('torch.')})"
                for name, tensor in tensors.items()
                if not tensor.dtype.is_floating_point
            ],
        ),
    )
    for what, names in problems:
        if names:
            listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            raise CheckpointError(
                f"{where} {what} {'tensor' if len(names) == 1 else 'tensors'} {listed}",
                "the checkpoint is incomplete or its config belongs to another model",
            )


def _foreign(path: Path) -> CheckpointError:
    destination = path.absolute().with_suffix("") if path.is_file() else path.absolute()
    destination = destination.with_name(f"{destination.name}-thinrank")
    return CheckpointError(
        f"{path} is not a thinrank checkpoint",
        f"convert it with: thinrank convert {shlex.quote(str(path))} {shlex.quote(str(destination))}",
    )
