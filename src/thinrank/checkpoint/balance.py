"""Rebalancing of a factor pair by powers of two: exact, and what a cast to 16 bits needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def balancing_scale(factor_in: Tensor, factor_outs: Sequence[Tensor]) -> Tensor:
    """Powers of two, float32 [rank], that make both sides' root mean squares equal within a factor of two.

    Multiply the rows of factor_in [rank, in] and divide the columns of every factor_out [out, rank] by it:
    the product stays the same to the last bit. SVD-LLM's whitened factors, for one, differ by the square
    root of the number of calibration tokens, and float16 would lose the small side's digits.
    """
    rms_in = factor_in.float().square().mean(1).sqrt()
    rms_out = torch.stack([factor.float().square().mean(0) for factor in factor_outs]).mean(0).sqrt()
    exponent = torch.log2(rms_out / rms_in) / 2
    # A zero row or column has no balance; leave it alone.
    return torch.exp2(torch.where(exponent.isfinite(), exponent, 0.0).round())
