"""Reads the files that `torch.save` writes, without running them: zip archives and the older plain streams.

What was saved comes as plain values: tensors are `LazyTensor`s that read their bytes from the file when asked
(`pickle_tensors`), modules and other objects are inert `Stub`s (`pickle_machine`) that `pickle_objects` takes apart.

Knows what torch writes, not what any compressor stores in it; that is the converters' business.
"""

from __future__ import annotations

from io import BytesIO
from os import fstat
from pathlib import Path
from typing import BinaryIO

from ..errors import CheckpointError
from .pickle_archive import ZIP_MAGIC, zip_entries, zip_folder
from .pickle_tensors import SAVE_AGAIN, Extent, TensorBuilder

MAX_PICKLE_BYTES = 1 << 28  # a slow tokenizer's vocabulary may be in it, weights never are

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
_LEGACY_MAGIC_BYTES = LEGACY_MAGIC.to_bytes(10, "little")  # as it stands in a pickle


def is_torch_checkpoint(path: Path) -> bool:
    """Whether the first bytes are those of a `torch.save` file. Any zip file looks like one."""
    try:
        with path.open("rb") as file:
            return _is_torch(file.read(64))
    except OSError:
        return False


def read_pickle(path: Path) -> object:
    """What was given to `torch.save`: dicts, lists, text, numbers, bytes, `LazyTensor`, `Stub`, `GlobalRef`.

    Ordered dictionaries become dicts, `torch.Size` a tuple, parameters plain tensors. Tensors that were one
    tensor when saved (tied weights) are one `LazyTensor` object. The file must stay as it is until they are
    read. Raises UnsafePickleError when the pickle wants to call something, CheckpointError when the file is
    unreadable, damaged, or of another type.
    """
    path = path.absolute()
    try:
        with path.open("rb") as file:
            head = file.read(512)
            file.seek(0)
            if head.startswith(ZIP_MAGIC):
                return _read_zip(path, file)
            if _is_torch(head):
                return _read_legacy(path, file)
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror or error}") from error
    if head[257:262] == b"ustar":
        raise CheckpointError(f"{path.name} is a tar file, as PyTorch wrote before version 0.2", SAVE_AGAIN)
    if head[:1] == b"\x80":
        raise CheckpointError(f"{path.name} is a bare pickle, not a torch.save file", SAVE_AGAIN)
    raise CheckpointError(f"{path.name} is not a torch.save file", "it may be damaged or of another type")


def _is_torch(head: bytes) -> bool:
    return head.startswith(ZIP_MAGIC) or (head[:1] == b"\x80" and _LEGACY_MAGIC_BYTES in head[:32])


def _read_zip(path: Path, file: BinaryIO) -> object:
    entries = zip_entries(path.name, file)
    prefix = zip_folder(path.name, entries)
    if f"{prefix}/constants.pkl" in entries:
        raise CheckpointError(f"{path.name} is a TorchScript program, not a torch.save file", SAVE_AGAIN)
    byteorder = entries.get(f"{prefix}/byteorder")
    if byteorder is not None and _bytes_of(file, byteorder, 16) != b"little":
        raise CheckpointError(f"{path.name} was written on a big-endian machine", SAVE_AGAIN)
    pickle = entries[f"{prefix}/data.pkl"]
    if pickle.size > MAX_PICKLE_BYTES:
        raise CheckpointError(f"{path.name} has a pickle of {pickle.size} bytes", "it holds no checkpoint")
    builder = TensorBuilder(path)
    root = builder.machine().run(_bytes_of(file, pickle, MAX_PICKLE_BYTES))
    data = f"{prefix}/data/"
    builder.place({name.removeprefix(data): at for name, at in entries.items() if name.startswith(data)})
    return root


def _bytes_of(file: BinaryIO, extent: Extent, limit: int) -> bytes:
    file.seek(extent.start)
    return file.read(min(extent.size, limit))


# The stream that PyTorch wrote before version 1.6: five pickles, then the storages.


def _read_legacy(path: Path, file: BinaryIO) -> object:
    builder = TensorBuilder(path)
    machine = builder.machine()
    stream = BytesIO(file.read(MAX_PICKLE_BYTES))
    if machine.run(stream) != LEGACY_MAGIC or machine.run(stream) != LEGACY_PROTOCOL:
        machine.damaged("it does not begin as torch.save files do")
    system = machine.run(stream)
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        machine.refuse("it was not written on a little-endian machine")
    root = machine.run(stream)
    keys = machine.run(stream)
    if not isinstance(keys, list):
        machine.damaged("it has no list of storages")

    itemsizes: dict[object, int] = {}
    for storage in builder.storages.values():  # the first mention of a storage gives the unit of its length
        itemsizes.setdefault(storage.key, storage.dtype.itemsize)
    file_size = fstat(file.fileno()).st_size
    position = stream.tell()
    extents: dict[str, Extent] = {}
    for key in keys:
        if not isinstance(key, str) or key not in itemsizes or key in extents:
            machine.damaged("its list of storages does not fit its tensors")
        file.seek(position)
        length = file.read(8)
        if len(length) < 8:
            machine.damaged("it ends before its data")
        numel = int.from_bytes(length, "little", signed=True)
        extents[key] = Extent(position + 8, numel * itemsizes[key])
        position += 8 + extents[key].size
        if numel < 0 or position > file_size:
            machine.damaged("it ends before its data")
    builder.place(extents)
    return root
