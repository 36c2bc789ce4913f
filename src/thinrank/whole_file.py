"""Writing a file that others never see half of: beside its place, then under its name."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text as UTF-8; a file that is there is replaced when the new one is complete.

    Raises OSError; then the old file is as it was, and nothing lies beside it.
    """
    if path.exists() and not path.is_file():  # a pipe or a device has no name to replace
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()  # a link stays one
    staging = path.with_name(f".{path.name}.incomplete")
    try:
        staging.write_text(text, encoding="utf-8")
        staging.replace(path)
    finally:
        staging.unlink(missing_ok=True)
