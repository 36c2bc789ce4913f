"""python benchmarks/kernels/slots.py: where the keys and values of each row's next token go."""

from collections.abc import Iterator
from functools import partial

import torch
from harness import DEVICE, Case, main

from thinrank.config import BLOCK_SIZE
from thinrank.kernels import reference
from thinrank.kernels.slots import slots

#: Batch size and context.
SIZES = [(batch, context) for batch in (16, 64, 256) for context in (512, 8192)]
SMALL = [(5, 128)]


def cases(batch: int, context: int) -> Iterator[Case]:
    positions = torch.randint(context, (batch,), dtype=torch.int32, device=DEVICE)
    blocks = batch * context // BLOCK_SIZE
    tables = torch.randperm(blocks, device=DEVICE).int().view(batch, -1)
    out = torch.zeros(batch, dtype=torch.int64, device=DEVICE)

    def plain() -> None:
        out.copy_(reference.slots(positions, tables, BLOCK_SIZE))

    yield Case(
        f"slots {batch} x {context}",
        partial(slots, positions, tables, out),
        plain,
        outputs=(out,),
        # One entry of each row's table.
        nbytes=2 * positions.nbytes + out.nbytes,
    )


if __name__ == "__main__":
    main(cases, SIZES)
