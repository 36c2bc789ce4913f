"""SVD-LLM's truncation-aware data whitening (Wang et al., arXiv 2403.07378, section 3.1).

S is the Cholesky factor of the activations' Gram matrix, so that ||W S - W' S|| is the error of the layer's
output on the calibration data and its smallest singular values are what truncation loses. Departures:
where the matrix is singular (dead channels, few tokens), an eigendecomposition with damping takes the place
of Cholesky; the statistics are summed in float64. The paper's second step, the update of factor_out, is
`--update`, for this and every other method.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..method import Inputs, Method, Scaling

#: Added to the eigenvalues, relative to their mean, when the Gram matrix is singular.
DAMPING = 1e-6
#: Identity of methods that truncate the same product.
WHITENED = "cholesky"


def whitening(gram: Tensor) -> Scaling:
    """S with S S^T = gram, or gram + damping where that is singular. gram: float64 [in, in], symmetric."""
    factor, info = torch.linalg.cholesky_ex(gram)
    if info.item() == 0 and factor.isfinite().all():
        return Scaling(factor)
    eigenvalues, eigenvectors = torch.linalg.eigh(gram)
    damping = max(DAMPING * eigenvalues.mean().item(), torch.finfo(torch.float64).tiny)
    return Scaling(eigenvectors * (eigenvalues.clamp(min=0) + damping).sqrt(), damping)


def whiten(inputs: Inputs) -> Scaling:
    return whitening(inputs.gram)


def svd_llm() -> Method:
    return Method("svd-llm", WHITENED, whiten)
