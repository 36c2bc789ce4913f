"""Intermediate results on disk, written so that a process killed at any moment loses nothing that was finished.

A file has its name only when it is complete. Processes that share a folder wait for each other. The same inputs
give the same bytes, so a resumed run cannot be told from an unbroken one.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.claim import in_turn
from ..checkpoint.safetensors_reader import read_safetensors
from ..checkpoint.save import write_safetensors
from ..checkpoint.tensors import LazyTensor


def fingerprint(*parts: Any) -> str:
    """16 hex digits of everything that a result depends on. parts: JSON values."""
    encoded = json.dumps(parts, sort_keys=True).encode()
    return hashlib.sha256(encoded).hexdigest()[:16]


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    part = path.with_name(f"{path.name}.part")
    write_safetensors(part, {name: LazyTensor.of(tensor.cpu()) for name, tensor in tensors.items()})
    part.replace(path)


def computed(path: Path, compute: Callable[[], Mapping[str, Tensor]]) -> dict[str, LazyTensor]:
    """The tensors of `path`, which are computed and written first if nobody has done that yet.

    One process at a time computes what lies in a folder. compute: may wait for other folders, never for this one.
    """
    if not path.is_file():
        with in_turn(path.parent):
            if not path.is_file():
                write_tensors(path, compute())
    return read_safetensors(path)


class HiddenStates:
    """The residual stream of all calibration tokens between two stages of a pass, in files.

    A stage reads file i and writes file i + 1; the number of the last complete file is where a killed pass
    goes on. Memory is the pages in use, which the system reclaims. keep: leave the files of earlier stages.
    """

    def __init__(self, folder: Path, name: str, shape: tuple[int, int], *, keep: bool = False):
        self._folder, self._name, self._shape, self._keep = folder, name, shape, keep

    @property
    def stage(self) -> int | None:
        """The last complete file; None before `write(0)`."""
        stages = [int(path.stem.rpartition("-")[2]) for path in self._folder.glob(f"{self._name}-*.f32")]
        return max(stages, default=None)

    def read(self, stage: int) -> Tensor:
        """float32 [tokens, hidden_size]; not to be written to."""
        return self._map(self._path(stage), shared=False)

    def new(self) -> Tensor:
        """Room for the next stage, which `commit` makes readable."""
        with self._part.open("wb") as file:
            # A full disk is an error here, and would be a fatal signal when a mapped page is written.
            if sys.platform == "linux":
                os.posix_fallocate(file.fileno(), 0, self._shape[0] * self._shape[1] * 4)
            else:
                file.truncate(self._shape[0] * self._shape[1] * 4)
        return self._map(self._part, shared=True)

    def commit(self, stage: int) -> None:
        self._part.replace(self._path(stage))
        if not self._keep and stage:
            self._path(stage - 1).unlink(missing_ok=True)

    def remove(self) -> None:
        for path in [*self._folder.glob(f"{self._name}-*.f32"), self._part]:
            path.unlink(missing_ok=True)

    @property
    def _part(self) -> Path:
        return self._folder / f"{self._name}.part"

    def _path(self, stage: int) -> Path:
        return self._folder / f"{self._name}-{stage:05d}.f32"

    def _map(self, path: Path, shared: bool) -> Tensor:
        count = self._shape[0] * self._shape[1]
        return torch.from_file(str(path), shared=shared, size=count, dtype=torch.float32).view(self._shape)
