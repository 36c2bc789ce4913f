"""What a row of logits should be drawn by, by a sort, in float64. Shared by the tests of both samplers."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def distribution(logits: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """Probabilities of a row's tokens under its temperature and one of top_k, top_p and min_p; no ties."""
    probs = (logits.double() / settings.get("temperature", 1)).softmax(0)
    order = probs.argsort(descending=True)
    keep = torch.ones_like(probs, dtype=torch.bool)
    if "top_k" in settings:
        keep = probs >= probs[order[settings["top_k"] - 1]]
    if "top_p" in settings:
        keep[order] = probs[order].cumsum(0) - probs[order] < settings["top_p"]
    if "min_p" in settings:
        keep = probs >= settings["min_p"] * probs.max()
    return torch.where(keep, probs, 0.0) / probs[keep].sum()


def assert_drawn_from(tokens: Sequence[int], logits: Tensor, settings: Mapping[str, Any]) -> None:
    """Frequencies within five standard deviations, and never a token that a filter takes out."""
    probs, count = distribution(logits, settings), len(tokens)
    drawn = torch.tensor(tokens).bincount(minlength=len(probs)) / count
    too_far = (drawn - probs).abs() > 5 * (probs * (1 - probs) / count).sqrt()
    assert not too_far.any(), too_far.nonzero()
