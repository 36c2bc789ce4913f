"""python benchmarks/kernels/silu_mul.py: the fused activation of prefill beside PyTorch's single operations."""

from collections.abc import Iterator
from functools import partial

import torch
from harness import DEVICE, DTYPE, Case, main, nbytes

from thinrank.kernels import reference
from thinrank.kernels.silu_mul import silu_mul

#: Tokens and columns.
SIZES = [(tokens, columns) for columns in (11008, 14336) for tokens in (512, 2048, 8192)]
SMALL = [(3, 1500)]


def cases(tokens: int, columns: int) -> Iterator[Case]:
    gate, up, out = (torch.randn(tokens, columns, device=DEVICE).to(DTYPE) for _ in range(3))

    def plain() -> None:
        out.copy_(reference.silu_mul(gate.float(), up.float()))

    yield Case(
        f"silu_mul {tokens} x {columns}",
        partial(silu_mul, gate, up, None, out),
        plain,
        outputs=(out,),
        nbytes=nbytes(gate, up, out),
        beside={"reference": partial(reference.silu_mul, gate, up)},
    )


if __name__ == "__main__":
    main(cases, SIZES)
