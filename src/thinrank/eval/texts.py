"""Texts to measure perplexity on, by name or from a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..builtin_text import held_out_text
from ..public_text import load_public_text
from ..text_files import read_text_file


@dataclass(frozen=True)
class Text:
    """dataset: a name or a file. split: which part of it; None for a file."""

    dataset: str
    split: str | None
    text: str


def load_text(name: str) -> Text:
    """A text of `TEXTS`, or else a UTF-8 file.

    Raises OptionError for a file that cannot be read, or when the package `datasets` is needed and missing or
    cannot get the data.
    """
    if name in TEXTS:
        return TEXTS[name]()
    hint = f"name a UTF-8 file, or one of {', '.join(TEXTS)}"
    return Text(name, None, read_text_file(name, "the text", hint))


def _builtin() -> Text:
    return Text("builtin", "held-out", held_out_text())


def _wikitext2() -> Text:
    """The raw test split, lines joined by blank ones, as in the papers on compression since GPTQ."""
    rows = load_public_text("Salesforce/wikitext", "wikitext-2-raw-v1", split="test")
    return Text("wikitext-2-raw-v1", "test", "\n\n".join(rows["text"]))


def _c4() -> Text:
    """The first 1100 documents of the first validation shard, joined by spaces, as in the same papers."""
    shard = {"validation": "en/c4-validation.00000-of-00008.json.gz"}
    rows = load_public_text("allenai/c4", data_files=shard, split="validation")
    return Text("c4", "validation, first 1100 documents", " ".join(rows[:1100]["text"]))


#: Name -> text. `builtin` is there without a download, and differs a little between Python versions.
TEXTS: Mapping[str, Callable[[], Text]] = MappingProxyType(
    {"builtin": _builtin, "wikitext2": _wikitext2, "c4": _c4}
)
