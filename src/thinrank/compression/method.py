"""What a compression method is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from .ranks import Allocation


class Inputs(NamedTuple):
    """What is known of a module's inputs X: X^T X, float64 [in, in], and the mean of |X|, float64 [in]."""

    gram: Tensor
    abs_mean: Tensor


class Scaling(NamedTuple):
    """The matrix S, float64 [in, in], whose product W S is truncated.

    damping: what had to be added to the eigenvalues of a singular Gram matrix, 0 for a regular one.
    """

    matrix: Tensor
    damping: float = 0.0


@dataclass(frozen=True)
class Method:
    """name: as on the command line. scaling: None for a method that needs no calibration and truncates W
    itself. allocation: how a keep_ratio becomes ranks; None: the same for every module. group_size, shared: so
    many consecutive layers share the factor_in of these projections. identity: says what `scaling` computes;
    methods with the same one share their decompositions.
    """

    name: str
    identity: str
    scaling: Callable[[Inputs], Scaling] | None
    allocation: Allocation | None = None
    group_size: int = 1
    shared: tuple[str, ...] = ()
