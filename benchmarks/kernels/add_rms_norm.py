"""python benchmarks/kernels/add_rms_norm.py: the fused norm of prefill beside PyTorch's single operations."""

from collections.abc import Iterator
from functools import partial

import torch
from harness import DEVICE, DTYPE, Case, main, nbytes

from thinrank.kernels import reference
from thinrank.kernels.add_rms_norm import add_rms_norm

EPS = 1e-5

#: Tokens and hidden_size.
SIZES = [(tokens, hidden_size) for hidden_size in (4096, 5120) for tokens in (512, 2048, 8192)]
SMALL = [(3, 192)]


def cases(tokens: int, hidden_size: int) -> Iterator[Case]:
    residual = torch.randn(tokens, hidden_size, device=DEVICE)
    projection = torch.randn(tokens, hidden_size, device=DEVICE).to(DTYPE)
    weight = torch.randn(hidden_size, device=DEVICE)
    out = torch.zeros_like(projection)

    def plain() -> None:
        out.copy_(reference.add_rms_norm(residual, projection, None, weight, EPS))

    yield Case(
        f"add_rms_norm {tokens} x {hidden_size}",
        partial(add_rms_norm, residual, projection, None, weight, EPS, out),
        plain,
        outputs=(residual, out),
        nbytes=nbytes(residual, residual, projection, out),
        beside={"reference": plain},
    )


if __name__ == "__main__":
    main(cases, SIZES)
