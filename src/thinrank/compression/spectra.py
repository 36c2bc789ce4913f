"""The decomposition of every unit under a method: computed once, kept in a folder, cut at any rank."""

from __future__ import annotations

from functools import cached_property, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint.load import OpenCheckpoint
from ..checkpoint.tensors import LazyTensor
from .measurements import Measurements
from .method import Inputs, Method, Scaling
from .statistics import INPUT_OF, VERSION, source_key, weights_of
from .store import computed, fingerprint
from .truncate import relative_error, spectrum
from .units import Unit


class Spectra:
    """Spectra of units, each computed when it is first asked for.

    Nothing is computed before it is asked for.
    """

    def __init__(
        self,
        checkpoint: OpenCheckpoint,
        method: Method,
        measurements: Measurements,
        root: Path,
        device: torch.device,
    ):
        self._checkpoint, self._method, self._measurements = checkpoint, method, measurements
        self._root, self._device = root, device
        self._get = weights_of(checkpoint, device)
        # Projections with the same inputs follow each other and share the scaling.
        self._scaling = lru_cache(maxsize=1)(self._compute_scaling)

    @cached_property
    def key(self) -> str:
        """Fingerprint of the model, the method and what it has measured."""
        calibrated = self._method.scaling is not None
        source = self._measurements.statistics.key if calibrated else source_key(self._checkpoint)
        return fingerprint(VERSION, source, self._method.identity, self._device.type)

    @cached_property
    def _folder(self) -> Path:
        folder = self._root / f"spectra-{self.key}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def values(self, unit: Unit) -> Tensor:
        """Singular values of weight @ scaling, descending: float64 [k]."""
        return self._tensors(unit)["values"].read()

    def vectors(self, unit: Unit) -> Tensor:
        """Its left singular vectors: float32 [modules * out, k], on the device."""
        return self._tensors(unit)["vectors"].read().to(self._device)

    def damping(self, unit: Unit) -> float:
        """What was added to the eigenvalues of the Gram matrix of its inputs; 0 where that is regular."""
        return self._tensors(unit)["damping"].read().item()

    def weight(self, unit: Unit) -> Tensor:
        """The weights one below the other: float32 [modules * out, in]."""
        return torch.cat([self._get(f"{module}.weight") for module in unit.modules])

    def relative_error(self, unit: Unit, rank: int) -> float:
        """||(W - W') S|| / ||W S||, from the values that are cut off."""
        return relative_error(self.values(unit), rank)

    def cut(self, unit: Unit, rank: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """factor_in [rank, in] and the factor_out [out, rank] of each module, float32 on the device."""
        vectors = self.vectors(unit)[:, :rank]
        return vectors.T @ self.weight(unit), vectors.split(unit.out_features)

    def _tensors(self, unit: Unit) -> dict[str, LazyTensor]:
        return computed(self._folder / unit.file_name, lambda: self._decompose(unit))

    def _decompose(self, unit: Unit) -> dict[str, Tensor]:
        scaling = self._scaling(_inputs_of(unit))
        result = spectrum(self.weight(unit), None if scaling is None else scaling.matrix.to(self._device))
        damping = 0.0 if scaling is None else scaling.damping
        return {
            "vectors": result.vectors.float(),
            "values": result.values,
            "damping": torch.tensor(damping, dtype=torch.float64),
        }

    def _compute_scaling(self, modules: tuple[str, ...]) -> Scaling | None:
        """The scaling of the inputs of these modules taken together."""
        if self._method.scaling is None:
            return None
        statistics = self._measurements.statistics
        grams = [statistics.gram(module).to(self._device) for module in modules]
        means = [statistics.abs_mean(module).to(self._device) for module in modules]
        return self._method.scaling(Inputs(sum(grams[1:], grams[0]), sum(means[1:], means[0]) / len(means)))


def _inputs_of(unit: Unit) -> tuple[str, ...]:
    """The modules at which the statistics of the unit's inputs were collected."""
    return tuple(
        f"{prefix}.{INPUT_OF[projection]}"
        for prefix, _, projection in (module.rpartition(".") for module in unit.modules)
    )
