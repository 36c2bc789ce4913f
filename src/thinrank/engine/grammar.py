"""What a grammar must be able to do so that the sampler obeys it.

The engine knows no grammar: whoever adds a request brings an object that fits.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class TokenConstraint(Protocol):
    """Which tokens may come next in one sequence. It sees every token of the output once, in order."""

    @property
    def finished(self) -> bool:
        """Whether nothing may follow; the sequence then ends with finish_reason "stop"."""

    def fill_mask(self, mask: Tensor) -> None:
        """Say what may come next, at least one token; EOS counts as a token.

        mask: int32 [ceil(vocab_size / 32)] on the CPU, zeros; bit i of element j allows token 32 * j + i.
        """

    def accept(self, token_id: int) -> None:
        """The token that was chosen, one of those that the mask allowed."""
