"""What a compression did: for people as text, for programs as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class CompressionReport:
    """Facts about one compressed checkpoint.

    keep_ratio: as asked for; ranks: module -> rank. parameters, dense_parameters: of the whole model after
    and before. relative_errors: module -> ||(W - W') S|| / ||W S||, with S the method's scaling: how much of
    the module's output on the calibration data is lost. calibration_tokens: 0 where none are needed.
    """

    method: str
    keep_ratio: float
    source: str
    destination: str
    ranks: dict[str, int]
    parameters: int
    dense_parameters: int
    relative_errors: dict[str, float]
    calibration_tokens: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """The report as short lines of text."""
        lines = [
            f"method       {self.method}, keep_ratio {self.keep_ratio:g}",
            f"written to   {self.destination}",
            f"parameters   {self.parameters:,} of {self.dense_parameters:,}"
            f" ({self.parameters / self.dense_parameters:.1%})",
            f"modules      {len(self.ranks)} low-rank",
        ]
        if self.calibration_tokens:
            lines.append(f"calibration  {self.calibration_tokens:,} tokens")
        if self.relative_errors:
            errors = sorted(self.relative_errors.items(), key=lambda item: item[1])
            lines.append(
                f"output error {errors[len(errors) // 2][1]:.3f} median, {errors[-1][1]:.3f} worst"
                f" ({errors[-1][0]})"
            )
        lines.append(f"time         {self.seconds:.0f} s")
        return lines
