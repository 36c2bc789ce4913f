"""python benchmarks/kernels/project.py: `factor_in` of o and down, and `factor_out`, onto the residual stream."""

from collections.abc import Iterator
from functools import partial

from harness import Case, main, nbytes
from layer import DOWN, OUTPUT, SIZES, SMALL, Vectors, label, settings, weights

from thinrank.kernels import step_reference
from thinrank.kernels.project import project, project_residual

__all__ = ["SIZES", "SMALL", "cases"]


def cases(shape: str, structure: str, batch: int) -> Iterator[Case]:
    model = weights(shape, structure)
    for what, modules in (("o", OUTPUT), ("down", DOWN)):
        packed, vectors = model.packed[modules], Vectors(model.config, batch)
        matrix = packed.outputs[0]
        x = vectors.parts(matrix.width)
        if packed.inputs:
            first = packed.inputs[0]
            inputs = vectors.parts(first.width)
            arguments = (inputs, model.arena, first.offset, first.rows, first.width, x)
            launch = settings("project", first.rows, first.width)
            yield Case(
                label(f"project {what}", shape, structure, batch),
                partial(project, *arguments, vectors.splits, config=launch, pdl=False),
                partial(step_reference.project, *arguments),
                outputs=(),
                in_parts=(x,),
                nbytes=model.factor_bytes(modules, "factor_in") + nbytes(inputs, x),
            )
        hidden, norm, scaled, squares = vectors.hidden, vectors.norm, vectors.scaled, vectors.squares
        arguments = (
            x, model.arena, matrix.offset, matrix.rows, matrix.width, None, hidden, norm, scaled, squares,
        )  # fmt: skip
        launch = settings("project_residual", matrix.rows, matrix.width)
        yield Case(
            label(f"project_residual {what}", shape, structure, batch),
            partial(project_residual, *arguments, vectors.splits, config=launch, pdl=False),
            partial(step_reference.project_residual, *arguments),
            outputs=(hidden, squares),
            in_parts=(scaled,),
            nbytes=model.factor_bytes(modules, "factor_out")
            + nbytes(x, hidden, hidden, norm, scaled, squares),
        )


if __name__ == "__main__":
    main(cases, SIZES)
