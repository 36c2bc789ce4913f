"""ASVD: input channels scaled by their activations before the SVD (Yuan et al., arXiv 2312.05821, section 3).

S = diag(mean |x|)^alpha. Departures: the truncation is exact, where the public code has a randomised SVD; the
paper's search for a ratio a module by perplexity is not part of it: `--allocate loss` does that job for
every method.
"""

from __future__ import annotations

from functools import partial

import torch

from ...errors import OptionError
from ..method import Inputs, Method, Scaling


def asvd(alpha: float = 0.5) -> Method:
    """alpha: 0 is the plain SVD, 1 the full scale of the activations; the paper has 0.5."""
    if not 0 <= alpha <= 1:
        raise OptionError(f"alpha is {alpha:g}", "it must be 0 to 1")
    return Method("asvd", f"abs_mean ** {alpha!r}", partial(activation_scaling, alpha))


def activation_scaling(alpha: float, inputs: Inputs) -> Scaling:
    """A dead channel gets 1e-6 of the mean, as in the public code: its weights are cut first."""
    mean = inputs.abs_mean
    floor = max(1e-6 * mean.mean().item(), torch.finfo(torch.float64).tiny)
    return Scaling(torch.diag(mean.clamp(min=floor) ** alpha))
