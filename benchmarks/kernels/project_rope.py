"""python benchmarks/kernels/project_rope.py: `factor_out` of q, k, v, RoPE, and keys and values into blocks."""

from collections.abc import Iterator
from functools import partial

import torch
from harness import DEVICE, DTYPE, Case, main, nbytes
from layer import QKV, SIZES, SMALL, Vectors, label, settings, weights

from thinrank.config import BLOCK_SIZE
from thinrank.kernels import step_reference
from thinrank.kernels.project_rope import project_rope

__all__ = ["SIZES", "SMALL", "cases"]

CONTEXT = 512


def cases(shape: str, structure: str, batch: int) -> Iterator[Case]:
    model = weights(shape, structure)
    config, packed = model.config, model.packed[QKV]
    vectors, kv_heads, head_dim = Vectors(config, batch), config.num_key_value_heads, config.head_dim
    latents = vectors.parts(max(packed.latent_width, 64))
    angles = torch.rand(CONTEXT, head_dim // 2, device=DEVICE) * 6
    rotation = torch.stack([angles.cos(), angles.sin()], dim=1)
    queries = torch.zeros(batch, config.num_attention_heads * head_dim, device=DEVICE)
    cache = (batch * CONTEXT // BLOCK_SIZE, kv_heads, BLOCK_SIZE, head_dim)
    keys, values = (torch.zeros(cache, dtype=DTYPE, device=DEVICE) for _ in range(2))
    tables = torch.randperm(cache[0], device=DEVICE).int().view(batch, -1)
    positions = torch.randint(CONTEXT, (batch,), dtype=torch.int32, device=DEVICE)
    arguments = (
        latents, vectors.scaled, vectors.squares, config.rms_norm_eps, model.arena, packed.factor_out, None, None,
        rotation, queries, keys, values, positions, tables,
    )  # fmt: skip
    segments = packed.factor_out
    launch = settings("project_rope", sum(segments.rows), *segments.widths)
    inputs = (latents,) if packed.inputs else (vectors.scaled, vectors.squares)
    yield Case(
        label("project_rope", shape, structure, batch),
        partial(project_rope, *arguments, config=launch, pdl=False),
        partial(step_reference.project_rope, *arguments),
        outputs=(queries, keys, values),
        # Of each row a cosine and a sine, a key and a value.
        nbytes=model.factor_bytes(QKV, "factor_out")
        + nbytes(*inputs, queries, rotation[:batch])
        + 2 * batch * kv_heads * head_dim * DTYPE.itemsize,
    )


if __name__ == "__main__":
    main(cases, SIZES)
