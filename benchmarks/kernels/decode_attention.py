"""python benchmarks/kernels/decode_attention.py: attention of one new token a row beside the plain reference."""

from collections.abc import Iterator
from functools import partial

import torch
from harness import DEVICE, DTYPE, Case, main, nbytes

from thinrank.config import BLOCK_SIZE
from thinrank.kernels import reference
from thinrank.kernels.decode_attention import decode_attention, decode_attention_workspace

HEAD_DIM = 128
SCALE = HEAD_DIM**-0.5

#: Batch size, context, heads and kv heads.
SIZES = [
    (batch, context, *heads)
    for heads in ((32, 32), (32, 8))
    for batch in (1, 2, 4, 8)
    for context in (512, 2048, 8192)
]
SMALL = [(2, 128, 2, 1)]


def cases(batch: int, context: int, heads: int, kv_heads: int) -> Iterator[Case]:
    q = torch.randn(batch, heads, HEAD_DIM, device=DEVICE).to(DTYPE)
    cache = (batch * context // BLOCK_SIZE, kv_heads, BLOCK_SIZE, HEAD_DIM)
    keys, values = (torch.randn(cache, device=DEVICE).to(DTYPE) for _ in range(2))
    tables = torch.randperm(cache[0], device=DEVICE).int().view(batch, -1)
    contexts = torch.full((batch,), context, dtype=torch.int32, device=DEVICE)
    out = torch.zeros_like(q).flatten(1)
    workspace = decode_attention_workspace(batch, heads, kv_heads, HEAD_DIM, DEVICE)
    lens = [1] * batch, [context] * batch

    def plain() -> None:
        out.copy_(reference.paged_attention(q, keys, values, tables, *lens, SCALE).flatten(1))

    yield Case(
        f"decode_attention {batch} x {context}, {heads}/{kv_heads} heads",
        partial(
            decode_attention, q, keys, values, tables, contexts, scale=SCALE, out=out, workspace=workspace
        ),
        plain,
        outputs=(out,),
        nbytes=nbytes(q, keys, values, out),
        beside={"reference": plain},
    )


if __name__ == "__main__":
    main(cases, SIZES)
