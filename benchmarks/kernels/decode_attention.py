"""python benchmarks/kernels/decode_attention.py: attention of one new token a row beside the plain reference."""

import torch
from harness import DEVICE, header, report

from thinrank.config import BLOCK_SIZE
from thinrank.kernels import reference
from thinrank.kernels.decode_attention import decode_attention, decode_attention_workspace

HEAD_DIM = 128
SCALE = HEAD_DIM**-0.5


def measure(batch: int, context: int, heads: int, kv_heads: int) -> None:
    q = torch.randn(batch, heads, HEAD_DIM, device=DEVICE).bfloat16()
    cache = (batch * context // BLOCK_SIZE, kv_heads, BLOCK_SIZE, HEAD_DIM)
    keys, values = (torch.randn(cache, device=DEVICE).bfloat16() for _ in range(2))
    tables = torch.randperm(cache[0], device=DEVICE).int().view(batch, -1)
    contexts = torch.full((batch,), context, dtype=torch.int32, device=DEVICE)
    out = torch.empty_like(q).flatten(1)
    workspace = decode_attention_workspace(batch, heads, kv_heads, HEAD_DIM, DEVICE)
    shape, nbytes = f"{batch} x {context}, {heads}/{kv_heads} heads", keys.nbytes + values.nbytes
    report(
        f"decode_attention {shape}",
        lambda: decode_attention(
            q, keys, values, tables, contexts, scale=SCALE, out=out, workspace=workspace
        ),
        nbytes=nbytes,
    )
    lens = [1] * batch, [context] * batch
    report(f"  reference {shape}", lambda: reference.paged_attention(q, keys, values, tables, *lens, SCALE))


if __name__ == "__main__":
    header()
    for heads, kv_heads in ((32, 32), (32, 8)):
        for batch in (1, 8):
            for context in (512, 2048, 8192):
                measure(batch, context, heads, kv_heads)
