"""What every benchmark reports: where it ran, what was checked, the rows; and the file that they go to."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from ..errors import OptionError, OutputError
from ..version import __version__
from ..whole_file import write_whole
from .gate import Check
from .shapes import BenchModel
from .timing import Nvml

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Row = TypeVar("Row", bound=DataclassInstance)
else:
    Row = TypeVar("Row")


@dataclass(frozen=True)
class Report(Generic[Row]):
    """header: where, with what and how it was measured. checks: the correctness gate. rows: the results."""

    header: dict[str, Any]
    checks: tuple[Check, ...]
    rows: tuple[Row, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "header": self.header,
            "checks": [check.to_json() for check in self.checks],
            "rows": [asdict(row) for row in self.rows],
        }


class ReportFile(Generic[Row]):
    """A report that grows; its file is kept up to date, so that a run that ends early has lost nothing."""

    def __init__(self, path: str | Path | None, header: dict[str, Any]):
        """path: None for no file. Raises OutputError when the file's folder does not exist."""
        self.path = None if path is None else Path(path)
        self.header = header
        self._checks: list[Check] = []
        self._rows: list[Row] = []
        if self.path is not None and (self.path.is_dir() or not self.path.parent.is_dir()):
            raise OutputError(f"cannot write {self.path}", "name a file in a folder that exists")

    @property
    def report(self) -> Report[Row]:
        return Report(self.header, tuple(self._checks), tuple(self._rows))

    def add(self, *, checks: Sequence[Check] = (), rows: Sequence[Row] = ()) -> None:
        """Raises OutputError when the file cannot be written."""
        self._checks += checks
        self._rows += rows
        if self.path is None:
            return
        text = json.dumps(self.report.to_json(), indent=1, allow_nan=False) + "\n"
        try:
            write_whole(self.path, text)
        except OSError as error:
            raise OutputError(f"cannot write {self.path}: {error.strerror}", "check --output-json") from error


def header(
    benchmark: str, model: BenchModel, nvml: Nvml, command: str | None, **settings: Any
) -> dict[str, Any]:
    """Machine, versions and settings of a run. The bandwidth is None until it is measured."""
    on_gpu = model.device.type == "cuda"
    return {
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "device": torch.cuda.get_device_name(model.device) if on_gpu else f"cpu {platform.machine()}",
        "driver": nvml.driver(),
        "cuda": torch.version.cuda if on_gpu else None,
        "python": platform.python_version(),
        "thinrank": __version__,
        **{name: _version(name) for name in ("torch", "triton", "transformers")},
        "commit": _commit(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "seed": model.seed,
        **settings,
        "read_bandwidth_bytes_per_s": None,
    }


def at_least(least: int, **values: int) -> None:
    """Raises OptionError for a value that is less, or that 64 bits cannot hold, as torch needs it."""
    for name, value in values.items():
        if value < least:
            raise OptionError(f"{name} is {value}", f"it must be at least {least}")
        if value >= 2**63:
            raise OptionError(f"{name} is {value}", "it must be less than 2^63")


def file_prefix(device: torch.device) -> str:
    """How names of a device's result files begin: "h200", "cpu"."""
    if device.type == "cpu":
        return "cpu"
    return torch.cuda.get_device_name(device).removeprefix("NVIDIA ").replace(" ", "-").lower()


def require_gpu(command: str, device: torch.device) -> None:
    """Raises OptionError for a command that measures kernels and graphs, on a device that has neither."""
    if device.type != "cuda":
        raise OptionError(
            f"{command} measures GPU kernels and CUDA graphs, and the device is {device.type}",
            "run it on a machine with an NVIDIA GPU; thinrank bench latency measures CPUs too",
        )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Of the source tree that this runs from, "-dirty" if it has changes; None for an installed package."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return f"{commit}-dirty" if git("status", "--porcelain") else commit
    except (OSError, subprocess.CalledProcessError):
        return None
