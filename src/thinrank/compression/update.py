"""`--update`: factor_out refitted by least squares to what the compressed model really sees.

SVD-LLM's second step (Wang et al., arXiv 2403.07378, section 3.3). Layer by layer, with the layers before
already compressed and refitted, factor_out U of every module minimises || W X - U Z ||, where X are the inputs that
the compressed model computes and Z = factor_in X. Departures: a ridge pulls towards the old factor, and the update is
guarded by calibration sequences that the fit does not see. Each module goes from the old factor towards the fitted
one as far as is best on them, which may be not at all, and if the refitted model's loss on them is not smaller,
nothing is updated. Targets from the dense model's own inputs, to make up for earlier errors too, do harm: on
SmolLM2-135M at 0.8 with 32 x 512 tokens perplexity on the held-out part went from 25.2 to 219, against 25.5 here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..checkpoint.claim import in_turn
from ..checkpoint.safetensors_reader import read_safetensors
from ..errors import OptionError
from ..model.layers import DecoderLayer, DenseLinear, LowRankLinear
from .factors import CompressedModel, Factors
from .quality import check_predictions, mean_loss
from .statistics import PROJECTIONS, VERSION, batch_of, batches, embed, layer_of, weights_of
from .store import HiddenStates, computed, fingerprint, write_tensors
from .units import Unit

#: Share of the calibration sequences, at least one, that the fit does not see.
HELD_OUT = 0.125
#: Pull towards the old factor, relative to the mean energy of a latent.
RIDGE = 1e-3


@dataclass(frozen=True)
class Update:
    """A finished refit. Losses in nats a token, on the held-out sequences; accepted: whether it helped."""

    loss_before: float
    loss_after: float
    folder: Path
    original: CompressedModel

    @property
    def accepted(self) -> bool:
        return self.loss_after < self.loss_before

    @property
    def model(self) -> CompressedModel:
        """The better of the two."""
        return _refitted(self.original, self.folder) if self.accepted else self.original


def held_out(samples: int) -> int:
    """How many of so many sequences the fit does not see."""
    return max(1, int(samples * HELD_OUT))


def refit(
    model: CompressedModel, sequences: Tensor, key: str, root: Path, device: torch.device, progress: bool
) -> Update:
    """Refit all modules, or go on where a killed refit was.

    sequences: int64 [samples, length]. key: fingerprint of the model's decompositions.

    Raises OptionError unless there are 2 sequences of 2 tokens.
    """
    check_predictions(sequences)
    if len(sequences) < 2:
        raise OptionError("an update needs at least 2 calibration samples", "raise --calibration-samples")
    config = model.checkpoint.config
    ranks = {unit.name: rank for unit, rank in model.ranks.items()}
    folder = root / f"update-{fingerprint(VERSION, key, sequences.tolist(), ranks)}"
    folder.mkdir(parents=True, exist_ok=True)
    refitted = _refitted(model, folder)
    with in_turn(folder):
        if not _layer_path(folder, config.num_hidden_layers - 1).is_file():
            _refit_layers(model, refitted, sequences, folder, device, progress)

    def losses() -> dict[str, Tensor]:
        unseen = sequences[-held_out(len(sequences)) :]
        both = [
            mean_loss(candidate.config, candidate.source(device), unseen) for candidate in (model, refitted)
        ]
        return {"losses": torch.tensor(both, dtype=torch.float64)}

    before, after = computed(folder / "losses.safetensors", losses)["losses"].read().tolist()
    return Update(before, after, folder, model)


def _refit_layers(
    model: CompressedModel,
    refitted: CompressedModel,
    sequences: Tensor,
    folder: Path,
    device: torch.device,
    progress: bool,
) -> None:
    config, tokens = model.config, sequences.numel()
    streams = HiddenStates(folder, "stream", (tokens, config.hidden_size))
    if streams.stage is None:
        embed(model.checkpoint, sequences, streams)
    dense_weights = weights_of(model.checkpoint, device)
    before, after = model.source(device), refitted.source(device)
    layers, first = config.num_hidden_layers, streams.stage or 0
    for index in tqdm(
        range(first, layers), desc="Update", unit="layer", initial=first, total=layers, disable=not progress
    ):
        dense = DecoderLayer.build(model.checkpoint.config, index, dense_weights)
        source, target = streams.read(index), streams.new()
        fits = _observe(dense, DecoderLayer.build(config, index, before), sequences, source)
        write_tensors(_layer_path(folder, index), {name: fit.solve() for name, fit in fits.items()})
        updated = DecoderLayer.build(config, index, after)
        for start, ids in batches(sequences):
            rows = slice(start, start + ids.numel())
            target[rows] = updated(source[rows].to(device), batch_of(ids, device)).to(target.device)
        streams.commit(index + 1)
    streams.remove()


@dataclass
class Fit:
    """A low-rank projection that sums what the least squares need, over the tokens to fit and those held out.

    residual: sum of (W x - U z) z^T, [out, rank]. energy: sum of z z^T, [rank, rank]. float64, one of each for
    the two parts.
    """

    projection: LowRankLinear
    dense: DenseLinear
    held_out: bool = False
    residual: list[Tensor | float] = field(default_factory=lambda: [0.0, 0.0])
    energy: list[Tensor | float] = field(default_factory=lambda: [0.0, 0.0])

    def __call__(self, x: Tensor) -> Tensor:
        latent = x @ self.projection.factor_in.T
        y = latent @ self.projection.factor_out.T
        part = int(self.held_out)
        self.residual[part] += ((x @ self.dense.weight.T - y).T @ latent).double()
        self.energy[part] += (latent.T @ latent).double()
        return y if self.projection.bias is None else y + self.projection.bias

    def solve(self) -> Tensor:
        """The new factor_out: float32 [out, rank]."""
        (residual, unseen_residual), (energy, unseen_energy) = self.residual, self.energy
        assert isinstance(energy, Tensor) and isinstance(residual, Tensor)
        ridge = RIDGE * energy.diagonal().mean() + torch.finfo(torch.float64).tiny
        damped = energy + ridge * torch.eye(len(energy), dtype=energy.dtype, device=energy.device)
        step = torch.linalg.solve(damped, residual.T).T
        # || W X - (U + t step) Z ||^2 on the held-out tokens is a parabola in t.
        slope, curvature = (unseen_residual * step).sum(), (step @ unseen_energy * step).sum()
        length = (slope / curvature).clamp(0, 1).nan_to_num(0.0)
        updated: Tensor = self.projection.factor_out.double() + length * step
        return updated.float()


def _observe(
    dense: DecoderLayer, low_rank: DecoderLayer, sequences: Tensor, source: Tensor
) -> dict[str, Fit]:
    """Run the low-rank layer on its inputs, and sum at each of its low-rank projections what a fit needs."""
    device = dense.input_layernorm.device
    fits = {
        name: Fit(getattr(low_rank, name), getattr(dense, name))
        for name in PROJECTIONS
        if isinstance(getattr(low_rank, name), LowRankLinear)
    }
    watched: dict[str, Any] = dict(fits)
    layer = replace(low_rank, **watched)
    unseen = held_out(len(sequences))
    start = 0
    for part, is_unseen in ((sequences[:-unseen], False), (sequences[-unseen:], True)):
        for fit in fits.values():
            fit.held_out = is_unseen
        for offset, ids in batches(part):
            rows = slice(start + offset, start + offset + ids.numel())
            layer(source[rows].to(device), batch_of(ids, device))
        start += part.numel()
    return fits


def _refitted(model: CompressedModel, folder: Path) -> CompressedModel:
    """The model with the factors that the folder has, for the layers that are finished."""

    def factors(unit: Unit, rank: int) -> Factors:
        factor_in, factor_outs = model.factors(unit, rank)
        updated = [_read(folder, module) for module in unit.modules]
        return factor_in, tuple(
            old if new is None else new.to(old) for old, new in zip(factor_outs, updated, strict=True)
        )

    return replace(model, factors=factors)


def _read(folder: Path, module: str) -> Tensor | None:
    path = _layer_path(folder, layer_of(module))
    return read_safetensors(path)[module.rpartition(".")[2]].read() if path.is_file() else None


def _layer_path(folder: Path, index: int) -> Path:
    return folder / f"layer-{index:05d}.safetensors"
