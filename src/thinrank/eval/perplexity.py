"""Perplexity of a model on a text, with its protocol stated beside the number."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm

from ..errors import OptionError, ThinrankError, unknown_name
from ..llm import LLM
from ..model.batch import ForwardBatch, check_token_ids
from .forcing import decode_logits, max_rows

#: Windows that run together.
BATCH_SIZE = 8


@dataclass(frozen=True)
class Perplexity:
    """value = exp(mean negative log-likelihood) over `predictions` tokens.

    They are scored in `windows` windows of `window` tokens that start every `stride` tokens, each on its own,
    without BOS, logits in float32. A window scores the tokens that no window before it has scored, except
    that its own first token is never scored. tokens: of the text from the first window to the last. path:
    "prefill" or "decode".
    """

    value: float
    windows: int
    window: int
    stride: int
    tokens: int
    predictions: int
    path: str = "prefill"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@torch.inference_mode()
def perplexity(
    llm: LLM,
    text: str,
    *,
    window: int = 512,
    stride: int | None = None,
    max_windows: int | None = None,
    path: str = "prefill",
    progress: bool = True,
) -> Perplexity:
    """Perplexity of `llm` on `text`.

    stride: None for windows that do not overlap. max_windows: score only the first ones; None: all that are
    complete. path: "prefill" runs a window in one pass; "decode" feeds its tokens one by one through the
    decode kernels and the graph, which takes a pass a token.

    Raises OptionError when the text is shorter than one window, the window longer than the model allows, or
    an option is unknown or out of range; RequestError when the tokenizer has ids that the model has not;
    ThinrankError when the model computes no finite logits.
    """
    if path not in PATHS:
        raise unknown_name("path", path, list(PATHS))
    stride = window if stride is None else stride
    if window < 2 or not 1 <= stride <= window or (max_windows is not None and max_windows < 1):
        raise OptionError(
            f"window is {window}, stride {stride}, max_windows {max_windows}",
            "window must be at least 2, stride from 1 to window, max_windows at least 1",
        )
    if window > llm.engine.max_model_len:
        raise OptionError(
            f"a window of {window} tokens is longer than the model's {llm.engine.max_model_len}",
            "use a shorter window",
        )
    if max_windows is None:
        token_ids = llm.tokenizer.encode(text, add_special_tokens=False)
    else:
        token_ids = llm.tokenizer.encode_start(text, window + (max_windows - 1) * stride)
    if len(token_ids) < window:
        raise OptionError(
            f"the text has {len(token_ids)} tokens and one window takes {window}", "use a longer text"
        )
    check_token_ids(token_ids, llm.config.vocab_size)
    ids = torch.tensor(token_ids).unfold(0, window, stride)[:max_windows]
    # The first window scores all that it can, a later one only what it adds.
    unscored = max(window - stride - 1, 0)
    total = 0.0
    for index, losses in enumerate(
        tqdm(PATHS[path](llm, ids), desc="Perplexity", total=len(ids), disable=not progress, leave=False)
    ):
        total += float(losses[unscored if index else 0 :].double().sum())
    if not math.isfinite(total):
        raise ThinrankError(
            "the model computed infinite or undefined logits", "try dtype float32, or check the checkpoint"
        )
    predictions = len(ids) * (window - 1) - (len(ids) - 1) * unscored
    covered = (len(ids) - 1) * stride + window
    return Perplexity(math.exp(total / predictions), len(ids), window, stride, covered, predictions, path)


def _prefill(llm: LLM, windows: Tensor) -> Iterator[Tensor]:
    """Negative log-likelihoods of each window's tokens but the first: float32 [window - 1].

    windows: int64 [windows, window].
    """
    decoder = llm.engine.decoder
    for group in windows.split(BATCH_SIZE):
        ids = group.to(decoder.device)
        hidden = decoder.hidden(ForwardBatch.whole_sequences(list(ids), decoder.device))
        # One window at a time: logits of a large vocabulary are the biggest tensor of all.
        for row, states in zip(ids, hidden.split(ids.shape[1]), strict=True):
            yield cross_entropy(decoder.head(states[:-1]), row[1:], reduction="none")


def _decode(llm: LLM, windows: Tensor) -> Iterator[Tensor]:
    """As `_prefill`; the first token is where the sequence starts, and no token is prefilled."""
    engine = llm.engine
    rows = min(BATCH_SIZE, max_rows(engine, windows.shape[1]))
    if not rows:
        raise OptionError(
            f"a window of {windows.shape[1]} tokens does not fit into the KV cache", "use a shorter window"
        )
    for group in windows.split(rows):
        targets = group[:, 1:].to(engine.decoder.device)
        steps = decode_logits(engine, group[:, :1].tolist(), group[:, 1:].tolist())
        losses = [
            cross_entropy(logits, target, reduction="none")
            for logits, target in zip(steps, targets.unbind(1), strict=True)
        ]
        yield from torch.stack(losses, dim=1)


PATHS: dict[str, Callable[[LLM, Tensor], Iterator[Tensor]]] = {"prefill": _prefill, "decode": _decode}
