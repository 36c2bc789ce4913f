"""python benchmarks/kernels/norm_project.py: RMSNorm's scale, with `factor_in` of q, k, v or gate, up, or lm_head."""

from collections.abc import Iterator
from functools import partial

import torch
from harness import DEVICE, Case, main, nbytes
from layer import GATE_UP, QKV, SIZES, SMALL, Vectors, label, settings, weights

from thinrank.kernels import step_reference
from thinrank.kernels.norm_project import norm_project
from thinrank.kernels.segments import Segments

__all__ = ["SIZES", "SMALL", "cases"]


def cases(shape: str, structure: str, batch: int) -> Iterator[Case]:
    model = weights(shape, structure)
    config, head = model.config, model.lm_head
    vectors = Vectors(config, batch)

    def case(what: str, segments: Segments, out: torch.Tensor, weight_bytes: int) -> Case:
        arguments = (vectors.scaled, vectors.squares, config.rms_norm_eps, model.arena, segments, out)
        launch = settings("norm_project", sum(segments.rows), config.hidden_size)
        in_parts = out.dim() == 3
        return Case(
            label(f"norm_project {what}", shape, structure, batch),
            partial(norm_project, *arguments, vectors.splits, config=launch, pdl=False),
            partial(step_reference.norm_project, *arguments),
            outputs=() if in_parts else (out,),
            in_parts=(out,) if in_parts else (),
            nbytes=weight_bytes + nbytes(vectors.scaled, vectors.squares, out),
        )

    for what, modules in (("q, k, v", QKV), ("gate, up", GATE_UP)):
        packed = model.packed[modules]
        if packed.factor_in is not None:
            latents = vectors.parts(packed.latent_width)
            yield case(what, packed.factor_in, latents, model.factor_bytes(modules, "factor_in"))
    segments = Segments.of([(head.offset, head.rows, head.width, 0, 0)])
    logits = torch.zeros(batch, config.vocab_size, device=DEVICE)
    yield case("lm_head", segments, logits, model.head_bytes())


if __name__ == "__main__":
    main(cases, SIZES)
