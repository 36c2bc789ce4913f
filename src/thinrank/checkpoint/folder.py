"""The parts of a Hugging Face style folder: config.json, the weight files and their index, the tokenizer.

Names inside a folder come from strangers: an index may only name files that lie directly in the folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

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

#: No JSON file of a checkpoint is larger; 128 MB tokenizers do not exist (the largest known has 35 MB).
MAX_JSON_BYTES = 128 * 2**20


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError when it is missing, too large or no object."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes", "that is no plausible JSON file")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}", "check the path") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no valid JSON: {error}", "copy the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object", "copy the file again")
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
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if name != Path(name).name or name in ("", ".", ".."):
            raise CheckpointError(f"{index_path} names the file {name!r}", "shards must lie beside the index")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {', '.join(missing[:3])}{' and others' if len(missing) > 3 else ''}"
            f" ({len(missing)} of {len(names)} shards)",
            "download or copy the missing files",
        )
    return [folder / name for name in names]


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Tokenizer, chat template and generation config by file name, as far as the folder has them."""
    files: dict[str, bytes] = {}
    for name in TOKENIZER_FILES:
        path = folder / name
        if path.is_file():
            if path.stat().st_size > MAX_JSON_BYTES:
                raise CheckpointError(f"{path} has {path.stat().st_size} bytes", "that is no tokenizer file")
            files[name] = path.read_bytes()
    return files
