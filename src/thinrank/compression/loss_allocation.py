"""`--allocate loss`: ranks over all units together, by the loss that every truncation is measured to cost.

For each unit and every rank the growth of the model's loss is estimated from `sensitivity` (a quadratic form
in the change of the weight, so all ranks follow from one decomposition). Every unit may also stay dense, which
costs no loss. The budget goes where a parameter buys most: the lower convex hulls of the units' curves are
climbed in the order of their slopes, which is optimal up to the last step (Lagrangian relaxation, Shoham and
Gersho 1988). Ours; assumes that the losses of different units add up.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .ranks import RankProblem, Ranks
from .store import computed, fingerprint
from .units import Unit


class Choice(NamedTuple):
    """parameters stored and nats lost a token at one rank; rank None: dense."""

    parameters: int
    loss: float
    rank: int | None


def by_loss(problem: RankProblem) -> Ranks:
    """Ranks within the budget of keep_ratio times the parameters of all units."""
    choices = {unit: _choices(unit, _curve(problem, unit), problem.multiple) for unit in problem.units}
    budget = int(problem.keep_ratio * sum(unit.dense_parameters for unit in problem.units))
    chosen = allocate(choices, budget)
    return {unit: choice.rank for unit, choice in chosen.items() if choice.rank is not None}


def _curve(problem: RankProblem, unit: Unit) -> Tensor:
    """`loss_curve` of a unit, kept in a file: it serves every ratio."""
    spectra, statistics = problem.spectra, problem.measurements.statistics
    sensitivity = problem.measurements.sensitivity
    folder = problem.measurements.root / f"losses-{fingerprint(spectra.key, statistics.key)}"
    folder.mkdir(parents=True, exist_ok=True)

    def compute() -> dict[str, Tensor]:
        grams = [statistics.gram(module) / statistics.tokens for module in unit.modules]
        fishers = [sensitivity.fisher(module) for module in unit.modules]
        return {"losses": loss_curve(spectra.vectors(unit), spectra.weight(unit), fishers, grams)}

    return computed(folder / unit.file_name, compute)["losses"].read()


def loss_curve(vectors: Tensor, weight: Tensor, fishers: list[Tensor], grams: list[Tensor]) -> Tensor:
    """Loss at rank 0 ... k: float64 [k + 1], from 1/2 sum over modules of tr(F D G D^T).

    vectors [modules * out, k], weight [modules * out, in]; fishers [out, out] and grams [in, in], one a
    module. What a cut at rank r loses is D = sum over j >= r of u_j (u_j^T W), so with A = U^T F U and
    B = (U^T W) G (U^T W)^T the trace is the sum of A * B over the block of rows and columns from r on.
    """
    projected = vectors.T @ weight
    out_features = len(vectors) // len(fishers)
    products = torch.zeros(vectors.shape[1], vectors.shape[1], dtype=torch.float64)
    for rows, fisher, gram in zip(vectors.split(out_features), fishers, grams, strict=True):
        outer = rows.T @ fisher.to(rows) @ rows
        inner = projected @ gram.to(projected) @ projected.T
        products += (outer * inner).double().cpu()
    # The block from r on gains, when r goes down by one, row r and column r of the lower right.
    columns = products.flip(1).cumsum(1).flip(1)  # [r, j] -> sum of row r over columns from j on
    rows_sum = products.flip(0).cumsum(0).flip(0)
    gains = columns.diagonal() + rows_sum.diagonal() - products.diagonal()
    tails = torch.cat([gains.flip(0).cumsum(0).flip(0), torch.zeros(1, dtype=torch.float64)])
    return tails.clamp(min=0) / 2


def _choices(unit: Unit, curve: Tensor, multiple: int) -> list[Choice]:
    losses = curve.tolist()
    ranks = range(multiple, unit.max_rank + 1, multiple)
    low_rank = [
        Choice(unit.parameters(rank), losses[min(rank, len(losses) - 1)], rank)
        for rank in ranks
        if unit.parameters(rank) < unit.dense_parameters
    ]
    return [*low_rank, Choice(unit.dense_parameters, 0.0, None)]


def allocate(choices: dict[Unit, list[Choice]], budget: int) -> dict[Unit, Choice]:
    """One choice a unit, of least total loss as far as the hulls tell, of at most `budget` parameters if that
    is possible at all. choices: by rising parameters."""
    hulls = {unit: _lower_hull(options) for unit, options in choices.items()}
    chosen = {unit: hull[0] for unit, hull in hulls.items()}
    left = budget - sum(choice.parameters for choice in chosen.values())
    steps = [
        ((before.loss - after.loss) / (after.parameters - before.parameters), number, position)
        for number, hull in enumerate(hulls.values())
        for position, (before, after) in enumerate(pairwise(hull))
    ]
    units = list(hulls)
    stopped = set()
    for _, number, position in sorted(steps, key=lambda step: (-step[0], step[1], step[2])):
        unit = units[number]
        after = hulls[unit][position + 1]
        needed = after.parameters - chosen[unit].parameters
        if unit in stopped or needed > left:
            stopped.add(unit)
            continue
        chosen[unit], left = after, left - needed
    for unit in sorted(units, key=lambda unit: -chosen[unit].loss):
        # The remainder, smaller than a step of a hull, still buys a rank here or there.
        fitting = [
            choice
            for choice in choices[unit]
            if 0 < choice.parameters - chosen[unit].parameters <= left and choice.loss < chosen[unit].loss
        ]
        if fitting:
            left -= fitting[-1].parameters - chosen[unit].parameters
            chosen[unit] = fitting[-1]
    return chosen


def _lower_hull(options: list[Choice]) -> list[Choice]:
    """The choices on the lower convex hull of loss over parameters, from the cheapest to the best."""
    hull: list[Choice] = []
    for choice in options:
        while hull and hull[-1].loss <= choice.loss and hull[-1].parameters <= choice.parameters:
            break
        else:
            while len(hull) >= 2 and _is_above(hull[-2], hull[-1], choice):
                hull.pop()
            hull.append(choice)
    return hull


def _is_above(first: Choice, middle: Choice, last: Choice) -> bool:
    """Whether the middle choice lies on or above the line between the others."""
    return (middle.loss - first.loss) * (last.parameters - first.parameters) >= (last.loss - first.loss) * (
        middle.parameters - first.parameters
    )
