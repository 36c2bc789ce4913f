"""How much the model's loss depends on each projection's output: what `--allocate loss` measures.

One backward pass over a part of the calibration tokens. For a change D of a module's weight, the loss of a
token grows by about 1/2 tr(F D G D^T), where G = E[x x^T] comes from the inputs and F = E[g g^T] from the
gradients of the loss by the module's outputs: the Fisher information with the factors of K-FAC (Martens and
Grosse, arXiv 1503.05671). Layer by layer, as the statistics: the streams before each layer lie on disk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm

from ..checkpoint.load import OpenCheckpoint
from ..checkpoint.safetensors_reader import read_safetensors
from ..model.layers import DecoderLayer, Projection
from .quality import head_of
from .statistics import Statistics, batch_of, batches, embed, finite_weights, layer_of
from .store import HiddenStates, write_tensors

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

#: Sequences of the backward pass.
SEQUENCES = 16
#: Tokens that go backward through a layer together: autograd keeps about 40 activations of each.
BATCH_TOKENS = 2048


@dataclass(frozen=True)
class Sensitivity:
    """Finished gradient statistics, in the folder of the statistics."""

    folder: Path

    def fisher(self, module: str) -> Tensor:
        """Mean g g^T over tokens, g the gradient of the summed loss by the module's output: [out, out]."""
        tensors = read_safetensors(_layer_path(self.folder, layer_of(module)))
        return tensors[module.rpartition(".")[2]].read()


@dataclass
class GradientObserver:
    """A projection that also sums g g^T over the gradients g that its outputs receive."""

    projection: Projection
    fisher: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        y = self.projection(x)
        if y.requires_grad:
            y.register_hook(self._add)
        return y

    def _add(self, gradient: Tensor) -> None:
        fisher = (gradient.T @ gradient).double()
        self.fisher = fisher if self.fisher is None else self.fisher + fisher


def measure(
    checkpoint: OpenCheckpoint,
    sequences: Tensor,
    statistics: Statistics,
    device: torch.device,
    progress: bool,
) -> Sensitivity:
    """Run what is missing of the pass. sequences: int64 [samples, length], of which the first are used."""
    config, folder = checkpoint.config, statistics.folder
    layers = config.num_hidden_layers
    if all(_layer_path(folder, index).is_file() for index in range(layers)):
        return Sensitivity(folder)
    sequences = sequences[:SEQUENCES]
    shape = (sequences.numel(), config.hidden_size)
    forward = HiddenStates(folder, "forward", shape, keep=True)
    # Stage s of the backward stream is the gradient by the input of layer `layers - s`.
    backward = HiddenStates(folder, "backward", shape)
    get = finite_weights(checkpoint, device)
    if forward.stage is None:
        embed(checkpoint, sequences, forward)
    with tqdm(
        desc="Gradients",
        unit="layer",
        total=2 * layers,
        initial=(forward.stage or 0) + (backward.stage or 0),
        disable=not progress,
    ) as bar:
        for index in range(forward.stage or 0, layers):
            layer = DecoderLayer.build(config, index, get)
            source, target = forward.read(index), forward.new()
            for start, ids in batches(sequences):
                rows = slice(start, start + ids.numel())
                target[rows] = layer(source[rows].to(device), batch_of(ids, device)).to(target.device)
            forward.commit(index + 1)
            bar.update()
        if backward.stage is None:
            _start(checkpoint, sequences, forward.read(layers), backward, device)
        for stage in range(backward.stage or 0, layers):
            index = layers - 1 - stage
            layer = DecoderLayer.build(config, index, get)
            tensors = _backward(layer, forward.read(index), backward, stage, sequences, device)
            write_tensors(_layer_path(folder, index), tensors)
            backward.commit(stage + 1)
            bar.update()
    forward.remove()
    backward.remove()
    return Sensitivity(folder)


def _start(
    checkpoint: OpenCheckpoint, sequences: Tensor, last: Tensor, backward: HiddenStates, device: torch.device
) -> None:
    """The gradient of the summed next-token loss by the stream after the last layer."""
    head = head_of(checkpoint.config, lambda name: checkpoint.read(name, device, "float32"))
    target = backward.new()
    for start, ids in batches(sequences, 1):
        rows = slice(start, start + ids.numel())
        with torch.enable_grad():
            hidden = last[rows].to(device).requires_grad_()
            loss = cross_entropy(head.head(hidden[:-1]), ids.flatten()[1:].to(device), reduction="sum")
        target[rows] = torch.autograd.grad(loss, hidden)[0].to(target.device)
    backward.commit(0)


def _backward(
    layer: DecoderLayer,
    inputs: Tensor,
    backward: HiddenStates,
    stage: int,
    sequences: Tensor,
    device: torch.device,
) -> dict[str, Tensor]:
    observers: dict[str, Any] = {name: GradientObserver(getattr(layer, name)) for name in PROJECTIONS}
    watched = replace(layer, **observers)
    source, target = backward.read(stage), backward.new()
    for start, ids in batches(sequences, BATCH_TOKENS):
        rows = slice(start, start + ids.numel())
        with torch.enable_grad():
            hidden = inputs[rows].to(device).clone().requires_grad_()
            output = watched(hidden, batch_of(ids, device))
        target[rows] = torch.autograd.grad(output, hidden, source[rows].to(device))[0].to(target.device)
    return {name: (observer.fisher / len(source)).float() for name, observer in observers.items()}


def _layer_path(folder: Path, index: int) -> Path:
    return folder / f"gradients-{index:05d}.safetensors"
