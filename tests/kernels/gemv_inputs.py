"""What the tests of the decode step's GEMVs share: matrices in an arena, the residual stream, ways to launch.

Tolerance of `close`: 1e-4 absolute on sums of order one; float32 sums in another order.
"""

import torch

from thinrank.kernels import reference as ops
from thinrank.kernels.tuning import GemvConfig

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
HIDDEN, HEAD_DIM, EPS = 128, 64, 1e-5

#: Settings and batch sizes: with split sums, with programs of 8 rows, and of ops that split nothing.
WAYS = [(GemvConfig(1, 1, 16), 1), (GemvConfig(2, 1, 16, splits=2), 3), (GemvConfig(1, 2, 16, splits=4), 8)]
NARROW = [(GemvConfig(2, 1, 8), 3), (GemvConfig(1, 1, 8, splits=2), 8)]
UNSPLIT = [(GemvConfig(1, 1), 1), (GemvConfig(2, 1), 3)]


class Arena:
    """Matrices with NaN everywhere else, so that a read outside shows."""

    def __init__(self, size=400_000, dtype=torch.float32):
        self.generator = torch.Generator().manual_seed(0)
        self.data = torch.full((size,), float("nan"), dtype=dtype, device=DEVICE)
        self.end = 64

    def place(self, rows, width):
        """A random matrix, columns padded with zeros to a multiple of 64; returns (offset, padded width, matrix)."""
        matrix = (torch.randn(rows, width, generator=self.generator).to(DEVICE) * width**-0.5).to(
            self.data.dtype
        )
        padded, offset = -(-width // 64) * 64, self.end
        view = self.data[offset : offset + rows * padded].view(rows, padded)
        view.zero_()
        view[:, :width] = matrix
        self.end += rows * padded + 64
        return offset, padded, matrix

    def randn(self, *shape):
        return torch.randn(shape, generator=self.generator).to(DEVICE)


def parts(x, dtype=None):
    return ops.in_two_parts(x, dtype or x.dtype)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def residual(arena, batch):
    """hidden, norm, and what the kernels keep of them: scaled and squares."""
    hidden, norm = arena.randn(batch, HIDDEN), arena.randn(HIDDEN)
    squares = hidden.square().view(batch, -1, 16).sum(-1).contiguous()
    return hidden, norm, parts(hidden * norm), squares
