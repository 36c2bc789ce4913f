"""From a keep_ratio to ranks: what an allocation is, and the rules that several of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from ..errors import OptionError
from ..text_files import read_json_file
from .measurements import Measurements
from .spectra import Spectra
from .units import Unit

#: Rank of each unit; one that is not listed stays dense.
Ranks = dict[Unit, int]

#: Ranks that a kernel likes are multiples of one of these.
RANK_MULTIPLES = (1, 8, 16, 64)

#: What a unit keeps at least where units differ in their ratios.
SMALLEST_RATIO = 0.01


@dataclass(frozen=True)
class RankProblem:
    """What an allocation decides on, and what it may look at."""

    units: Sequence[Unit]
    keep_ratio: float
    multiple: int
    spectra: Spectra
    measurements: Measurements


Allocation = Callable[[RankProblem], Ranks]


def uniform(problem: RankProblem) -> Ranks:
    """The same share of every unit's parameters."""
    return ranks_at(problem, dict.fromkeys(problem.units, problem.keep_ratio))


def ranks_at(problem: RankProblem, ratios: Mapping[Unit, float]) -> Ranks:
    """The rank of each unit at its own keep_ratio; at 1 it stays dense."""
    ranks = {}
    for unit, ratio in ratios.items():
        if ratio >= 1:
            continue
        rank = round_rank(unit, unit.rank_for(ratio), problem.multiple)
        if rank is not None:
            ranks[unit] = rank
    return ranks


def ranks_within(problem: RankProblem, ratios: Mapping[Unit, float]) -> Ranks:
    """`ranks_at`, and one rank more for the units whose rounding down lost most, as far as the budget goes."""
    ranks = ranks_at(problem, ratios)
    budget = problem.keep_ratio * sum(unit.dense_parameters for unit in problem.units)
    left = budget - sum(unit.parameters(ranks.get(unit)) for unit in problem.units)
    if problem.multiple > 1:
        return ranks

    def lost(unit: Unit) -> float:
        return ratios[unit] * unit.dense_parameters / unit.parameters(1) - ranks[unit]

    for unit in sorted(ranks, key=lost, reverse=True):
        larger = ranks[unit] + 1
        if unit.parameters(1) <= left and unit.parameters(larger) < unit.dense_parameters:
            ranks[unit], left = larger, left - unit.parameters(1)
    return ranks


def round_rank(unit: Unit, rank: int, multiple: int) -> int | None:
    """The nearest multiple, at least one; None when that would store more than the dense weights."""
    rounded = max(multiple, (rank + multiple // 2) // multiple * multiple)
    return rounded if unit.parameters(rounded) < unit.dense_parameters else None


def spread(
    units: Sequence[Unit], keep_ratio: float, pull: Callable[[Unit, float], float]
) -> dict[Unit, float]:
    """Keep_ratios `pull(unit, scale)`, clipped to SMALLEST_RATIO ... 1, whose mean over all parameters is keep_ratio.

    pull: monotone in the scale, which is found by bisection; at 0 it must not exceed the target, at 1e6 it
    must not fall short of it, or the other way round.
    """
    total = sum(unit.dense_parameters for unit in units)

    def ratios(scale: float) -> dict[Unit, float]:
        return {unit: min(1.0, max(SMALLEST_RATIO, pull(unit, scale))) for unit in units}

    def excess(scale: float) -> float:
        kept = sum(ratio * unit.dense_parameters for unit, ratio in ratios(scale).items())
        return kept / total - keep_ratio

    low, high = 0.0, 1e6
    rising = excess(high) > excess(low)
    for _ in range(200):
        middle = (low + high) / 2
        if (excess(middle) < 0) == rising:
            low = middle
        else:
            high = middle
    return ratios(high if rising else low)


def kept_ratio(units: Sequence[Unit], ranks: Ranks) -> float:
    """Share of the units' parameters that is stored."""
    kept = sum(unit.parameters(ranks.get(unit)) for unit in units)
    return kept / sum(unit.dense_parameters for unit in units)


def read_ranks(path: str | Path, units: Sequence[Unit]) -> Ranks:
    """Ranks by hand from a JSON file: {"module or glob": rank}; null, and what is not named, stays dense.

    A later entry overrides an earlier one. A unit of several modules takes the entry of its first.

    Raises OptionError when the file cannot be read, an entry matches nothing, or a rank is out of range.
    """
    entries = read_json_file(path, "the ranks", 'name a JSON file like {"*.mlp.*": 64}')
    if not isinstance(entries, Mapping):
        raise OptionError(f"{path} holds no JSON object", 'write it like {"*.mlp.*": 64}')
    ranks: Ranks = {}
    for pattern, rank in entries.items():
        matching = [unit for unit in units if fnmatchcase(unit.name, pattern)]
        if not matching:
            raise OptionError(f"{path}: no module matches {pattern!r}", f"names are like {units[0].name}")
        for unit in matching:
            if rank is None:
                ranks.pop(unit, None)
                continue
            if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= unit.max_rank:
                raise OptionError(
                    f"{path} gives {unit.name} the rank {rank!r}",
                    f"it must be an integer from 1 to {unit.max_rank}, or null for dense",
                )
            ranks[unit] = rank
    return ranks
