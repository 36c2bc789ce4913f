"""What a compression method is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Scaling(NamedTuple):
    """The matrix S, float64 [in, in], whose product W S is truncated.

    damping: what had to be added to the eigenvalues of a singular Gram matrix, 0 for a regular one.
    """

    matrix: Tensor
    damping: float = 0.0


@dataclass(frozen=True)
class Method:
    """name: as on the command line. scaling: makes a `Scaling` of the Gram matrix X^T X of a module's inputs,
    float64 [in, in]; None for a method that needs no calibration and truncates W itself."""

    name: str
    scaling: Callable[[Tensor], Scaling] | None
