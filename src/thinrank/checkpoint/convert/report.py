"""What a conversion did: for people as text, for programs as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ConversionReport:
    """Facts about one finished conversion.

    sha256: file name -> digest of the source's weights. ranks: module -> rank as stored. densified:
    module -> rank of pairs stored dense because they saved nothing. parameters: of the whole model as
    stored; dense_parameters: of the same model without factors. keep_ratio: share of the parameters of
    the factored modules that is kept, None if there are none. dtypes: dtype -> number of parameters.
    """

    family: str
    source: str
    destination: str
    architecture: str
    base_model: str | None
    ranks: dict[str, int]
    densified: dict[str, int]
    tied_factors: int
    parameters: int
    dense_parameters: int
    keep_ratio: float | None
    dtypes: dict[str, int]
    from_base: list[str]
    dropped: list[str]
    tokenizer: bool
    sha256: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """The report as short lines of text."""
        share = self.parameters / self.dense_parameters
        lines = [
            f"family       {self.family} ({self.architecture})",
            f"written to   {self.destination}",
            f"parameters   {self.parameters:,} of {self.dense_parameters:,} ({share:.1%})",
            f"dtypes       {', '.join(f'{name}: {count:,}' for name, count in self.dtypes.items())}",
        ]
        if self.ranks:
            lines.append(f"low-rank     {len(self.ranks)} modules, keep_ratio {self.keep_ratio:.3f}")
            lines += [f"  {name:<10} {ranks}" for name, ranks in _ranks_by_projection(self.ranks).items()]
        if self.tied_factors:
            lines.append(f"shared       {self.tied_factors} modules use another layer's factor_in")
        if self.densified:
            lines.append(f"densified    {len(self.densified)} modules whose factors saved nothing:")
            lines += [f"  {name} (rank {rank})" for name, rank in self.densified.items()]
        if self.from_base:
            lines.append(
                f"from base    {', '.join(self.from_base[:6])}{' ...' if self.from_base[6:] else ''}"
            )
        lines += [f"dropped      {item}" for item in self.dropped]
        if not self.tokenizer:
            lines.append("tokenizer    none in the source; name the dense model with --base to add one")
        lines += [f"sha256       {digest}  {name}" for name, digest in self.sha256.items()]
        return lines


def _ranks_by_projection(ranks: dict[str, int]) -> dict[str, str]:
    """ "q_proj" -> "41 (x3), 47": the ranks of all layers, most frequent first."""
    counts: dict[str, Counter[int]] = {}
    for module, rank in ranks.items():
        counts.setdefault(module.rpartition(".")[2], Counter())[rank] += 1
    return {
        name: ", ".join(f"{rank} (x{n})" if n > 1 else str(rank) for rank, n in counter.most_common())
        for name, counter in counts.items()
    }
