"""Texts by name and by file; data sets through a stand-in, as nothing may be downloaded."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from thinrank.builtin_text import held_out_text
from thinrank.errors import OptionError
from thinrank.eval.texts import Text, load_text


class Rows(list[str]):
    def __getitem__(self, key: Any) -> Any:
        return list(self) if key == "text" else Rows(list(self)[key])


def install(monkeypatch: pytest.MonkeyPatch, load_dataset: Any) -> None:
    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_builtin_and_files(tmp_path: Path) -> None:
    assert load_text("builtin") == Text("builtin", "held-out", held_out_text())
    file = tmp_path / "text.txt"
    file.write_text("Grüße\n", encoding="utf-8")
    assert load_text(str(file)) == Text(str(file), None, "Grüße\n")


def test_data_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load_dataset(*arguments: Any, **options: Any) -> Rows:
        calls.append((arguments, options))
        return Rows(map(str, range(2000)))

    install(monkeypatch, load_dataset)
    wikitext, c4 = load_text("wikitext2"), load_text("c4")
    assert (wikitext.dataset, wikitext.split) == ("wikitext-2-raw-v1", "test")
    assert wikitext.text.startswith("0\n\n1\n\n2") and wikitext.text.endswith("\n\n1999")
    assert c4.text.startswith("0 1 2 ") and c4.text.endswith(" 1099")
    assert calls[0] == (("Salesforce/wikitext", "wikitext-2-raw-v1"), {"split": "test"})
    assert calls[1][0] == ("allenai/c4",) and calls[1][1]["split"] == "validation"


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    with pytest.raises(OptionError, match=r"needs the package datasets: run: pip install"):
        load_text("wikitext2")
    with pytest.raises(OptionError, match=r"cannot read the text wikitext: .* one of builtin, wikitext2, c4"):
        load_text("wikitext")

    def offline(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no route to host")

    install(monkeypatch, offline)
    with pytest.raises(OptionError, match="cannot get allenai/c4: no route to host"):
        load_text("c4")
