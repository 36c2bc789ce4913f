"""Tensors in a pickle that `torch.save` wrote: rebuilt from numbers, read from the file when asked.

Imitates the functions by which PyTorch rebuilds tensors, and checks every number that the pickle gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import NoReturn, TypeGuard

import torch

from ..errors import CheckpointError
from .pickle_machine import GlobalRef, PickleMachine, Stub
from .tensors import LazyTensor

MAX_DIMS = 8
MAX_NUMBER = 1 << 48  # sizes, strides, offsets: beyond any file, and products of two stay exact in torch

#: What to do about a file of a form that is not read.
SAVE_AGAIN = "save it again as safetensors, or with torch.save of a current PyTorch"

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


@dataclass(frozen=True)
class Extent:
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


class TensorBuilder:
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

    def place(self, extents: Mapping[str, Extent]) -> None:
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
            self._bad("uses storage views, which PyTorch no longer writes", SAVE_AGAIN)
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
                self._bad(f"has a tensor rebuilt by {function}, which is not read", SAVE_AGAIN)
            case (_, GlobalRef() as cls, *_):
                self._bad(f"has a tensor of class {cls}, which is not read", SAVE_AGAIN)
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
            self._bad("has a tensor that is a lazy negative or conjugate", SAVE_AGAIN)
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
