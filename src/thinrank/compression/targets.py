"""Which checkpoints a run makes, and which of them it has made itself before it was killed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.save import work_path
from ..errors import OptionError, ThinrankError
from .store import fingerprint

#: Stands for the ratio in a destination.
PLACEHOLDER = "{keep_ratio}"


@dataclass(frozen=True)
class Target:
    """One checkpoint to make. keep_ratio: None where a file has the ranks."""

    keep_ratio: float | None
    destination: Path


@dataclass(frozen=True)
class Run:
    """Tells a destination that this very run wrote before it was killed from one that was there already.

    beside: the path beside which its intermediate files lie. key: of all options.
    """

    beside: Path
    force: bool
    key: str

    @contextmanager
    def writing(self, destination: Path) -> Iterator[None]:
        """Note that the destination, which is free or may be replaced, is this run's, if it comes about."""
        self._mark(destination).touch()
        try:
            yield
        except ThinrankError:
            if not destination.exists():
                self._mark(destination).unlink()
            raise

    def may_replace(self, destination: Path) -> bool:
        return self.force or self._mark(destination).exists()

    def _mark(self, destination: Path) -> Path:
        return work_path(self.beside) / f"writing-{fingerprint(self.key, str(destination))}"


def work_beside(destination: str) -> Path:
    """Beside what the intermediate files lie: the destination, or, where the name of a folder above it holds
    {keep_ratio}, a name for all of them there, so that no folder of that name is made."""
    parts = Path(destination).parts
    first = next((number for number, part in enumerate(parts) if PLACEHOLDER in part), len(parts) - 1)
    return Path(*parts[:first], "-".join(parts[first:]))


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
    if len(ratios) > 1 and PLACEHOLDER not in destination:
        raise OptionError(
            f"{len(ratios)} keep_ratios would all be written to {destination}",
            f"put {PLACEHOLDER} into the destination, like model-{PLACEHOLDER}",
        )
    targets = [Target(ratio, Path(destination.replace(PLACEHOLDER, f"{ratio:g}"))) for ratio in ratios]
    if len({target.destination for target in targets}) < len(targets):
        raise OptionError("a keep_ratio is given twice", "name each once; six digits of it count")
    return targets
