"""The tables of docs/scale.md, from `thinrank.model.tensor_parallel`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from thinrank.bench.shapes import SHAPES, STRUCTURES
from thinrank.model.cost import dense_config
from thinrank.model.registry import parse_config
from thinrank.model.tensor_parallel import WHOLE, Layout, Share, share
from thinrank.planning.cards import find_card

NAMES, KEEP_RATIO, SIZES, ITEMSIZE = ("llama-7b", "llama3-8b"), 0.5, (1, 2, 4, 8), 2
GATHERED = Layout(divided_latents=True)
LAYOUTS = {
    "0.5, the plugin": WHOLE,
    "0.5, latents gathered": GATHERED,
    "0.5, latents and outputs gathered": Layout(divided_latents=True, divided_outputs=True),
}
CARDS = ("H200", "A100 80GB", "A10G")


def parts(name: str) -> dict[str, list[Share]]:
    """Rows of a shape: what one of so many processes has."""
    dense = parse_config(SHAPES[name])
    config = replace(dense, ranks=STRUCTURES["uniform"](dense, KEEP_RATIO, 0)[0])
    rows = {"dense": [share(dense_config(dense), size, ITEMSIZE) for size in SIZES]}
    rows |= {
        label: [share(config, size, ITEMSIZE, layout) for size in SIZES] for label, layout in LAYOUTS.items()
    }
    return rows


def reads() -> str:
    """GB of weights."""
    return _by_layout(lambda part: f"{part.step_bytes / 1e9:.2f}")


def sends() -> str:
    """kB a token, and the exchanges of a step."""
    return _by_layout(
        lambda part: f"{part.sent_bytes / 1e3:.0f} in {part.exchanges}" if part.exchanges else "0"
    )


def break_even() -> str:
    """Microseconds that each further exchange of gathered latents may take before they cost more than they save."""
    rows = []
    for card in map(find_card, CARDS):
        cells = []
        for whole, gathered in zip(
            parts("llama-7b")["0.5, the plugin"], parts("llama-7b")["0.5, latents gathered"], strict=True
        ):
            if more := gathered.exchanges - whole.exchanges:
                saved = (whole.step_bytes - gathered.step_bytes) / (card.bandwidth or 0.0)
                cells.append(f"{1e6 * saved / more:.1f}")
        rows.append([card.name, *cells])
    return _table(["", *(f"TP {size}" for size in SIZES[1:])], rows)


def _by_layout(cell: Callable[[Share], str]) -> str:
    rows = [
        [name if label == "dense" else "", label, *map(cell, row)]
        for name in NAMES
        for label, row in parts(name).items()
    ]
    return _table(["", "keep_ratio", *(f"TP {size}" for size in SIZES)], rows)


def _table(header: list[str], rows: Iterable[list[str]]) -> str:
    return "\n".join(
        f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in (header, ["---"] * len(header), *rows)
    )


if __name__ == "__main__":
    print("\n\n".join([reads(), sends(), break_even()]))  # to paste into the page
