"""Files that a person names: UTF-8 text, JSON, and one JSON object a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import OptionError


def read_text_file(path: str | Path, what: str, hint: str) -> str:
    """The text of a UTF-8 file, with or without a byte order mark. what: names it in an error, like "the prompts".

    Raises OptionError, with this hint, when it cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot read {what} {path}: {error}", hint) from error


def read_json_file(path: str | Path, what: str, hint: str) -> Any:
    """What a UTF-8 file of JSON holds. what, hint: as in `read_text_file`.

    Raises OptionError, with this hint, when it cannot be read or is no JSON.
    """
    text = read_text_file(path, what, hint)
    try:
        return json.loads(text)
    except ValueError as error:
        raise OptionError(f"{what} {path} is no JSON: {error}", hint) from error
    except RecursionError as error:
        raise OptionError(
            f"{what} {path} is no JSON that can be read: it is nested too deeply", hint
        ) from error


def lines_of(text: str) -> list[str]:
    """Lines that are not blank. Only a newline ends one: JSON strings, and text of the web, hold the other
    characters that `str.splitlines` takes for ends."""
    return [line for line in text.split("\n") if line.strip()]


def json_strings(text: str, key: str, path: str | Path) -> list[str]:
    """The string `key` of the JSON object in every line. Raises OptionError that names the first line without it."""
    strings = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)[key]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise OptionError(
                f'line {number} of {path} is no JSON object with a "{key}"',
                f'write {{"{key}": "..."}} a line',
            ) from error
        if not isinstance(value, str):
            raise OptionError(
                f'"{key}" in line {number} of {path} is no string', f'write {{"{key}": "..."}} a line'
            )
        strings.append(value)
    return strings
