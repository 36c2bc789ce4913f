"""The parts of a Hugging Face style folder: config.json, the weight files and their index, the tokenizer.

Names inside a folder come from strangers: an index may only name files that lie directly in the folder.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .tensors import LazyTensor

#: A folder with none of these has no tokenizer.
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

#: Copied along unchanged, where present.
TOKENIZER_FILES = (
    *VOCABULARY_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)

#: No tokenizer file is larger; the largest known has 35 MB.
MAX_TOKENIZER_BYTES = 128 * 2**20
#: No config or index is larger; read into Python, it takes 20 times as much. The index of a 405B model has 0.1 MB.
MAX_JSON_BYTES = 16 * 2**20
#: Of a file name, as file systems have it.
MAX_NAME_BYTES = 255


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError when it is missing or too large, and as `parse_json` does."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes", "that is no plausible JSON file")
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}", "check the path") from error


def parse_json(content: bytes, where: str) -> dict[str, Any]:
    """A JSON object. where: its file, for messages.

    Raises CheckpointError when it is damaged, something else, names a key twice (readers differ in which they take),
    or has a number that JSON does not know (NaN, Infinity).
    """
    try:
        value = json.loads(content, object_pairs_hook=_distinct, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is no valid JSON: {error}", "copy the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} holds no JSON object", "copy the file again")
    return value


def weight_files(folder: Path, stem: str, suffix: str) -> list[Path]:
    """The file `<stem>.<suffix>`, or those that `<stem>.<suffix>.index.json` names; empty if neither exists.

    Raises CheckpointError when the index names a file that is missing or lies elsewhere.
    """
    index_path = folder / f"{stem}.{suffix}.index.json"
    if not index_path.is_file():
        single = folder / f"{stem}.{suffix}"
        return [single] if single.is_file() else []
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise CheckpointError(f"{index_path} has no weight_map", "copy the file again")
    for name in weight_map.values():
        if not _is_bare_name(name):
            raise CheckpointError(f"{index_path} names the file {name!r}", "shards must lie beside the index")
    names = set(weight_map.values())
    present = {path.name for path in folder.iterdir() if path.is_file()}
    missing = sorted(names - present)
    if missing:
        raise CheckpointError(
            f"{folder} lacks {', '.join(missing[:3])}{' and others' if len(missing) > 3 else ''}"
            f" ({len(missing)} of {len(names)} shards)",
            "download or copy the missing files",
        )
    return [folder / name for name in sorted(names)]


def read_shards(
    files: Iterable[Path], read: Callable[[Path], Mapping[str, LazyTensor]]
) -> dict[str, LazyTensor]:
    """The tensors of all weight files. Raises CheckpointError when two of them hold the same one."""
    tensors: dict[str, LazyTensor] = {}
    for file in files:
        shard = read(file)
        twice = next((name for name in shard if name in tensors), None)
        if twice is not None:
            raise CheckpointError(
                f"{file} holds {twice}, and so does another file", "remove the file that is no part of it"
            )
        tensors |= shard
    return tensors


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Tokenizer, chat template and generation config by file name, as far as the folder has them."""
    files: dict[str, bytes] = {}
    for name in TOKENIZER_FILES:
        path = folder / name
        if path.is_file():
            try:
                if path.stat().st_size > MAX_TOKENIZER_BYTES:
                    raise CheckpointError(
                        f"{path} has {path.stat().st_size} bytes", "that is no tokenizer file"
                    )
                files[name] = path.read_bytes()
            except OSError as error:
                raise CheckpointError(f"cannot read {path}: {error.strerror}", "check the path") from error
    return files


def _is_bare_name(name: object) -> bool:
    return (
        isinstance(name, str)
        and "/" not in name
        and "\\" not in name
        and name not in ("", ".", "..")
        and name.isprintable()
        and len(name.encode()) <= MAX_NAME_BYTES
    )


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"{next(key for key in values if counts[key] > 1)!r} stands there twice")
    return values


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text} is no number")
    return value
