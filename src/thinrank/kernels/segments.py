"""Where the matrices of one launch lie in the weight arena. Holds numbers only; imports without triton."""

from __future__ import annotations

from dataclasses import dataclass

#: q, k and v are the most matrices that share a launch.
MAX_SEGMENTS = 3


@dataclass(frozen=True)
class Segments:
    """Up to three matrices of one launch, padded with empty ones.

    offsets: first number of each matrix in the arena. rows: its rows. widths: its columns as stored (ranks
    padded to a multiple of 64 with zeros). in_offsets: where its input starts in the input vector.
    out_offsets: where its output starts.
    """

    offsets: tuple[int, int, int]
    rows: tuple[int, int, int]
    widths: tuple[int, int, int]
    in_offsets: tuple[int, int, int]
    out_offsets: tuple[int, int, int]

    @staticmethod
    def of(entries: list[tuple[int, int, int, int, int]]) -> Segments:
        """From (offset, rows, width, in_offset, out_offset) of each matrix; one to three of them."""
        assert 1 <= len(entries) <= MAX_SEGMENTS
        padded = entries + [(0, 0, 0, 0, 0)] * (MAX_SEGMENTS - len(entries))
        columns = list(zip(*padded, strict=True))
        return Segments(*(tuple(column) for column in columns))  # type: ignore[arg-type]
