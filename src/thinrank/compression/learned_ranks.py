"""Ranks learned by gradient: a few steps of Adam on the gates of all units, each step one layer-by-layer pass.

Parameters go to the units whose loss falls most for each of them: at every step the median price of a parameter
divides those that grow from those that shrink, and a common factor holds the budget. Each step leaves a file, and
a killed run goes on in the step where it was.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..checkpoint.claim import in_turn
from ..checkpoint.safetensors_reader import read_safetensors
from ..model.layers import DecoderLayer
from .backward import backpropagate, gradient_path
from .gates import GatedLinear, Gates
from .ranks import RankProblem
from .statistics import PROJECTIONS, VERSION, weights_of
from .store import fingerprint, write_tensors

#: Calibration tokens of a step, in whole sequences.
TOKENS = 1024
#: How far a number moves in the first step; the last one is FINAL_RATE of it.
RATE, FINAL_RATE = 0.15, 0.2
#: Slopes of the cuts at the first and at the last step: 1/8 and 1/32 of the directions.
SHARPNESS = (8.0, 32.0)
#: Adam's decay of the mean and of the mean square of the gradients, which change fast in a few steps.
DECAYS = (0.8, 0.95)


@dataclass(frozen=True, eq=False)
class Training:
    """Gates after some steps, with Adam's moments: float64 [2, units], of the prices less their median."""

    gates: Gates
    mean: Tensor
    square: Tensor

    @staticmethod
    def start(gates: Gates) -> Training:
        return Training(gates, *torch.zeros(2, 2, len(gates.units), dtype=torch.float64))

    def after(self, prices: Tensor, number: int, rate: float, keep_ratio: float) -> Training:
        """The next state. number: of this step, from 0."""
        # Weighted by what is there to be traded, so that about as much grows as shrinks.
        weights = self.gates.parameters * torch.stack([1 - self.gates.dense, 1 - self.gates.shares])
        excess = prices - weighted_median(prices, weights)
        mean = DECAYS[0] * self.mean + (1 - DECAYS[0]) * excess
        square = DECAYS[1] * self.square + (1 - DECAYS[1]) * excess.square()
        direction = mean / (1 - DECAYS[0] ** (number + 1))
        scale = (square / (1 - DECAYS[1] ** (number + 1))).sqrt() + torch.finfo(torch.float64).tiny
        return Training(self.gates.moved(-rate * direction / scale, keep_ratio), mean, square)

    def write(self, path: Path) -> None:
        gates = {"shares": self.gates.shares, "dense": self.gates.dense}
        write_tensors(path, gates | {"mean": self.mean, "square": self.square})

    def read(self, path: Path) -> Training:
        """The state of the same units that was written there."""
        tensors = {name: tensor.read() for name, tensor in read_safetensors(path).items()}
        gates = replace(self.gates, shares=tensors["shares"], dense=tensors["dense"])
        return Training(gates, tensors["mean"], tensors["square"])


def learn(problem: RankProblem, steps: int) -> Gates:
    """The gates of problem.units, each a single module, after so many steps."""
    measurements = problem.measurements
    names = [unit.name for unit in problem.units]
    key = fingerprint(
        VERSION, problem.spectra.key, measurements.tokens.tolist(), names, problem.keep_ratio, steps
    )
    folder = measurements.root / f"gates-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    with in_turn(folder):
        return _learn(problem, steps, folder).gates


def _learn(problem: RankProblem, steps: int, folder: Path) -> Training:
    measurements, units = problem.measurements, problem.units
    state = Training.start(Gates.within(units, problem.keep_ratio))
    done = max((int(path.stem.rpartition("-")[2]) for path in folder.glob("step-*.safetensors")), default=0)
    if done:
        state = state.read(_step_path(folder, done))
    for leftover in folder.glob("pass-*"):
        if leftover != _pass_path(folder, done):
            shutil.rmtree(leftover)
    layers = measurements.checkpoint.config.num_hidden_layers
    with tqdm(
        desc="Gates",
        unit="layer",
        total=2 * layers * steps,
        initial=2 * layers * done,
        disable=not measurements.progress,
    ) as bar:
        for number in range(done, steps):
            progress = number / max(1, steps - 1)
            sharpness = SHARPNESS[0] * (SHARPNESS[1] / SHARPNESS[0]) ** progress
            sequences = measurements.tokens[rows_of(number, *measurements.tokens.shape)]
            work = _pass_path(folder, number)
            gradients = _gradients(problem, state.gates, sharpness, sequences, work, bar)
            prices = state.gates.prices(sharpness, gradients)
            rate = RATE * (1 + (FINAL_RATE - 1) * progress)
            state = state.after(prices, number, rate, problem.keep_ratio)
            state.write(_step_path(folder, number + 1))
            shutil.rmtree(work)
    return state


def rows_of(number: int, samples: int, length: int) -> list[int]:
    """The sequences of a step: all in turn, in an order that soon has been everywhere in the text."""
    count = min(samples, -(-TOKENS // length))
    golden = max(1, round(0.618 * samples))
    stride = next(stride for stride in range(golden, samples + 2) if gcd(stride, samples) == 1)
    return [(number * count + part) * stride % samples for part in range(count)]


def weighted_median(values: Tensor, weights: Tensor) -> Tensor:
    """The value below which half of the weight lies. values, weights: of one shape."""
    order = values.flatten().argsort(stable=True)
    below = weights.flatten()[order].cumsum(0)
    return values.flatten()[order[min(int((below < below[-1] / 2).sum()), len(order) - 1)]]


def _gradients(
    problem: RankProblem, gates: Gates, sharpness: float, sequences: Tensor, work: Path, bar: tqdm[Any]
) -> list[Tensor]:
    """Of the summed loss on the sequences by the gates of each unit: [k] each. work: folder of the pass."""
    checkpoint, device = problem.measurements.checkpoint, problem.measurements.device
    values = dict(zip(gates.units, gates.values(sharpness), strict=True))
    get = weights_of(checkpoint, device)

    def build(index: int) -> DecoderLayer:
        layer = DecoderLayer.build(checkpoint.config, index, get)
        gated: dict[str, Any] = {}
        for unit in gates.units:
            if unit.layers == [index]:
                dense, vectors = getattr(layer, unit.projection), problem.spectra.vectors(unit)
                leaf = values[unit].to(vectors).requires_grad_()
                gated[unit.projection] = GatedLinear(vectors.T @ dense.weight, vectors, leaf, dense.bias)
        return replace(layer, **gated)

    def collect(layer: DecoderLayer) -> dict[str, Tensor]:
        projections = {name: getattr(layer, name) for name in PROJECTIONS}
        gated = {name: each for name, each in projections.items() if isinstance(each, GatedLinear)}
        return {name: projection.gradients for name, projection in gated.items()}

    work.mkdir(exist_ok=True)
    backpropagate(checkpoint, sequences, work, device, build, collect, bar)
    paths = [gradient_path(work, unit.layers[0]) for unit in gates.units]
    return [
        read_safetensors(path)[unit.projection].read() for unit, path in zip(gates.units, paths, strict=True)
    ]


def _pass_path(folder: Path, number: int) -> Path:
    return folder / f"pass-{number:05d}"


def _step_path(folder: Path, steps: int) -> Path:
    return folder / f"step-{steps:05d}.safetensors"
