"""How much the model's loss depends on each projection's output: what `--allocate loss` measures.

One backward pass over a part of the calibration tokens. For a change D of a module's weight, the loss of a
token grows by about 1/2 tr(F D G D^T), where G = E[x x^T] comes from the inputs and F = E[g g^T] from the
gradients of the loss by the module's outputs: the Fisher information with the factors of K-FAC (Martens and
Grosse, arXiv 1503.05671).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..checkpoint.claim import in_turn
from ..checkpoint.load import OpenCheckpoint
from ..checkpoint.safetensors_reader import read_safetensors
from ..model.layers import DecoderLayer, Projection
from .backward import backpropagate, gradient_path, is_complete
from .statistics import PROJECTIONS, Statistics, layer_of, weights_of

#: Sequences of the backward pass.
SEQUENCES = 16


@dataclass(frozen=True)
class Sensitivity:
    """Finished gradient statistics, in the folder of the statistics."""

    folder: Path

    def fisher(self, module: str) -> Tensor:
        """Mean g g^T over tokens, g the gradient of the summed loss by the module's output: [out, out]."""
        tensors = read_safetensors(gradient_path(self.folder, layer_of(module)))
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
    if is_complete(folder, layers):
        return Sensitivity(folder)
    sequences = sequences[:SEQUENCES]
    get = weights_of(checkpoint, device)

    def watched(index: int) -> DecoderLayer:
        layer = DecoderLayer.build(config, index, get)
        observers: dict[str, Any] = {name: GradientObserver(getattr(layer, name)) for name in PROJECTIONS}
        return replace(layer, **observers)

    def fishers(layer: DecoderLayer) -> dict[str, Tensor]:
        tokens = sequences.numel()
        return {name: (getattr(layer, name).fisher / tokens).float() for name in PROJECTIONS}

    with (
        in_turn(folder),
        tqdm(desc="Gradients", unit="layer", total=2 * layers, disable=not progress) as bar,
    ):
        backpropagate(checkpoint, sequences, folder, device, watched, fishers, bar)
    return Sensitivity(folder)
