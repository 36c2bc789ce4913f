"""What the projections of the dense model see on the calibration text: collected once, kept in a folder.

Nothing here depends on a method or a keep_ratio, so all of them use the same files. One decoder layer is in
memory at a time; the residual stream of all tokens lies in a mapped file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm

from ..checkpoint.claim import in_turn
from ..checkpoint.folder import weight_files
from ..checkpoint.load import OpenCheckpoint
from ..checkpoint.safetensors_reader import read_safetensors
from ..checkpoint.tensors import LazyTensor
from ..errors import CheckpointError
from ..model.batch import ForwardBatch
from ..model.layers import DecoderLayer, Projection, TensorSource
from ..whole_file import write_whole
from .store import HiddenStates, fingerprint, write_tensors

#: Projection -> the one at which the statistics of their common input are collected.
INPUT_OF = {
    "q_proj": "q_proj",
    "k_proj": "q_proj",
    "v_proj": "q_proj",
    "o_proj": "o_proj",
    "gate_proj": "gate_proj",
    "up_proj": "gate_proj",
    "down_proj": "down_proj",
}
PROJECTIONS = tuple(INPUT_OF)

#: Tokens that pass through a layer together; bounds the activations in memory.
BATCH_TOKENS = 4096

#: Part of every key: raise it when the content of the files changes.
VERSION = 1


@dataclass(frozen=True)
class Statistics:
    """Finished statistics of `tokens` calibration tokens.

    key: fingerprint of the model and the calibration tokens.
    """

    folder: Path
    key: str
    tokens: int

    def gram(self, module: str) -> Tensor:
        """X^T X over the inputs X of a module: float64 [in, in]."""
        return self._read(module, "gram")

    def abs_mean(self, module: str) -> Tensor:
        """Mean absolute value of each input channel: float64 [in]."""
        return self._read(module, "abs_mean")

    def similarity(self, layer_index: int) -> float:
        """Mean cosine between the residual stream before a decoder layer and after it."""
        return float(self._layer(layer_index)["similarity"].read())

    def _read(self, module: str, what: str) -> Tensor:
        return self._layer(layer_of(module))[f"{INPUT_OF[module.rpartition('.')[2]]}.{what}"].read()

    def _layer(self, index: int) -> dict[str, LazyTensor]:
        return read_safetensors(_layer_path(self.folder, index))


def layer_of(module: str) -> int:
    """12 for model.layers.12.mlp.up_proj."""
    return int(module.split(".")[2])


def source_key(checkpoint: OpenCheckpoint) -> str:
    """Changes whenever a file of the model does: its config, and name, size and time of each weight file."""
    files = weight_files(checkpoint.path, "model", "safetensors")
    facts = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    return fingerprint(dict(checkpoint.raw_config), facts)


@dataclass
class InputObserver:
    """A projection that also sums X^T X and |X| over all inputs X that it sees."""

    projection: Projection
    gram: Tensor | None = None
    abs_sum: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        gram, abs_sum = (wide.T @ wide).double(), wide.abs().sum(0).double()
        self.gram = gram if self.gram is None else self.gram + gram
        self.abs_sum = abs_sum if self.abs_sum is None else self.abs_sum + abs_sum
        return self.projection(x)


def collect(
    checkpoint: OpenCheckpoint, sequences: Tensor, root: Path, device: torch.device, progress: bool
) -> Statistics:
    """Collect what is missing in the folder that `root` has for this model and these tokens.

    sequences: int64 [samples, length]. Another model, other tokens or another kind of device have another
    folder, so stale statistics are never used. A pass that was killed goes on after its last layer.

    Raises CheckpointError when an activation is not finite.
    """
    config = checkpoint.config
    key = fingerprint(VERSION, source_key(checkpoint), sequences.tolist(), device.type)
    folder = root / f"statistics-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "model": str(checkpoint.path),
        "samples": sequences.shape[0],
        "length": sequences.shape[1],
        "device": device.type,
    }
    with in_turn(folder):
        if not all(_layer_path(folder, index).is_file() for index in range(config.num_hidden_layers)):
            write_whole(folder / "about.json", json.dumps(about, indent=2) + "\n")
            _collect_layers(checkpoint, sequences, folder, device, progress)
    return Statistics(folder, key, sequences.numel())


def _collect_layers(
    checkpoint: OpenCheckpoint, sequences: Tensor, folder: Path, device: torch.device, progress: bool
) -> None:
    config, get = checkpoint.config, weights_of(checkpoint, device)
    hidden = HiddenStates(folder, "hidden", (sequences.numel(), config.hidden_size))
    if hidden.stage is None:
        embed(checkpoint, sequences, hidden)
    first = hidden.stage or 0
    layers = range(first, config.num_hidden_layers)
    for index in tqdm(
        layers,
        desc="Statistics",
        unit="layer",
        initial=first,
        total=config.num_hidden_layers,
        disable=not progress,
    ):
        layer = DecoderLayer.build(config, index, get)
        write_tensors(_layer_path(folder, index), _observe(layer, hidden, index, sequences.shape[1], device))
        hidden.commit(index + 1)
    hidden.remove()


def weights_of(checkpoint: OpenCheckpoint, device: torch.device) -> TensorSource:
    """Its tensors by name, in float32 on `device`."""
    return lambda name: checkpoint.read(name, device, "float32")


def check_finite(checkpoint: OpenCheckpoint, progress: bool) -> None:
    """Raise CheckpointError for a tensor with NaN or infinite values. Reads everything once."""
    for name, tensor in tqdm(
        checkpoint.tensors.items(), desc="Checking", unit="tensor", disable=not progress, leave=False
    ):
        if not tensor.read().isfinite().all():
            raise CheckpointError(f"{name} has NaN or infinite values", "the source is damaged")


def embed(checkpoint: OpenCheckpoint, sequences: Tensor, hidden: HiddenStates) -> None:
    """Write the residual stream before the first layer."""
    table = checkpoint.tensors["model.embed_tokens.weight"].read()
    target = hidden.new()
    for start, ids in batches(sequences):
        target[start : start + ids.numel()] = table[ids.flatten()].float()
    hidden.commit(0)


def batches(sequences: Tensor, tokens: int = BATCH_TOKENS) -> Iterator[tuple[int, Tensor]]:
    """Whole sequences, about `tokens` tokens at a time, and the number of tokens before them."""
    start = 0
    for part in sequences.split(max(1, tokens // sequences.shape[1])):
        yield start, part
        start += part.numel()


def batch_of(ids: Tensor, device: torch.device) -> ForwardBatch:
    """Equally long sequences, each on its own. ids: int64 [sequences, length]."""
    return ForwardBatch.whole_sequences(list(ids), device)


def _observe(
    layer: DecoderLayer, hidden: HiddenStates, index: int, length: int, device: torch.device
) -> dict[str, Tensor]:
    """Pass the stream of stage `index` through one layer into the next stage, and return its statistics."""
    observers: dict[str, Any] = {name: InputObserver(getattr(layer, name)) for name in INPUT_OF.values()}
    watched = replace(layer, **observers)
    source, target = hidden.read(index), hidden.new()
    cosines = 0.0
    positions = torch.arange(len(source)).view(-1, length)
    for start, part in batches(positions):
        rows = slice(start, start + part.numel())
        before = source[rows].to(device)
        after = watched(before, batch_of(part % length, device))
        if not after.isfinite().all():
            raise CheckpointError(
                "the model computes NaN or infinite activations", "its weights are too large, or damaged"
            )
        cosines += F.cosine_similarity(before, after).double().sum().item()
        target[rows] = after.to(target.device)
    tensors = {"similarity": torch.tensor(cosines / len(source), dtype=torch.float64)}
    for name, observer in observers.items():
        tensors[f"{name}.gram"] = observer.gram
        tensors[f"{name}.abs_mean"] = observer.abs_sum / len(source)
    return tensors


def _layer_path(folder: Path, index: int) -> Path:
    return folder / f"layer-{index:05d}.safetensors"
