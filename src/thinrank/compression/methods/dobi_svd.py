"""Dobi-SVD's ranks, learned by gradient with a smooth cut (Wang et al., arXiv 2502.02723, section 3.1).

The paper multiplies singular value i of a module's output by 0.5 tanh(b (k - i)) + 0.5 and trains k, one number a
module, with the language model's loss and a penalty on the distance from the target ratio. Departures:

- The paper decomposes the outputs of every batch and differentiates through that SVD. Here the gates stand on fixed
  directions, those of svd-llm's whitened decomposition, so that a gradient costs what a backward pass costs and no
  directions are learned. The paper's second part, incremental PCA for the weights of the learned subspaces, has no
  place then: cutting these directions is the optimum for the calibration text (`truncate`).
- The slope of a cut takes a share of the directions, first an eighth, then less; the paper's b of 10 is nearly a step.
- The budget is held exactly at every step instead of by a penalty; Adam moves on what a parameter is worth.
- A second number for each module can take it back to its dense weights (`gates.Gates`): beyond half the rank of a
  square matrix factors store more than it does. The paper avoids that by storing factors in 8 bits (its remapping),
  which is not done here.

Needs one layer in memory, and on disk the residual stream of a step's sequences before every layer.
"""

from __future__ import annotations

from ...errors import OptionError
from ..learned_ranks import learn
from ..method import Method
from ..ranks import RankProblem, Ranks
from .svd_llm import WHITENED, whiten


def dobi_svd(steps: int = 16) -> Method:
    """steps: of gradient descent, each one forward and one backward pass over 1024 calibration tokens."""
    if steps < 1:
        raise OptionError(f"steps is {steps}", "it must be at least 1")

    def by_gradient(problem: RankProblem) -> Ranks:
        return learn(problem, steps).ranks(problem)

    return Method("dobi-svd", WHITENED, whiten, by_gradient)
