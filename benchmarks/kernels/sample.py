"""python benchmarks/kernels/sample.py: what a sampled token costs beside a greedy one, by filter.

Random logits of a standard deviation of 3, which is about what a language model's have. An error is a token that the
reference would not have drawn.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from harness import DEVICE, Case, main

from thinrank.kernels import step_reference
from thinrank.kernels.sample import RowSampling, SampleWorkspace, sample

#: As in greedy.py.
SIZES = [(vocab_size, batch) for vocab_size in (32000, 128256, 152064, 262144) for batch in (1, 2, 4, 8)]
SMALL = [(300, 2)]

NONE: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "seed": 1, "stream": 0}
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 1": {},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 50": {"top_k": 50},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 50, top_p 0.95": {"top_k": 50, "top_p": 0.95},
    "temperature 100, top_k 50, top_p 0.95": {"temperature": 100.0, "top_k": 50, "top_p": 0.95},
}


def cases(vocab_size: int, batch: int) -> Iterator[Case]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    logits = 3 * torch.randn(batch, vocab_size, device=DEVICE, generator=generator)
    token_ids = logits.argmax(-1)
    positions = torch.arange(9, 9 + batch, dtype=torch.int32, device=DEVICE)
    history = token_ids.repeat(8, 1)
    workspace = SampleWorkspace.allocate(batch, vocab_size, DEVICE)
    for what, settings in SETTINGS.items():
        rows = RowSampling.allocate(batch, DEVICE)
        rows.load(**{key: [value] * batch for key, value in (NONE | settings).items()})
        arguments = (logits, token_ids, positions, history, rows)
        yield Case(
            f"sample {vocab_size} x {batch}, {what}",
            partial(sample, *arguments, workspace, pdl=False),
            partial(step_reference.sample, *arguments),
            outputs=(token_ids, history),
            nbytes=logits.nbytes,
        )


if __name__ == "__main__":
    main(cases, SIZES)
