"""What a compression did: for people as text, for programs as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class CompressionReport:
    """Facts about one compressed checkpoint.

    keep_ratio: as asked for, None if ranks were given; kept_ratio: share of the parameters of the modules to
    factor that is stored. ranks: module -> rank. parameters, dense_parameters: of the whole model after and
    before. relative_errors: module -> ||(W - W') S|| / ||W S||, with S the method's scaling: how much of the
    module's output on the calibration data is lost. calibration_tokens: 0 where none are needed. update_losses:
    of held-out calibration text in nats a token, before and after the update, which was dropped if that is not
    less; None: no update was asked for. perplexity, dense_perplexity, within_limit: None if no limit was set.
    """

    method: str
    keep_ratio: float | None
    kept_ratio: float
    source: str
    destination: str
    ranks: dict[str, int]
    parameters: int
    dense_parameters: int
    relative_errors: dict[str, float]
    calibration_tokens: int
    update_losses: tuple[float, float] | None
    perplexity: float | None
    dense_perplexity: float | None
    within_limit: bool | None
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """The report as short lines of text."""
        lines = [
            f"method       {self.method}, keep_ratio"
            f" {'by file' if self.keep_ratio is None else f'{self.keep_ratio:g}'}, kept {self.kept_ratio:.4f}",
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
        if self.update_losses:
            before, after = self.update_losses
            lines.append(
                f"update       held-out loss {before:.4f} -> {after:.4f}, {'kept' if after < before else 'dropped'}"
            )
        if self.perplexity is not None and self.dense_perplexity is not None:
            lines.append(
                f"perplexity   {self.perplexity:.3f}, dense {self.dense_perplexity:.3f}"
                f" ({self.perplexity / self.dense_perplexity - 1:+.1%})"
            )
        lines.append(f"time         {self.seconds:.0f} s")
        return lines
