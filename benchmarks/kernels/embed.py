"""python benchmarks/kernels/embed.py: token ids to the residual stream, and what the first norm needs of it."""

from collections.abc import Iterator
from functools import partial

import torch
from harness import DEVICE, DTYPE, Case, main, nbytes
from layer import SIZES, SMALL, Vectors, label, weights

from thinrank.kernels import step_reference
from thinrank.kernels.embed import embed

__all__ = ["SIZES", "SMALL", "cases"]


def cases(shape: str, structure: str, batch: int) -> Iterator[Case]:
    config = weights(shape, structure).config
    vectors = Vectors(config, batch)
    embed_tokens = torch.randn(config.vocab_size, config.hidden_size, dtype=DTYPE, device=DEVICE)
    token_ids = torch.randint(config.vocab_size, (batch,), device=DEVICE)
    hidden, norm, scaled, squares = vectors.hidden, vectors.norm, vectors.scaled, vectors.squares
    arguments = (token_ids, embed_tokens, norm, hidden, scaled, squares)
    yield Case(
        label("embed", shape, structure, batch),
        partial(embed, *arguments, pdl=False),
        partial(step_reference.embed, *arguments),
        outputs=(hidden, squares),
        in_parts=(scaled,),
        nbytes=nbytes(token_ids, embed_tokens[:batch], norm, hidden, scaled, squares),
    )


if __name__ == "__main__":
    main(cases, SIZES)
