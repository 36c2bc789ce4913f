"""The zip archive that `torch.save` writes: one folder with data.pkl, the storages in data/, and a few small files."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping
from typing import BinaryIO

from ..errors import CheckpointError
from .pickle_tensors import SAVE_AGAIN, Extent

ZIP_MAGIC = b"PK\x03\x04"

_ZIP_ERRORS = (
    *(zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError),
    *(EOFError, OverflowError, ValueError, struct.error),  # from fields that make no sense
)
_ENCRYPTED = 0x1 | 0x40 | 0x2000


def zip_folder(where: str, entries: Mapping[str, Extent]) -> str:
    """The only folder at the top. The names are keys, never paths; odd ones are still refused."""
    for name in entries:
        parts = name.removesuffix("/").split("/")
        if "\\" in name or any(part in ("", ".", "..") for part in parts):
            raise CheckpointError(f"{where} contains a file with the suspicious name {name[:80]!a}")
    folders = {name.partition("/")[0] for name in entries}
    if len(folders) != 1 or f"{min(folders)}/data.pkl" not in entries:
        raise CheckpointError(f"{where} is a zip file, but not one that torch.save writes", SAVE_AGAIN)
    return folders.pop()


def zip_entries(where: str, file: BinaryIO) -> dict[str, Extent]:
    """Where the bytes of each entry are: all stored as they are, none overlapping another."""
    entries: dict[str, Extent] = {}
    try:
        archive = zipfile.ZipFile(file)
    except _ZIP_ERRORS as error:
        raise CheckpointError(f"{where} is damaged: {error}", "copy or download it again") from error
    end = archive.start_dir
    for info in sorted(archive.infolist(), key=lambda info: info.header_offset, reverse=True):
        name = info.filename
        if name in entries:
            raise CheckpointError(f"{where} contains {name[:80]!a} twice", "copy or download it again")
        if name != info.orig_filename:
            raise CheckpointError(f"{where} contains a file with the suspicious name {name[:80]!a}")
        if info.flag_bits & _ENCRYPTED:
            raise CheckpointError(f"{where} is encrypted", "decrypt it first")
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise CheckpointError(f"{where} is compressed", "save it again without compression")
        start = info.header_offset + _local_header_size(where, file, info.header_offset)
        if start + info.file_size > end:
            raise CheckpointError(
                f"{where} is damaged: {name[:80]!a} is not within it", "copy or download it again"
            )
        entries[name] = Extent(start, info.file_size)
        # Each entry must end before the one behind it, the last before the directory.
        end = info.header_offset
    return entries


def _local_header_size(where: str, file: BinaryIO, start: int) -> int:
    header = b""
    if start >= 0:
        file.seek(start)
        header = file.read(30)
    if len(header) < 30 or not header.startswith(ZIP_MAGIC):
        raise CheckpointError(f"{where} is damaged: an entry has no header", "copy or download it again")
    name_length, extra_length = struct.unpack("<HH", header[26:])
    return len(header) + int(name_length) + int(extra_length)
