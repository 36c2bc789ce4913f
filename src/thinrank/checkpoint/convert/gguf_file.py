"""GGUF files as metadata and lazy tensors.

The header is parsed here rather than with `gguf.GGUFReader`, which loops for ever on a damaged array length.
The `gguf` package only unpacks quantised blocks, so a file without any can be read without it. Knows nothing
about architectures, split files or big-endian files.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, overload

import numpy as np
import torch

from ...errors import CheckpointError, ThinrankError, UnsupportedModelError
from ..tensors import LazyTensor

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)

# Bounds far above any real header (a vocabulary of 256k tokens takes about 15 MB), so that a damaged
# length is an error rather than an allocation.
_MOST_HEADER_BYTES = 2**28
_MOST_ITEMS = 2**22
_MOST_NAME_CHARACTERS = 1024

_STRING, _ARRAY = 8, 9
_NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}

_PLAIN_TYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}

T = TypeVar("T")


class Metadata(dict[str, Any]):
    """The key-value pairs of a header: int, float, bool, str, list[str] or a NumPy array of numbers."""

    @overload
    def typed(self, key: str, kind: type[T]) -> T | None: ...
    @overload
    def typed(self, key: str, kind: type[T], default: T) -> T: ...
    def typed(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        """The value of `key`, or the default when it is absent.

        Raises CheckpointError when it is there with another type.
        """
        value = self.get(key)
        if value is None:
            return default
        if type(value) is not kind:
            raise CheckpointError(
                f"the GGUF key {key} holds a {type(value).__name__}, not a {kind.__name__}",
                "the file is damaged; download it again",
            )
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A positive number; a list that repeats one number for each layer counts as that number.

        Raises CheckpointError when it is missing or no sensible number, UnsupportedModelError when the
        layers differ.
        """
        value = self.get(key)
        if isinstance(value, np.ndarray):
            distinct = set(value.tolist())
            if len(distinct) > 1:
                raise UnsupportedModelError(
                    f"the GGUF key {key} differs from layer to layer", "this is not implemented"
                )
            value = distinct.pop() if distinct else None
        if value is None:
            value = default
        if type(value) is not int or not 1 <= value <= 2**28:
            raise CheckpointError(
                f"the GGUF key {key} is {value!r}, not a positive number", "the file is damaged or incomplete"
            )
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0. Raises CheckpointError when it is missing or anything else."""
        value = self.typed(key, float)
        if value is None:
            value = default
        if value is None or not 0 < value < math.inf:
            raise CheckpointError(
                f"the GGUF key {key} is {value!r}, not a number above 0", "the file is damaged or incomplete"
            )
        return value


class _Entry(NamedTuple):
    """One line of the tensor list: shape as PyTorch has it, type number, offset into the data."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True)
class _Encoding:
    """How one tensor type is stored: blocks of `block_size` numbers in `block_bytes` bytes."""

    name: str
    block_size: int
    block_bytes: int
    dtype: torch.dtype
    #: (bytes, number of rows) -> the numbers, in order, of `dtype`.
    decode: Callable[[bytearray, int], torch.Tensor]


def is_gguf(path: Path) -> bool:
    """Whether the file starts as a GGUF file does. False for folders and unreadable files."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


@dataclass(frozen=True)
class GGUFFile:
    """A parsed header. data_start: where the offsets of the entries count from."""

    path: Path
    metadata: Metadata
    entries: list[_Entry]
    data_start: int
    file_size: int

    @staticmethod
    def open(path: Path) -> GGUFFile:
        """Read the header. Raises CheckpointError for a damaged one, UnsupportedModelError for a version or
        byte order that is not read."""
        try:
            file_size = path.stat().st_size
            with path.open("rb") as file:
                return _parse_header(path, _FieldReader(file, file_size, path.name), file_size)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read", error.strerror or "check the path") from error

    def tensors(self) -> dict[str, LazyTensor]:
        """All tensors under the names that the file has, dequantised when read.

        F16 and BF16 tensors keep their type. F32 and every quantised type become float32: rounding a
        dequantised value to 16 bits moves the logits.

        Raises CheckpointError for a tensor that is not within the file, UnsupportedModelError for a type
        that cannot be unpacked, ThinrankError when the file is quantised and `gguf` is missing.
        """
        encodings: dict[int, _Encoding] = {}
        tensors: dict[str, LazyTensor] = {}
        for entry in self.entries:
            if entry.name in tensors:
                raise CheckpointError(
                    f"{self.path.name} lists a tensor twice", "the file is damaged; download it again"
                )
            if entry.type_id not in encodings:
                encodings[entry.type_id] = _encoding(entry)
            tensors[entry.name] = _lazy_tensor(self, entry, encodings[entry.type_id])
        return tensors


class _FieldReader:
    """Takes the fields of a header one after the other, and never more than the file has."""

    def __init__(self, file: BinaryIO, file_size: int, name: str):
        self.position = 0
        self._file = file
        self._limit = min(file_size, _MOST_HEADER_BYTES)
        self._name = name

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._name}: {what}", "the file is damaged or incomplete; download it again"
        )

    def take(self, length: int) -> bytes:
        if length > self._limit - self.position:
            raise self.damaged("the header runs past the end of the file")
        data = self._file.read(length)
        if len(data) != length:
            raise self.damaged("the file ends inside its header")
        self.position += length
        return data

    def integer(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def items(self, what: str) -> int:
        """A 64-bit number of things that follow."""
        count = self.integer(8)
        if count > _MOST_ITEMS:
            raise self.damaged(f"the header announces {count} {what}")
        return count

    def text(self) -> str:
        try:
            return self.take(self.integer(8)).decode()
        except UnicodeDecodeError:
            raise self.damaged("a string in the header is not UTF-8") from None

    def name(self) -> str:
        """A string that error messages may show."""
        name = self.text()
        if len(name) > _MOST_NAME_CHARACTERS or not name.isprintable():
            raise self.damaged("the header holds a name that is none")
        return name

    def value(self) -> Any:
        """A type number and a value of that type; see `Metadata` for the Python types."""
        kind = self.integer(4)
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            kind = self.integer(4)
            count = self.items("array elements")
            if kind == _STRING:
                return [self.text() for _ in range(count)]
            dtype = self._number_type(kind)
            return np.frombuffer(self.take(count * dtype.itemsize), dtype)
        dtype = self._number_type(kind)
        number = np.frombuffer(self.take(dtype.itemsize), dtype)[0]
        # The shortest decimal that names the same float32: 1e-05, not 9.999999747378752e-06.
        return float(str(number)) if kind == 6 else number.item()

    def _number_type(self, kind: int) -> np.dtype[Any]:
        if kind not in _NUMBERS:
            raise self.damaged(f"the header holds a value of unknown type {kind}")
        return _NUMBERS[kind]


def _parse_header(path: Path, reader: _FieldReader, file_size: int) -> GGUFFile:
    if reader.take(len(_MAGIC)) != _MAGIC:
        raise reader.damaged("the file does not start as a GGUF file does")
    version = reader.integer(4)
    if version not in _VERSIONS:
        # A big-endian file shows its version in the upper bytes.
        what = "is big-endian" if version and version & 0xFFFF == 0 else f"has GGUF version {version}"
        raise UnsupportedModelError(
            f"the file {what}", "little-endian files of versions 2 and 3 are read; convert the model anew"
        )
    tensor_count, key_count = reader.items("tensors"), reader.items("keys")
    metadata = Metadata()
    for _ in range(key_count):
        key = reader.name()
        if key in metadata:
            raise reader.damaged(f"the key {key} appears twice")
        metadata[key] = reader.value()

    entries = []
    for _ in range(tensor_count):
        name = reader.name()
        dimensions = reader.integer(4)
        if not 1 <= dimensions <= 4:
            raise reader.damaged(f"the tensor {name} has {dimensions} dimensions")
        # GGUF lists the fastest-running dimension first, PyTorch last.
        shape = tuple(reader.integer(8) for _ in range(dimensions))[::-1]
        entries.append(_Entry(name, shape, reader.integer(4), reader.integer(8)))

    alignment = metadata.typed("general.alignment", int, 32)
    if not 1 <= alignment <= 2**20:
        raise reader.damaged(f"general.alignment is {alignment}")
    data_start = -(-reader.position // alignment) * alignment
    return GGUFFile(path, metadata, entries, data_start, file_size)


def _encoding(entry: _Entry) -> _Encoding:
    """How the tensor is stored.

    Raises ThinrankError when `gguf` is needed and missing, UnsupportedModelError for a type it cannot
    unpack.
    """
    if entry.type_id in _PLAIN_TYPES:
        dtype = _PLAIN_TYPES[entry.type_id]
        return _Encoding(
            str(dtype), 1, dtype.itemsize, dtype, lambda data, _rows: torch.frombuffer(data, dtype=dtype)
        )
    try:
        import gguf
        from gguf.quants import dequantize
    except ImportError as error:
        raise ThinrankError(
            f"the tensor {entry.name} is quantised and the gguf package is missing",
            "pip install 'thinrank[gguf]'",
        ) from error

    def decode(data: bytearray, rows: int) -> torch.Tensor:
        packed = np.frombuffer(data, np.uint8).reshape(rows, -1)
        with np.errstate(all="ignore"):  # damaged scales may be infinite
            return torch.from_numpy(np.ascontiguousarray(dequantize(packed, kind), dtype=np.float32))

    try:
        kind = gguf.GGMLQuantizationType(entry.type_id)
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        decode(bytearray(block_bytes), 1)  # Some types have a size, but nothing that unpacks them.
    except (ValueError, KeyError, NotImplementedError):
        raise UnsupportedModelError(
            f"the tensor {entry.name} is stored as GGML type {entry.type_id}, which cannot be unpacked",
            "quantise the model to another type, or update the gguf package",
        ) from None
    return _Encoding(kind.name, block_size, block_bytes, torch.float32, decode)


def _lazy_tensor(file: GGUFFile, entry: _Entry, encoding: _Encoding) -> LazyTensor:
    """Check that the tensor lies inside the file, and promise it. Raises CheckpointError."""
    path = file.path
    numel = math.prod(entry.shape)
    if numel == 0 or entry.shape[-1] % encoding.block_size:
        raise CheckpointError(
            f"{path.name}: the tensor {entry.name} has the shape {list(entry.shape)}",
            f"rows of {encoding.name} hold a multiple of {encoding.block_size} numbers; the file is damaged",
        )
    start = file.data_start + entry.offset
    nbytes = numel // encoding.block_size * encoding.block_bytes
    if start + nbytes > file.file_size:
        raise CheckpointError(
            f"{path.name} ends before the tensor {entry.name} does",
            "the file is incomplete; download it again",
        )

    def read_tensor() -> torch.Tensor:
        data = bytearray(nbytes)
        try:
            with path.open("rb") as stream:
                stream.seek(start)
                length = stream.readinto(data)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read", error.strerror or "check the path") from error
        if length != nbytes:
            raise CheckpointError(f"{path.name} became shorter while it was read", "download it again")
        return encoding.decode(data, numel // entry.shape[-1]).reshape(entry.shape)

    return LazyTensor(entry.shape, encoding.dtype, read_tensor)
