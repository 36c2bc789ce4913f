"""Safetensors files as lazy tensors. The safetensors library parses and checks the header.

A file is opened again for each tensor: a mapping kept open would count every page read as resident memory.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError, UnsupportedModelError
from .tensors import LazyTensor

#: Element types of the file format, both ways.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


#: A header of the 100 MB that the library allows holds millions of names, each of which costs 40 us. The deepest
#: model that is read has some 90,000.
MAX_TENSORS = 100_000


def read_safetensors(path: Path) -> dict[str, LazyTensor]:
    """All tensors of one file, by name.

    Raises CheckpointError when the file is missing, truncated, damaged or has absurdly many tensors,
    UnsupportedModelError for an element type that is not a plain number (FP8, ...).
    """
    tensors: dict[str, LazyTensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            if len(names) > MAX_TENSORS:
                raise CheckpointError(f"{path} holds {len(names):,} tensors", "no model has so many")
            for name in names:
                view = file.get_slice(name)
                dtype = DTYPES.get(view.get_dtype())
                if dtype is None:
                    raise UnsupportedModelError(
                        f"{path} stores {name} as {view.get_dtype()}",
                        "only 16- and 32-bit weights are supported",
                    )
                tensors[name] = LazyTensor(tuple(view.get_shape()), dtype, _reader(path, name))
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error
    return tensors


def _reader(path: Path, name: str):  # type: ignore[no-untyped-def]
    def read() -> torch.Tensor:
        try:
            with safe_open(path, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
                return tensor
        except (SafetensorError, OSError) as error:
            raise _damaged(path, error) from error

    return read


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"cannot read {path}: {error}", "the file is damaged or incomplete; copy it again")
