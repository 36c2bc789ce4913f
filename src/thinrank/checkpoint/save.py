"""Writes a checkpoint folder: tensor by tensor, into a temporary folder that is renamed when complete.

Knows nothing about what the tensors mean. Peak memory is one tensor.
"""

from __future__ import annotations

import errno
import json
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from tqdm.auto import tqdm

from ..errors import OutputError, ThinrankError
from .claim import claimed
from .format import CONFIG_NAME, INDEX_NAME, WEIGHTS_NAME
from .safetensors_reader import DTYPES
from .tensors import LazyTensor

#: Larger checkpoints are split into shards of at most this many bytes.
MAX_SHARD_BYTES = 4 * 10**9

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def save_checkpoint(
    destination: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, LazyTensor],
    files: Mapping[str, bytes],
    *,
    force: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: bool = True,
) -> None:
    """Write config, weights and further files (tokenizer, ...) as a checkpoint folder.

    With `force` an existing checkpoint is replaced, at the moment the new one is complete.

    Raises OutputError when the destination exists, is no checkpoint, or cannot be written; then nothing
    is left behind.
    """
    needed = sum(t.nbytes for t in tensors.values()) + sum(len(content) for content in files.values())
    with staged_folder(destination, force=force, needed_bytes=needed) as folder:
        _write_weights(folder, tensors, max_shard_bytes, progress)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@contextmanager
def staged_folder(destination: Path, *, force: bool, needed_bytes: int) -> Iterator[Path]:
    """Give a temporary folder beside `destination` that takes its name when the block succeeds.

    When the block fails, the temporary folder is removed and `destination` is as it was. One that a
    killed process left behind is removed first.
    """
    destination = Path(destination).absolute()
    check_destination(destination, force=force)
    staging = destination.with_name(f".{destination.name}.incomplete")
    try:
        with claimed(staging) as is_ours:
            if not is_ours:
                raise _is_written_already(destination)
            try:
                for leftover in staging.iterdir():
                    _remove(leftover)
                free = shutil.disk_usage(staging).free
                if needed_bytes > free:
                    raise OutputError(
                        f"{destination} needs {needed_bytes / 1e9:.2f} GB and its disk has {free / 1e9:.2f} GB free",
                        "free some space or choose another destination",
                    )
                yield staging
                _replace(staging, destination)
            finally:
                _remove(staging)
    except OSError as error:
        raise write_error(destination, error) from error


def work_path(destination: Path) -> Path:
    """Where `resumable_folder` keeps the intermediate files of a destination."""
    return Path(destination).absolute().with_name(f".{Path(destination).name}.work")


@contextmanager
def resumable_folder(destination: Path, files: Path | None = None) -> Iterator[Path]:
    """Give a folder beside `destination` for intermediate files, to one process at a time.

    It is removed at the end. It stays when the process is killed or interrupted, and when something cannot be
    written: the next one finds its files. A mistake in the options, or a source that cannot be used, leaves it as
    it was. files: another folder, where the caller keeps most of them; errors name it.

    Raises OutputError when it cannot be made or written, or another process has it.
    """
    work = work_path(destination)
    found = work.exists()
    try:
        with claimed(work) as is_ours:
            if not is_ours:
                raise _is_written_already(destination)
            try:
                yield work
            except (OutputError, OSError) as error:
                if not any(work.iterdir()):
                    _remove(work)
                    raise
                known = write_error(files or destination, error) if isinstance(error, OSError) else error
                raise OutputError(
                    known.message, f"{known.hint}; what is done stays in {files or work}"
                ) from error
            except ThinrankError:
                if not found:
                    _remove(work)
                raise
            _remove(work)
    except OSError as error:
        raise write_error(files or destination, error) from error


def check_destination(destination: Path, *, force: bool, sources: Sequence[Path] = ()) -> None:
    """Raise OutputError unless `destination` is free, or is a checkpoint that `force` may replace.

    sources: what the checkpoint is made from; a destination that is one of them, or holds one, is never replaced.
    """
    if not destination.exists() and not destination.is_symlink():
        return
    if destination.is_dir() and not any(destination.iterdir()):
        return
    if not force:
        raise OutputError(f"{destination} exists already", "choose another destination or pass --force")
    if not (destination / CONFIG_NAME).is_file():
        raise OutputError(
            f"{destination} exists and is no checkpoint (no {CONFIG_NAME}), so --force does not replace it",
            "choose another destination or remove it yourself",
        )
    for source in sources:
        if source.resolve().is_relative_to(destination.resolve()):
            raise OutputError(
                f"{destination} holds the source {source}, so --force does not replace it",
                "choose another destination",
            )


def _is_written_already(destination: Path) -> OutputError:
    return OutputError(
        f"another process is writing {destination}", "wait for it, or choose another destination"
    )


def write_error(destination: Path, error: OSError) -> OutputError:
    """The one-line error for a failed write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutputError(
            f"the disk filled up while writing {destination}", "free some space and run it again"
        )
    return OutputError(f"cannot write {destination}: {error.strerror or error}", "choose another destination")


def shard_tensors(tensors: Mapping[str, LazyTensor], max_shard_bytes: int) -> list[dict[str, LazyTensor]]:
    """Split tensors, in order, into shards of at most `max_shard_bytes` (or one tensor, if larger)."""
    shards: list[dict[str, LazyTensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def _write_weights(
    folder: Path, tensors: Mapping[str, LazyTensor], max_shard_bytes: int, progress: bool
) -> None:
    shards = shard_tensors(tensors, max_shard_bytes)
    total = sum(t.nbytes for t in tensors.values())
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="Writing", disable=not progress, leave=False
    ) as bar:
        if len(shards) == 1:
            write_safetensors(folder / WEIGHTS_NAME, shards[0], bar.update)
            return
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            write_safetensors(folder / name, shard, bar.update)
            weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_safetensors(
    path: Path, tensors: Mapping[str, LazyTensor], on_bytes: Callable[[int], object] = lambda count: None
) -> None:
    """Stream one safetensors file: 8-byte length, JSON header padded to 8 bytes, then the data.

    on_bytes: told of each tensor's bytes when they are written. Raises OSError.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)))
        file.write(encoded)
        for name, tensor in tensors.items():
            _write_tensor(file, name, tensor)
            on_bytes(tensor.nbytes)


def _write_tensor(file: BinaryIO, name: str, tensor: LazyTensor) -> None:
    """A function of its own, so that one tensor is gone before the next is read."""
    value = tensor.read()
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise AssertionError(f"{name} was announced as {tensor} and read as {value.shape} {value.dtype}")
    # A byte view works for every dtype, bfloat16 included.
    file.write(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _replace(staging: Path, destination: Path) -> None:
    if not destination.exists():
        staging.rename(destination)
        return
    old = destination.with_name(f".{destination.name}.replaced")
    _remove(old)
    destination.rename(old)
    staging.rename(destination)
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
