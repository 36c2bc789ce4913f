"""What all commands share when they print: plain lines, one JSON object, text as it is generated."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def show_progress() -> bool:
    """Whether progress bars, which go to stderr, have somebody to watch them."""
    return sys.stderr.isatty()


def progress() -> Callable[[str], None]:
    """Shows on stderr what a long command is at, where somebody watches."""
    return (lambda text: write_message("progress", text)) if show_progress() else lambda text: None


def command_line() -> str:
    """What was typed, for the header of a report."""
    return shlex.join(["thinrank", *sys.argv[1:]])


def write(text: str) -> None:
    """Put text on stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_lines(lines: Iterable[str]) -> None:
    write("".join(f"{printable(line)}\n" for line in lines))


def write_notes(lines: Iterable[str]) -> None:
    """Put lines on stderr, so that they are no part of the result."""
    sys.stderr.write("".join(f"{printable(line)}\n" for line in lines))
    sys.stderr.flush()


def print_table(table: Table) -> None:
    from rich.console import Console

    # A pipe has no width; a table that is cut there would be no use.
    width = None if sys.stdout.isatty() else 200
    Console(markup=False, highlight=False, width=width).print(table)


def write_json(value: Any) -> None:
    """Put one JSON object on stdout, in ASCII so that every terminal and pipe takes it."""
    write(json.dumps(value, indent=2) + "\n")


def write_json_line(value: Any) -> None:
    """Put one JSON object on stdout in one line, the last of a log. Raises ValueError for NaN and infinity."""
    write(json.dumps(value, allow_nan=False) + "\n")


def measured_on(header: Mapping[str, Any]) -> list[str]:
    """The first lines of a report: by the header of `bench.report`, where it was measured, and with what."""
    versions = [f"{name} {header[name]}" for name in ("torch", "triton", "transformers") if header[name]]
    return [
        f"device     {header['device']}, driver {header['driver'] or 'unknown'}",
        f"versions   thinrank {header['thinrank']}, {', '.join(versions)}, "
        f"commit {header['commit'] or 'unknown'}",
    ]


def write_message(kind: str, text: str) -> None:
    """Put "kind: text" on stderr, as one line."""
    sys.stderr.write(f"{kind}: {printable(' '.join(text.split()))}\n")
    sys.stderr.flush()


def printable(text: str) -> str:
    """The text with control characters escaped: a stranger's tensor names must not steer the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def format_bytes(count: float) -> str:
    """ "1.5 GiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} bytes" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
