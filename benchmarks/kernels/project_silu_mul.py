"""python benchmarks/kernels/project_silu_mul.py: `factor_out` of gate and up, SiLU, and their product."""

from collections.abc import Iterator
from functools import partial

from harness import Case, main, nbytes
from layer import GATE_UP, SIZES, SMALL, Vectors, label, settings, weights

from thinrank.kernels import step_reference
from thinrank.kernels.project_silu_mul import project_silu_mul

__all__ = ["SIZES", "SMALL", "cases"]


def cases(shape: str, structure: str, batch: int) -> Iterator[Case]:
    model = weights(shape, structure)
    config, packed, vectors = model.config, model.packed[GATE_UP], Vectors(model.config, batch)
    latents, out = vectors.parts(max(packed.latent_width, 64)), vectors.parts(config.intermediate_size)
    segments = packed.factor_out
    arguments = (
        latents, vectors.scaled, vectors.squares, config.rms_norm_eps, model.arena, segments, None, out,
    )  # fmt: skip
    launch = settings("project_silu_mul", segments.rows[0], *segments.widths[:2])
    inputs = (latents,) if packed.inputs else (vectors.scaled, vectors.squares)
    yield Case(
        label("project_silu_mul", shape, structure, batch),
        partial(project_silu_mul, *arguments, config=launch, pdl=False),
        partial(step_reference.project_silu_mul, *arguments),
        outputs=(),
        in_parts=(out,),
        nbytes=model.factor_bytes(GATE_UP, "factor_out") + nbytes(*inputs, out),
    )


if __name__ == "__main__":
    main(cases, SIZES)
