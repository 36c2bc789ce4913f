"""Basis Sharing: consecutive layers share one factor_in (Wang et al., arXiv 2410.03765, section 3).

The weights of a group lie one below the other and are truncated together, whitened by the sum of the group's
Gram matrices; every layer keeps its own factor_out. At equal parameters the shared basis has a higher rank.
By default, as in the paper, the projections that read the residual stream are shared; o_proj and down_proj,
which read what is each layer's own, are not. Departure: singular matrices are damped as in svd-llm.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import OptionError, unknown_name
from ..method import Method
from ..statistics import PROJECTIONS
from .svd_llm import WHITENED, whiten

SHARED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def basis_sharing(group_size: int = 2, shared: Sequence[str] = SHARED) -> Method:
    """group_size: layers of a group; the last group may be smaller. shared: names of projections."""
    if group_size < 1:
        raise OptionError(f"group_size is {group_size}", "it must be at least 1")
    for name in shared:
        if name not in PROJECTIONS:
            raise unknown_name("projection", name, list(PROJECTIONS))
    return Method("basis-sharing", WHITENED, whiten, group_size=group_size, shared=tuple(shared))
