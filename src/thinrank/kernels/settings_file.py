"""Tables of launch settings as files: one a card, in the user's cache or shipped with the package.

{"format_version": 1, "device": "NVIDIA H200", "triton": "3.6.0", "settings": [{"op": "project", "rows": 1024,
"width": 4096, "narrowest": 0, "num_warps": 16, "ahead": 4, "rows_per_program": 8, "splits": 1}, ...]}: one entry a
`Launch`. `thinrank tune` writes them. Imports without triton.
"""

from __future__ import annotations

import json
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ..device import cache_folder
from ..errors import OutputError, ThinrankError
from ..whole_file import write_whole
from .tuning import OPS, GemvConfig, Launch, LaunchSettings, choices

FORMAT_VERSION = 1

#: No table is larger: an entry has about 200 bytes, a model of a hundred different layers some 600 entries.
MAX_BYTES = 4 * 2**20
#: No matrix has more rows or columns.
MAX_SIZE = 2**31 - 1

#: Files of cards that the package knows, named as the user's.
SHIPPED = Path(__file__).parent / "launch_settings"

_FIELDS = ("num_warps", "ahead", "rows_per_program", "splits")


def settings_for(device: torch.device) -> LaunchSettings:
    """What holds on a device: the user's table for the card, or the one shipped for it, or none.

    Raises ThinrankError when the file is damaged.
    """
    if device.type != "cuda":
        return LaunchSettings()
    card = torch.cuda.get_device_name(device)
    for path in (user_file(card), SHIPPED / file_name(card)):
        settings = None if path is None else read_settings(path, card)
        if settings is not None:
            return settings
    return LaunchSettings()


def user_file(card: str) -> Path | None:
    """Where `thinrank tune` puts the settings of a card, by its name; None where the user has no home folder."""
    folder = cache_folder()
    return None if folder is None else folder / "launch_settings" / file_name(card)


def file_name(card: str) -> str:
    """ "nvidia-h200.json"."""
    return re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-") + ".json"


def read_settings(path: Path, card: str) -> LaunchSettings | None:
    """The table in a file; None if there is no file. Raises ThinrankError when it is no table, or another card's."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
        entries = _parse(content, card)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ThinrankError(f"cannot read {path}: {error.strerror}", "check its permissions") from error
    except (ValueError, RecursionError) as error:
        raise ThinrankError(
            f"{path} holds no launch settings for this GPU: {error}",
            "delete it, then tune again or do without",
        ) from error
    return LaunchSettings(MappingProxyType(entries), str(path))


def write_settings(path: Path, card: str, settings: LaunchSettings) -> None:
    """Write a table; the file is replaced when the new one is complete. Raises OutputError when it cannot be."""
    content = {
        "format_version": FORMAT_VERSION,
        "device": card,
        "triton": _triton_version(),
        "settings": [
            {**launch._asdict(), **dict(zip(_FIELDS, config, strict=True))}
            for launch, config in sorted(settings.entries.items())
        ],
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}", "name another file") from error


def _parse(content: Any, card: str) -> dict[Launch, GemvConfig]:
    """Raises ValueError that says what is wrong."""
    if not isinstance(content, dict) or content.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"no format_version {FORMAT_VERSION}")
    if content.get("device") != card:
        raise ValueError(f"it is for {content.get('device')!r}, this is {card!r}")
    if set(content) != {"format_version", "device", "triton", "settings"}:
        raise ValueError(f"its keys are {', '.join(map(str, content))}")
    if not isinstance(content["settings"], list):
        raise ValueError("settings is no list")
    entries = dict(_parse_entry(number, entry) for number, entry in enumerate(content["settings"], start=1))
    if len(entries) < len(content["settings"]):
        raise ValueError("a launch is listed twice")
    return entries


def _parse_entry(number: int, entry: Any) -> tuple[Launch, GemvConfig]:
    if not isinstance(entry, dict) or set(entry) != {*Launch._fields, *_FIELDS}:
        raise ValueError(f"entry {number} has not the keys {', '.join((*Launch._fields, *_FIELDS))}")
    op = entry["op"]
    if op not in OPS:
        raise ValueError(f"entry {number} has the unknown op {op!r}")
    config = GemvConfig(*(entry[name] for name in _FIELDS))
    possible = {"rows": range(1, MAX_SIZE), "width": range(1, MAX_SIZE), "narrowest": range(MAX_SIZE)}
    possible |= dict(zip(_FIELDS, choices(op).values(), strict=True))
    for name, values in possible.items():
        if type(entry[name]) is not int or entry[name] not in values:
            raise ValueError(f"entry {number} has {name} {entry[name]!r}")
    return Launch(*(entry[name] for name in Launch._fields)), config


def _triton_version() -> str | None:
    try:
        return version("triton")
    except PackageNotFoundError:
        return None
