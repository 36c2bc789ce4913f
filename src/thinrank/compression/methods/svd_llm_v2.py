"""SVD-LLM v2: whitening by an eigendecomposition, and a ratio for each matrix by its loss
(Wang et al., arXiv 2503.12340, sections 3.1 and 3.2).

S = Q sqrt(L) of the Gram matrix Q L Q^T. It spans the same ellipsoid as v1's Cholesky factor, so where the
matrix is regular the truncation is the same; singular matrices need no special treatment.

Departures in the ratios. In the paper the matrices of one type (all q_proj, ...) divide their budget, and the
removed share of each goes with 1 / log of the norm of the error that the uniform ratio would cost it. On
SmolLM2-135M at 0.8 that is worse than the uniform ratio (perplexity 24.73 against 24.36). Here the matrices of one
layer divide their budget, and the removed share goes with 1 / the relative error. Shares are clipped so that a
matrix keeps 1 % at least, and the rest shifted so that the budget of each layer is met.
"""

from __future__ import annotations

import torch

from ..method import Inputs, Method, Scaling
from ..ranks import RankProblem, Ranks, ranks_within, spread
from ..units import Unit
from .svd_llm import DAMPING

#: Smaller relative errors count as this, so that a matrix without loss does not take the whole cut.
LEAST_LOSS = 1e-3


def _scaling(inputs: Inputs) -> Scaling:
    """S with S S^T = gram. A singular matrix is damped as svd-llm does, and reported."""
    eigenvalues, eigenvectors = torch.linalg.eigh(inputs.gram)
    damping = 0.0
    if eigenvalues[0] <= len(eigenvalues) * torch.finfo(torch.float64).eps * eigenvalues[-1]:
        damping = max(DAMPING * eigenvalues.mean().item(), torch.finfo(torch.float64).tiny)
    return Scaling(eigenvectors * (eigenvalues.clamp(min=0) + damping).sqrt(), damping)


def by_layer(problem: RankProblem) -> Ranks:
    """A ratio for each unit by what the uniform ratio would cost it; the units of a layer share a budget."""
    removed = {unit: 1 / max(_loss(problem, unit), LEAST_LOSS) for unit in problem.units}
    ratios: dict[Unit, float] = {}
    for layer in dict.fromkeys(unit.layers[0] for unit in problem.units):
        units = [unit for unit in problem.units if unit.layers[0] == layer]
        ratios |= spread(units, problem.keep_ratio, lambda unit, scale: 1 - scale * removed[unit])
    return ranks_within(problem, {unit: ratios[unit] for unit in problem.units})


def _loss(problem: RankProblem, unit: Unit) -> float:
    """||(W - W') X|| / ||W X||, Frobenius, at the uniform ratio."""
    return problem.spectra.relative_error(unit, unit.rank_for(problem.keep_ratio))


def svd_llm_v2() -> Method:
    return Method("svd-llm-v2", "eigh", _scaling, by_layer)
