"""Which checkpoints a run makes, and which of them it has made itself before it was killed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.save import work_path
from ..errors import OptionError
from .store import fingerprint


@dataclass(frozen=True)
class Target:
    """One checkpoint to make. keep_ratio: None where a file has the ranks."""

    keep_ratio: float | None
    destination: Path


@dataclass(frozen=True)
class Run:
    """Tells a destination that this very run wrote before it was killed from one that was there already.

    destination: as on the command line. key: of all options.
    """

    destination: Path
    force: bool
    key: str

    def begin(self, destination: Path) -> None:
        """Note that the destination, which is free or may be replaced, is about to be written."""
        self._mark(destination).touch()

    def may_replace(self, destination: Path) -> bool:
        return self.force or self._mark(destination).exists()

    def _mark(self, destination: Path) -> Path:
        return work_path(self.destination) / f"writing-{fingerprint(self.key, str(destination))}"


def targets_of(
    destination: str, keep_ratio: float | Sequence[float] | None, ranks: str | Path | None
) -> list[Target]:
    """One target a ratio, or one for a file of ranks. Raises OptionError unless ratios and destination fit."""
    if (keep_ratio is None) == (ranks is None):
        raise OptionError("exactly one of keep_ratio and ranks is needed", "name a ratio or a file of ranks")
    if keep_ratio is None:
        return [Target(None, Path(destination))]
    ratios = [float(ratio) for ratio in ([keep_ratio] if isinstance(keep_ratio, int | float) else keep_ratio)]
    if not ratios:
        raise OptionError("no keep_ratio is given", "name at least one, above 0, to 1")
    for ratio in ratios:
        if not 0 < ratio <= 1:
            raise OptionError(
                f"keep_ratio is {ratio:g}", "it is the share of parameters to keep: above 0, to 1"
            )
    if len(set(ratios)) < len(ratios):
        raise OptionError("a keep_ratio is given twice", "name each once")
    if len(ratios) > 1 and "{keep_ratio}" not in destination:
        raise OptionError(
            f"{len(ratios)} keep_ratios would all be written to {destination}",
            "put {keep_ratio} into the destination, like model-{keep_ratio}",
        )
    return [Target(ratio, Path(destination.replace("{keep_ratio}", f"{ratio:g}"))) for ratio in ratios]
