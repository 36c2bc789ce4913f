"""Launch settings of the decode GEMVs: a table of what was measured, a rule for the rest. Imports without triton."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from ..errors import unknown_name


def counted(count: int, noun: str) -> str:
    """ "1 warp", "2 warps"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


#: Rows of a program at most, and from how many programs on it is better to have fewer of them, with as many rows.
MAX_ROWS = 32
_MANY_PROGRAMS = 256


class GemvConfig(NamedTuple):
    """num_warps: of a program; each takes every num_warps-th block of 64 columns. ahead: such blocks that a warp
    loads before it needs them. rows: of a program at up to 4 batch rows, all its matrices together, 8 or 16; 16 for
    all but `ROW_OPS`. splits: programs that share a block of rows, each with a range of columns."""

    num_warps: int
    ahead: int
    rows: int = 16
    splits: int = 1

    def __str__(self) -> str:
        splits = f", {self.splits} splits" if self.splits > 1 else ""
        return f"{counted(self.num_warps, 'warp')}, {self.ahead} ahead, {self.rows} rows{splits}"

    @property
    def step(self) -> int:
        """Columns that a program multiplies in one round."""
        return 64 * self.num_warps * self.ahead

    def is_even(self, *widths: int) -> bool:
        """Whether every matrix of a launch ends after whole rounds of every program."""
        return all(width % (self.step * self.splits) == 0 for width in widths)

    def for_batch(self, batch: int, rows: int, max_rows: int = MAX_ROWS) -> GemvConfig:
        """What runs at a batch, for a launch of `rows` rows in all.

        Above 4 batch rows a program loads 16 rows of inputs, not 8: the bytes of 16 rows of weights. A step of 8 rows
        of LLaMA-7B takes 3.79 ms on an H200 with 8 rows a program, 3.60 with 16; with 32 where that leaves programs for
        every SM q, k and v take 8 us a layer instead of 11. It changes no sum.
        """
        if batch <= 4:
            return self
        many = rows >= MAX_ROWS * _MANY_PROGRAMS
        return self._replace(rows=min(MAX_ROWS if many else 16, max_rows))

    @property
    def max_registers(self) -> int:
        """A thread's. Without a limit the assembler takes 64 as its goal and loads tiles one after the other."""
        return min(
            255 if self.ahead > 2 or self.rows * self.ahead > 32 else 168, 65536 // (32 * self.num_warps)
        )

    def arguments(self, batch: int, *widths: int) -> dict[str, int]:
        """What every GEMV's launch is given; widths: of its matrices."""
        return {
            "SLICES": self.num_warps,
            "AHEAD": self.ahead,
            "EVEN": self.is_even(*widths),
            "FOUR": batch <= 4,
            "num_warps": self.num_warps,
            "maxnreg": self.max_registers,
        }


class Launch(NamedTuple):
    """An op and the size of its matrix, all segments together: rows, and columns of the widest and of the narrowest
    (0: all are as wide)."""

    op: str
    rows: int
    width: int
    narrowest: int = 0

    @classmethod
    def of(cls, op: str, rows: int, *widths: int) -> Launch:
        """A launch of matrices of these widths, with `rows` together."""
        width, narrowest = max(widths), min(widths)
        return cls(op, rows, width, narrowest if narrowest < width else 0)

    @property
    def shape(self) -> str:
        """ "11008 x 1536", "11008 x 768 to 4096"."""
        return f"{self.rows} x {f'{self.narrowest} to ' if self.narrowest else ''}{self.width}"


#: A head with a q/k norm is one program's, so its launch is another than `project_rope` of 8 pairs of rows.
OPS = (
    "norm_project",
    "project",
    "project_residual",
    "project_rope",
    "project_head_rope",
    "project_silu_mul",
)

#: Ops whose programs may have 8 rows, and those whose programs can share a block of rows.
ROW_OPS = ("norm_project", "project")
SPLIT_OPS = (*ROW_OPS, "project_residual")

#: Workspaces have room for so many.
MAX_SPLITS = 8


def choices(op: str) -> dict[str, tuple[int, ...]]:
    """What each field of an op's `GemvConfig` may be."""
    return {
        "num_warps": (1, 2, 4, 8, 16),
        "ahead": (1, 2, 4),
        "rows": (8, 16) if op in ROW_OPS else (16,),
        "splits": (1, 2, 4, MAX_SPLITS) if op in SPLIT_OPS else (1,),
    }


@dataclass(frozen=True)
class LaunchSettings:
    """Settings by launch. They decide the order of summation, so they depend on a layer's shape and the card,
    never on the batch. source: the table's file."""

    entries: Mapping[Launch, GemvConfig] = field(default_factory=lambda: MappingProxyType({}))
    source: str = "none"

    def config(self, launch: Launch) -> GemvConfig:
        """The table's entry, or the rule's."""
        if launch.op not in OPS:
            raise unknown_name("op", launch.op, list(OPS))
        return self.entries.get(launch) or gemv_rule(launch)

    def origin(self, launch: Launch) -> str:
        """Where `config` has it from: "table" or "rule"."""
        return "table" if launch in self.entries else "rule"


def gemv_rule(launch: Launch) -> GemvConfig:
    """Settings of a launch that no table lists: what was best on an H200 for LLaMA-7B and Llama-3-8B.

    A launch of few programs needs more warps in each, also one whose other matrices are much narrower, which are done
    early; what loads a pair of matrices should not load far ahead when its rounds do not come out even.
    """
    op, rows, width, narrowest = launch
    much_narrower = 0 < 2 * narrowest <= width
    match op:
        case "norm_project":
            config = GemvConfig(8, 4) if rows < 2048 else GemvConfig(4, 4, rows=8)
        case "project":
            config = GemvConfig(16, 4 if rows < 2048 and width < 8192 else 2, rows=8)
        case "project_residual":
            config = GemvConfig(4, 4)
        case "project_head_rope":
            config = GemvConfig(8, 2)
        case "project_rope":
            config = GemvConfig(4 if rows < 8192 or much_narrower else 2, 4)
        case _:
            even = GemvConfig(2, 4).is_even(width, narrowest)
            config = GemvConfig(2, 2 if much_narrower else 4 if even else 1)
    while config.step > width and config.ahead > 1:
        config = config._replace(ahead=config.ahead // 2)
    while config.step > width and config.num_warps > 1:
        config = config._replace(num_warps=config.num_warps // 2)
    return config
