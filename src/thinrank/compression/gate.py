"""Perplexity of the source and of what it was compressed to, and the limit that `--max-perplexity-increase` sets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..builtin_text import held_out_text
from ..checkpoint.load import OpenCheckpoint, open_checkpoint
from ..errors import OptionError
from ..model.batch import check_token_ids
from ..text import Tokenizer
from .quality import mean_loss
from .statistics import weights_of
from .texts import read_text

#: Windows that are scored: the first of the text, not overlapping, each on its own, without BOS.
WINDOWS, WINDOW = 16, 512


@dataclass(frozen=True)
class PerplexityGate:
    """sequences: int64 [windows, window]. perplexity: of the source on them. max_increase: 0.5 for one half."""

    sequences: Tensor
    perplexity: float
    max_increase: float
    device: torch.device

    @staticmethod
    def build(
        checkpoint: OpenCheckpoint, max_increase: float, text: str | Path | None, device: torch.device
    ) -> PerplexityGate:
        """text: as `read_text` has it; None: the built-in held-out text. Raises OptionError when the limit is
        negative, or the text cannot be had or is shorter than a window."""
        if not 0 <= max_increase < math.inf:
            raise OptionError(f"max_perplexity_increase is {max_increase:g}", "it must be 0 or more")
        content = held_out_text() if text is None else read_text(text)
        window = min(WINDOW, checkpoint.config.max_position_embeddings)
        ids = Tokenizer(checkpoint.path).encode_start(content, WINDOWS * window)
        windows = min(WINDOWS, len(ids) // window)
        if not windows:
            raise OptionError(
                f"the text for perplexity has {len(ids)} tokens and one window takes {window}",
                "name a longer one",
            )
        check_token_ids(ids, checkpoint.config.vocab_size)
        sequences = torch.tensor(ids[: windows * window]).view(windows, window)
        return PerplexityGate(sequences, _perplexity(checkpoint, sequences, device), max_increase, device)

    def measure(self, destination: Path) -> float:
        """Perplexity of the checkpoint that was written there."""
        return _perplexity(open_checkpoint(destination), self.sequences, self.device)

    def allows(self, perplexity: float) -> bool:
        """Whether it is within the limit; one that is not finite never is."""
        return perplexity <= self.perplexity * (1 + self.max_increase)


def _perplexity(checkpoint: OpenCheckpoint, sequences: Tensor, device: torch.device) -> float:
    loss = mean_loss(checkpoint.config, weights_of(checkpoint, device), sequences)
    # Beyond float64's range, or undefined: the worst there is, in a report a number like any other.
    return math.exp(min(loss, 700.0) if math.isfinite(loss) else 700.0)
