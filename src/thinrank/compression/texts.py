"""Where calibration text comes from: the built-in one, a file, or the package `datasets`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from ..builtin_text import calibration_text
from ..public_text import load_public_text
from ..text_files import json_strings, read_text_file

#: Prefix of any other data set: datasets:NAME[:CONFIG[:SPLIT]], of which the column "text" is taken.
DATASETS = "datasets:"


def read_text(name: str | Path) -> str:
    """A text of `TEXTS`, of the package `datasets`, or of a UTF-8 file: in one that ends in .jsonl, of every line
    the string "text" of its object.

    Raises OptionError when it cannot be had.
    """
    if str(name) in TEXTS:
        return TEXTS[str(name)]()
    if str(name).startswith(DATASETS):
        dataset, config, split, *_ = [*str(name).removeprefix(DATASETS).split(":"), "", ""]
        return "\n\n".join(
            load_public_text(dataset, *([config] if config else []), split=split or "train")["text"]
        )
    text = read_text_file(
        name,
        "the calibration text",
        f"name a UTF-8 text or .jsonl file, {DATASETS}NAME, or one of {', '.join(TEXTS)}, self",
    )
    return "\n\n".join(json_strings(text, "text", name)) if Path(name).suffix == ".jsonl" else text


def _wikitext2() -> str:
    """The raw train split, lines joined by blank ones, as in the papers."""
    return "\n\n".join(load_public_text("Salesforce/wikitext", "wikitext-2-raw-v1", split="train")["text"])


def _c4() -> str:
    """The first 5000 documents of the first train shard."""
    shard = {"train": "en/c4-train.00000-of-01024.json.gz"}
    return "\n\n".join(load_public_text("allenai/c4", data_files=shard, split="train")[:5000]["text"])


#: Name -> text. None of them overlaps with the texts of the same name that perplexity is measured on.
TEXTS: Mapping[str, Callable[[], str]] = MappingProxyType(
    {"builtin": calibration_text, "wikitext2": _wikitext2, "c4": _c4}
)
