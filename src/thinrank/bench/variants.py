"""The variants of the decode step that an ablation measures, and which of them it compares.

Every comparison is of two variants that differ in one mechanism, so that the factors of a ladder multiply out.
The mechanisms of FlashSVD v1.5 (arXiv 2605.08314, Algorithms 2 to 4), and beyond them packed q, k and v, one graph
for the model, and programmatic launch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

#: How a step is launched. none: kernel by kernel. split: two graphs a layer, attention between them on its own;
#: the paper's split capture covers a part of a layer too, it does not say which. layer: a graph a layer. model: one
#: graph. Embedding and head are graphs of their own in split and layer.
GRAPHS = ("none", "split", "layer", "model")


@dataclass(frozen=True)
class Variant:
    """Which mechanisms a step uses; the defaults are none.

    dense_kv: keys and values are kept; else latents are, and the whole history is rebuilt from them every step.
    pack_qkv: q, k and v share their launches, factor by factor; else each has its own. pack_mlp: the same for gate
    and up, whose product is then part of their launch. graph: one of `GRAPHS`. pdl: programmatic dependent launch,
    a kernel loads its first weights while the one before it ends.
    """

    dense_kv: bool = False
    pack_qkv: bool = False
    pack_mlp: bool = False
    graph: str = "none"
    pdl: bool = False

    def __post_init__(self) -> None:
        assert self.graph in GRAPHS


#: What the engine does.
FULL = Variant(True, True, True, "model", True)


@dataclass(frozen=True)
class Comparison:
    """One row of the report.

    series: "base" (no mechanism), "alone" (one added to the base), "ladder" (one added to the rung before), "full"
    (all of them) or "without" (one taken from all). change: such as "pdl=on" or "graph=layer"; empty for base and
    full. variant: what is measured. neighbour: what it is compared with.
    """

    series: str
    change: str
    variant: Variant
    neighbour: Variant


def comparisons(dense: bool) -> list[Comparison]:
    """All rows of one system. A dense model has no latents, so its base has dense keys and values."""
    base = Variant(dense_kv=dense)
    added: list[tuple[str, Any]] = [("dense_kv", True), ("pack_qkv", True), ("pack_mlp", True)]
    added += [("graph", graph) for graph in GRAPHS[1:]]
    added += [("pdl", True)]
    taken: list[tuple[str, Any]] = [("dense_kv", False), ("pack_qkv", False), ("pack_mlp", False)]
    taken += [("graph", graph) for graph in reversed(GRAPHS[:-1])]
    taken += [("pdl", False)]
    if dense:
        added, taken = added[1:], taken[1:]

    rows = [Comparison("base", "", base, base)]
    rows += [_compared("alone", base, *change) for change in added]
    rung = base
    for change in added:
        rows.append(_compared("ladder", rung, *change))
        rung = rows[-1].variant
    assert rung == FULL
    rows.append(Comparison("full", "", FULL, FULL))
    return rows + [_compared("without", FULL, *change) for change in taken]


def _compared(series: str, neighbour: Variant, mechanism: str, value: Any) -> Comparison:
    text = {True: "on", False: "off"}.get(value, value)
    return Comparison(series, f"{mechanism}={text}", replace(neighbour, **{mechanism: value}), neighbour)
