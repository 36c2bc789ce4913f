"""AdaSVD's ratio for each layer by its importance (Li et al., arXiv 2502.01403, section 3.3: adaCR).

With I a layer's importance and I_n = I / mean(I), a layer keeps m + I_n (t - m), where t is the target ratio
and m a minimum. Truncation is whitened as in svd-llm. Departures: a layer's importance is 1 - cosine between
the residual streams before and after it, because the cosine itself gives the layers that change the stream
most the least; ratios are clipped at 1 and the rest shifted so that the budget is met. The paper's adaComp
alternates least squares for the two factors to repair what its plain SVD loses: exact whitening is already at
the optimum of that problem, so there is nothing to alternate; `--update` refits to the compressed model.
"""

from __future__ import annotations

from ...errors import OptionError
from ..method import Method
from ..ranks import RankProblem, Ranks, ranks_within, spread
from .svd_llm import WHITENED, whiten


def adasvd(min_ratio: float = 0.9) -> Method:
    """min_ratio: what the least important layer keeps, relative to the target; 1 is uniform."""
    if not 0 < min_ratio <= 1:
        raise OptionError(f"min_ratio is {min_ratio:g}", "it must be above 0, to 1")

    def by_importance(problem: RankProblem) -> Ranks:
        statistics = problem.measurements.statistics
        layers = {layer for unit in problem.units for layer in unit.layers}
        importance = {layer: max(1 - statistics.similarity(layer), 0.0) for layer in layers}
        mean = sum(importance.values()) / len(importance)
        relative = {layer: value / mean if mean else 1.0 for layer, value in importance.items()}
        low = min_ratio * problem.keep_ratio
        ratios = spread(
            problem.units,
            problem.keep_ratio,
            lambda unit, scale: low + scale * relative[unit.layers[0]] * (problem.keep_ratio - low),
        )
        return ranks_within(problem, ratios)

    return Method("adasvd", WHITENED, whiten, by_importance)
