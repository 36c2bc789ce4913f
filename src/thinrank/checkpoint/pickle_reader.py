"""Reads the files that `torch.save` writes, without running them: zip archives and the older plain streams.

`read_pickle` gives what was saved as plain values: tensors are `LazyTensor`s that read their bytes from the
file when asked, modules and other objects are inert `Stub`s (see `pickle_machine`). The rest of this file
takes such stubs apart: `module_tensors`, `stub_attributes`, `plain_json`.

Knows what torch writes, not what any compressor stores in it; that is the converters' business.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from math import isfinite, prod
from os import fstat
from pathlib import Path
from typing import BinaryIO, NoReturn, TypeGuard

import torch

from ..errors import CheckpointError
from .pickle_machine import GlobalRef, PickleMachine, Stub
from .tensors import LazyTensor

__all__ = [
    "GlobalRef",
    "Stub",
    "is_torch_checkpoint",
    "module_tensors",
    "plain_json",
    "read_pickle",
    "stub_attributes",
]

MAX_PICKLE_BYTES = 1 << 28  # a slow tokenizer's vocabulary may be in it, weights never are
MAX_DIMS = 8
MAX_NUMBER = 1 << 48  # sizes, strides, offsets: beyond any file, and products of two stay exact in torch
MAX_MODULE_DEPTH = 64
MAX_MODULES = 200_000
MAX_JSON_DEPTH = 32
MAX_JSON_VALUES = 100_000

ZIP_MAGIC = b"PK\x03\x04"
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
_LEGACY_MAGIC_BYTES = LEGACY_MAGIC.to_bytes(10, "little")  # as it stands in a pickle

_STORAGE_DTYPES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
    "UntypedStorage": torch.uint8,  # a storage saved by itself counts in bytes
}
_STORAGE_MODULES = ("torch", "torch.storage", "torch.cuda")
_SAVE_AGAIN = "save it again as safetensors, or with torch.save of a current PyTorch"


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
        raise CheckpointError(f"{path.name} is a tar file, as PyTorch wrote before version 0.2", _SAVE_AGAIN)
    if head[:1] == b"\x80":
        raise CheckpointError(f"{path.name} is a bare pickle, not a torch.save file", _SAVE_AGAIN)
    raise CheckpointError(f"{path.name} is not a torch.save file", "it may be damaged or of another type")


def _is_torch(head: bytes) -> bool:
    return head.startswith(ZIP_MAGIC) or (head[:1] == b"\x80" and _LEGACY_MAGIC_BYTES in head[:32])


# Tensors


@dataclass(frozen=True)
class _Extent:
    """A range of bytes in the file."""

    start: int
    size: int


@dataclass(eq=False)
class _Storage:
    """What the pickle says about a storage. `start`, its place in the file, is known after the pickle."""

    key: str
    dtype: torch.dtype
    numel: int
    start: int = 0

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


#: A setting computed with NumPy is pickled as a call of one of these. Its value is of no interest here.
_NUMPY_SCALARS = ("numpy.dtype", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")


class _TensorBuilder:
    """Imitates the functions by which a pickle rebuilds tensors."""

    def __init__(self, path: Path):
        self.path = path
        self.storages: dict[tuple[str, torch.dtype, int], _Storage] = {}
        self._tensors: dict[object, LazyTensor] = {}
        self._rebuilders: dict[str, Callable[[tuple[object, ...]], LazyTensor]] = {
            "torch._utils._rebuild_parameter": self._parameter,
            "torch._utils._rebuild_parameter_with_state": self._parameter,
            "torch._utils._rebuild_tensor": self._tensor,
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor_v3": self._tensor_v3,
        }

    def machine(self) -> PickleMachine:
        calls: dict[str, Callable[[tuple[object, ...]], object]] = {
            **self._rebuilders,
            "torch.Size": self._size,
            "torch.device": lambda args: Stub(GlobalRef("torch", "device"), args),
            "torch._tensor._rebuild_from_type_v2": self._tensor_with_attributes,
            **dict.fromkeys(_NUMPY_SCALARS, lambda args: Stub(GlobalRef("numpy", "scalar"), args)),
        }
        return PickleMachine(self.path.name, calls, self.persistent_load, opaque=(LazyTensor,))

    def persistent_load(self, identifier: object) -> object:
        match identifier:
            case ("storage", GlobalRef() as kind, str() as key, _, int() as numel, *view):
                return self._storage(kind, key, numel, view)
            case ("module", GlobalRef() as cls, _, _):  # old streams carry the source code of classes
                return cls
        self._bad("refers to data in an unknown way")

    def place(self, extents: Mapping[str, _Extent]) -> None:
        """Tell the storages where their bytes are."""
        for storage in self.storages.values():
            extent = extents.get(storage.key)
            if extent is None:
                self._bad(f"lacks the data of storage {storage.key[:80]!a}")
            if storage.nbytes > extent.size:
                self._bad(
                    f"has {extent.size} bytes for storage {storage.key!a}, which needs {storage.nbytes}"
                )
            storage.start = extent.start

    def _bad(self, what: str, hint: str = "copy or download it again") -> NoReturn:
        raise CheckpointError(f"{self.path.name} {what}", hint)

    def _storage(self, kind: GlobalRef, key: str, numel: int, view: list[object]) -> _Storage:
        dtype = _STORAGE_DTYPES.get(kind.name) if kind.module in _STORAGE_MODULES else None
        if dtype is None:
            self._bad(f"has tensors of type {kind}, which are not read", "only plain number types are")
        if view not in ([], [None]):
            self._bad("uses storage views, which PyTorch no longer writes", _SAVE_AGAIN)
        if not _is_count(numel):
            self._bad(f"has a storage of an absurd size, {numel if abs(numel) < 1 << 64 else 'huge'}")
        return self.storages.setdefault((key, dtype, numel), _Storage(key, dtype, numel))

    def _size(self, arguments: tuple[object, ...]) -> tuple[object, ...]:
        match arguments:
            case (tuple() | list() as sizes,) if len(sizes) <= MAX_DIMS:
                return tuple(sizes)
        self._bad("has a torch.Size that is not one")

    def _parameter(self, arguments: tuple[object, ...]) -> LazyTensor:
        match arguments:
            case (LazyTensor() as tensor, *_):
                return tensor
        self._bad("has a parameter that is not a tensor")

    def _tensor_with_attributes(self, arguments: tuple[object, ...]) -> LazyTensor:
        """A tensor on which somebody has set attributes, as transformers does: they are dropped."""
        match arguments:
            case (GlobalRef() as function, GlobalRef("torch", "Tensor"), tuple() as inner, *_):
                rebuild = self._rebuilders.get(f"{function.module}.{function.name}")
                if rebuild is not None:
                    return rebuild(inner)
                self._bad(f"has a tensor rebuilt by {function}, which is not read", _SAVE_AGAIN)
            case (_, GlobalRef() as cls, *_):
                self._bad(f"has a tensor of class {cls}, which is not read", _SAVE_AGAIN)
        self._bad("has a tensor with unusual attributes")

    def _tensor_v3(self, arguments: tuple[object, ...]) -> LazyTensor:
        """The form for dtypes without a storage class of their own, none of which we read."""
        dtype = arguments[6] if len(arguments) > 6 else "unknown"
        self._bad(
            f"has tensors of type {dtype if isinstance(dtype, GlobalRef) else 'unknown'}, which are not read",
            "only plain number types are",
        )

    def _tensor(self, arguments: tuple[object, ...]) -> LazyTensor:
        match arguments:
            case (_Storage() as storage, int() as offset, tuple() as size, tuple() as stride, *rest):
                pass
            case _:
                self._bad("has a tensor with unusual arguments")
        if len(rest) > 2 and rest[2]:  # conjugate or negative bit
            self._bad("has a tensor that is a lazy negative or conjugate", _SAVE_AGAIN)
        if len(size) > MAX_DIMS or len(size) != len(stride):
            self._bad(f"has a tensor of {len(size)} sizes and {len(stride)} strides")
        shape, steps = self._counts(size), self._counts(stride)
        if not _is_count(offset) or prod(max(n, 1) for n in shape) > MAX_NUMBER:
            self._bad("has a tensor of an absurd size")
        numel = prod(shape)
        if numel > storage.numel or (numel and offset + _span(shape, steps) > storage.numel):
            self._bad(
                f"has a tensor of shape {shape} in a storage of {storage.numel} numbers",
                "it is damaged, or an expanded tensor was saved: call contiguous() before saving",
            )
        identity = (storage.key, storage.dtype, offset, shape, steps)
        if identity not in self._tensors:
            read = partial(_read_tensor, self.path, storage, offset, shape, steps)
            self._tensors[identity] = LazyTensor(shape, storage.dtype, read)
        return self._tensors[identity]

    def _counts(self, values: tuple[object, ...]) -> tuple[int, ...]:
        counts = tuple(value for value in values if _is_count(value))
        if len(counts) != len(values):
            self._bad("has a tensor of an absurd size or stride")
        return counts


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= MAX_NUMBER  # bool is not a count


def _span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """How many numbers of the storage lie between the first and last of a tensor, both included."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _read_tensor(
    path: Path, storage: _Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    if not prod(shape):
        return torch.empty(shape, dtype=storage.dtype)
    itemsize = storage.dtype.itemsize
    buffer = bytearray(_span(shape, stride) * itemsize)
    try:
        with path.open("rb") as file:
            file.seek(storage.start + offset * itemsize)
            complete = file.readinto(buffer) == len(buffer)
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror or error}") from error
    if not complete:
        raise CheckpointError(f"{path.name} has become shorter since it was opened", "keep it until the end")
    if storage.dtype == torch.bool:  # other bytes than 0 and 1 would be neither true nor false
        return torch.frombuffer(buffer, dtype=torch.uint8).as_strided(shape, stride) != 0
    return torch.frombuffer(buffer, dtype=storage.dtype).as_strided(shape, stride).contiguous()


# The zip archive: one folder with data.pkl, the storages in data/, and a few small files.


def _read_zip(path: Path, file: BinaryIO) -> object:
    entries = _zip_entries(path.name, file)
    prefix = _zip_folder(path.name, entries)
    if f"{prefix}/constants.pkl" in entries:
        raise CheckpointError(f"{path.name} is a TorchScript program, not a torch.save file", _SAVE_AGAIN)
    byteorder = entries.get(f"{prefix}/byteorder")
    if byteorder is not None and _bytes_of(file, byteorder, 16) != b"little":
        raise CheckpointError(f"{path.name} was written on a big-endian machine", _SAVE_AGAIN)
    pickle = entries[f"{prefix}/data.pkl"]
    if pickle.size > MAX_PICKLE_BYTES:
        raise CheckpointError(f"{path.name} has a pickle of {pickle.size} bytes", "it holds no checkpoint")
    builder = _TensorBuilder(path)
    root = builder.machine().run(_bytes_of(file, pickle, MAX_PICKLE_BYTES))
    data = f"{prefix}/data/"
    builder.place({name.removeprefix(data): at for name, at in entries.items() if name.startswith(data)})
    return root


def _zip_folder(where: str, entries: Mapping[str, _Extent]) -> str:
    """The only folder at the top. The names are keys, never paths; odd ones are still refused."""
    for name in entries:
        parts = name.removesuffix("/").split("/")
        if "\\" in name or any(part in ("", ".", "..") for part in parts):
            raise CheckpointError(f"{where} contains a file with the suspicious name {name[:80]!a}")
    folders = {name.partition("/")[0] for name in entries}
    if len(folders) != 1 or f"{min(folders)}/data.pkl" not in entries:
        raise CheckpointError(f"{where} is a zip file, but not one that torch.save writes", _SAVE_AGAIN)
    return folders.pop()


def _zip_entries(where: str, file: BinaryIO) -> dict[str, _Extent]:
    """Where the bytes of each entry are: all stored as they are, none overlapping another."""
    entries: dict[str, _Extent] = {}
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
        entries[name] = _Extent(start, info.file_size)
        end = (
            info.header_offset
        )  # each entry must end before the one behind it, the last before the directory
    return entries


_ZIP_ERRORS = (
    *(zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError),
    *(EOFError, OverflowError, ValueError, struct.error),  # from fields that make no sense
)
_ENCRYPTED = 0x1 | 0x40 | 0x2000


def _local_header_size(where: str, file: BinaryIO, start: int) -> int:
    header = b""
    if start >= 0:
        file.seek(start)
        header = file.read(30)
    if len(header) < 30 or not header.startswith(ZIP_MAGIC):
        raise CheckpointError(f"{where} is damaged: an entry has no header", "copy or download it again")
    name_length, extra_length = struct.unpack("<HH", header[26:])
    return len(header) + int(name_length) + int(extra_length)


def _bytes_of(file: BinaryIO, extent: _Extent, limit: int) -> bytes:
    file.seek(extent.start)
    return file.read(min(extent.size, limit))


# The stream that PyTorch wrote before version 1.6: five pickles, then the storages.


def _read_legacy(path: Path, file: BinaryIO) -> object:
    builder = _TensorBuilder(path)
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
    extents: dict[str, _Extent] = {}
    for key in keys:
        if not isinstance(key, str) or key not in itemsizes or key in extents:
            machine.damaged("its list of storages does not fit its tensors")
        file.seek(position)
        length = file.read(8)
        if len(length) < 8:
            machine.damaged("it ends before its data")
        numel = int.from_bytes(length, "little", signed=True)
        extents[key] = _Extent(position + 8, numel * itemsizes[key])
        position += 8 + extents[key].size
        if numel < 0 or position > file_size:
            machine.damaged("it ends before its data")
    builder.place(extents)
    return root


# Stubs


def stub_attributes(stub: Stub) -> dict[str, object]:
    """The attributes of a pickled object, those in slots included.

    Raises CheckpointError when its state is something else than attributes.
    """
    state = stub.state
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    attributes: dict[str, object] = {}
    for part in parts:
        if not isinstance(part, dict | None):
            raise CheckpointError(f"the pickled {stub.cls} has no attributes, but {type(part).__name__}")
        for name, value in (part or {}).items():
            if not isinstance(name, str):
                raise CheckpointError(f"the pickled {stub.cls} has an attribute whose name is not text")
            attributes[name] = value
    return attributes


def module_tensors(stub: Stub) -> dict[str, LazyTensor]:
    """The `state_dict()` of a pickled `nn.Module`: parameters and persistent buffers by their full names.

    Raises CheckpointError when the tree is not one of modules, contains itself, or is absurdly large.
    """
    tensors: dict[str, LazyTensor] = {}
    pending: list[tuple[str, Stub, tuple[Stub, ...]]] = [("", stub, ())]
    for _ in range(MAX_MODULES):
        if not pending:
            return tensors
        prefix, module, parents = pending.pop()
        where = prefix.removesuffix(".") or "the model"
        if module in parents:
            raise CheckpointError(f"the pickled module {where} contains itself")
        if len(parents) > MAX_MODULE_DEPTH:
            raise CheckpointError(f"the pickled module {where} is nested too deeply")
        attributes = stub_attributes(module)
        transient = attributes.get("_non_persistent_buffers_set") or ()
        if not isinstance(transient, (set, frozenset, list, tuple)):
            raise CheckpointError(f"the pickled module {where} has an unusual list of buffers")
        for name, value in _members(attributes, "_parameters", where):
            tensors[prefix + name] = _as_tensor(value, prefix + name)
        for name, value in _members(attributes, "_buffers", where):
            if name not in transient:
                tensors[prefix + name] = _as_tensor(value, prefix + name)
        children: list[tuple[str, Stub, tuple[Stub, ...]]] = []
        for name, value in _members(attributes, "_modules", where):
            if not isinstance(value, Stub):
                raise CheckpointError(f"the pickled module {prefix + name} is no module")
            children.append((f"{prefix}{name}.", value, (*parents, module)))
        pending.extend(reversed(children))  # the stack gives them back in order
    raise CheckpointError(f"the pickled model has more than {MAX_MODULES} modules")


def _members(attributes: Mapping[str, object], kind: str, where: str) -> Iterator[tuple[str, object]]:
    """Names and values in one of a module's dictionaries; empty slots (no bias) are left out."""
    members = attributes.get(kind)
    if not isinstance(members, dict):
        raise CheckpointError(f"the pickled object {where} is no module: it has no {kind}")
    for name, value in members.items():
        if not isinstance(name, str):
            raise CheckpointError(f"the pickled module {where} has a member whose name is not text")
        if value is not None:
            yield name, value


def _as_tensor(value: object, name: str) -> LazyTensor:
    if not isinstance(value, LazyTensor):
        raise CheckpointError(f"{name} in the pickled module is no tensor")
    return value


class _NotPlain(Exception):
    """A value that JSON cannot express."""


def plain_json(value: object) -> object:
    """A copy of a pickled value as JSON has it: text, numbers, lists, dicts; dtypes and enums as their names.

    Entries of dicts that JSON cannot express are dropped. Raises CheckpointError when the value itself cannot
    be expressed, or is absurdly large or deep.
    """
    budget = iter(range(MAX_JSON_VALUES))
    try:
        return _plain(value, MAX_JSON_DEPTH, budget)
    except _NotPlain as error:
        raise CheckpointError(f"a pickled value cannot be expressed as JSON: {error}") from error


def _plain(value: object, depth: int, budget: Iterator[int]) -> object:
    # Values that are shared many times over are copied each time: hence the budget.
    if next(budget, None) is None or depth == 0:
        raise CheckpointError("a pickled value is too large or too deep to be a setting")
    match value:
        case None | bool() | str():
            return value
        case int() if abs(value) < 1 << 63:
            return value
        case float() if isfinite(value):
            return value
        case list() | tuple():
            return [_plain(item, depth - 1, budget) for item in value]
        case dict():
            result: dict[str, object] = {}
            for key, item in value.items():
                if isinstance(key, str) or (type(key) is int and abs(key) < 1 << 63):
                    try:
                        result[str(key)] = _plain(item, depth - 1, budget)
                    except _NotPlain:  # an attribute that is no setting
                        continue
            return result
        case GlobalRef(module="torch", name=name) if isinstance(vars(torch).get(name), torch.dtype):
            return name
        case Stub(args=(str() as name,), state=None):
            return name
    raise _NotPlain(f"it is of type {type(value).__name__}")
