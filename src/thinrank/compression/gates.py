"""Smooth gates over the singular directions of units: the cut of a decomposition as something to differentiate by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from .ranks import SMALLEST_RATIO, RankProblem, Ranks, ranks_within, spread
from .units import Unit

#: Bounds of what the gradients of a nearly closed choice are divided by.
LEAST_CUT, LEAST_DIFFERENCE = 0.2, 0.05


def truncation(rank: Tensor, count: int, width: Tensor | float) -> Tensor:
    """The paper's smooth cut: 0.5 tanh((rank + 0.5 - i) / width) + 0.5 for i from 1 to count, like `rank`, [count].

    The half puts the middle of the slope between direction `rank`, which is kept, and the next one, which is not.
    """
    directions = torch.arange(1, count + 1, dtype=rank.dtype, device=rank.device)
    return 0.5 * torch.tanh((rank + 0.5 - directions) / width) + 0.5


@dataclass(frozen=True, eq=False)
class GatedLinear:
    """y = factor_out @ (gates * (factor_in @ x)) + bias: all directions of a decomposition, each with its gate.

    factor_in [k, in], factor_out [out, k], bias [out] or None; gates [k], which require gradients.
    """

    factor_in: Tensor
    factor_out: Tensor
    gates: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return linear(linear(x, self.factor_in) * self.gates, self.factor_out, self.bias)

    @property
    def gradients(self) -> Tensor:
        """What backward passes have summed by the gates: [k]."""
        assert self.gates.grad is not None, "no backward pass has come by"
        return self.gates.grad


@dataclass(frozen=True, eq=False)
class Gates:
    """What each unit keeps, as two numbers that parameters can be traded by. float64 [units] both.

    shares, SMALLEST_RATIO to 1: the rank of the unit, relative to the rank that costs as much as the dense weights.
    dense, 0 to 1: how far the unit goes back to the dense weights. The gates are 1 - sqrt(1 - dense) (1 - cut):
    where the loss is quadratic in what is cut off, it is linear in `dense`, as are the parameters kept. So the
    gradient says of any mixture of a cut and the dense weights which of the two is the better.
    """

    units: Sequence[Unit]
    shares: Tensor
    dense: Tensor

    @staticmethod
    def within(units: Sequence[Unit], keep_ratio: float) -> Gates:
        """Every unit alike: shares of keep_ratio^2, and as much of the dense weights as makes that keep_ratio."""
        shares = torch.full((len(units),), keep_ratio**2, dtype=torch.float64)
        return Gates(units, shares, (keep_ratio - shares) / (1 - shares)).scaled_to(keep_ratio)

    @property
    def parameters(self) -> Tensor:
        """Dense parameters of each unit: float64 [units]."""
        return torch.tensor([unit.dense_parameters for unit in self.units], dtype=torch.float64)

    @property
    def kept(self) -> Tensor:
        """The share of its parameters that each unit keeps: float64 [units]."""
        return (1 - self.dense) * self.shares + self.dense

    def values(self, sharpness: float) -> list[Tensor]:
        """The gates of each unit: float64 [k]. sharpness: the slope of a cut takes 1 / sharpness of the directions."""
        return self._values(self.shares, (1 - self.dense).sqrt(), sharpness)

    def prices(self, sharpness: float, gradients: Sequence[Tensor]) -> Tensor:
        """What the loss grows by for each parameter that the share (first row), or the dense part (second), adds.

        gradients: of the loss by each unit's `values`. Returns float64 [2, units], mostly negative.
        """
        shares, cut = self.shares.clone().requires_grad_(), (1 - self.dense).sqrt().requires_grad_()
        with torch.enable_grad():
            gates = torch.cat(self._values(shares, cut, sharpness))
        by_share, by_cut = torch.autograd.grad(gates, (shares, cut), torch.cat(list(gradients)).to(gates))
        strength = cut.detach().clamp(min=LEAST_CUT)
        by_dense = by_cut / (-2 * strength)
        differences = torch.stack([strength.square(), (1 - self.shares).clamp(min=LEAST_DIFFERENCE)])
        return torch.stack([by_share, by_dense]) / (self.parameters * differences)

    def moved(self, by: Tensor, keep_ratio: float) -> Gates:
        """Add `by`, [2, units], to shares and dense, and scale both to the budget."""
        moved = replace(self, shares=self.shares + by[0], dense=self.dense + by[1])
        return moved.scaled_to(keep_ratio)

    def scaled_to(self, keep_ratio: float) -> Gates:
        """Shares and dense times a common factor, clipped, so that all units together keep keep_ratio."""
        parameters = self.parameters

        def scaled(scale: float) -> Gates:
            shares = (self.shares * scale).clamp(SMALLEST_RATIO, 1)
            return replace(self, shares=shares, dense=(self.dense * scale).clamp(0, 1))

        low, high = 0.0, 1e3
        for _ in range(100):
            middle = (low + high) / 2
            kept = (scaled(middle).kept * parameters).sum() / parameters.sum()
            low, high = (middle, high) if kept < keep_ratio else (low, middle)
        return scaled(low)

    def ranks(self, problem: RankProblem) -> Ranks:
        """Dense where `dense` says more than one half, the most certain first, as far as the budget goes; the others
        divide the rest as their shares."""
        total = sum(unit.dense_parameters for unit in self.units)
        left, others = problem.keep_ratio * total, total
        ratios: dict[Unit, float] = {}
        for number in self.dense.argsort(descending=True, stable=True).tolist():
            unit = self.units[number]
            needed = unit.dense_parameters
            if self.dense[number] > 0.5 and left - needed >= SMALLEST_RATIO * (others - needed):
                ratios[unit], left, others = 1.0, left - needed, others - needed
        shares = dict(zip(self.units, self.shares.tolist(), strict=True))
        rest = [unit for unit in self.units if unit not in ratios]
        if rest:
            ratios |= spread(rest, left / others, lambda unit, scale: scale * shares[unit])
        return ranks_within(problem, {unit: ratios[unit] for unit in self.units})

    def _values(self, shares: Tensor, cut: Tensor, sharpness: float) -> list[Tensor]:
        return [
            1 - cut[number] * (1 - truncation(shares[number] * break_even(unit), count, count / sharpness))
            for number, unit in enumerate(self.units)
            for count in [unit.max_rank]
        ]


def break_even(unit: Unit) -> float:
    """The rank at which the factors have as many parameters as the dense weights."""
    return unit.dense_parameters / unit.parameters(1)
