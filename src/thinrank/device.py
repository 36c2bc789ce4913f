"""Facts about the machine, and how numbers get onto it. The only module that may read environment variables."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import OptionError


def resolve_device(name: str | torch.device) -> torch.device:
    """The device that an option names: "auto", "cpu", "cuda" or "cuda:<index>".

    "auto" is the first GPU, or the CPU where there is none. Raises OptionError for an unknown or absent one.
    """
    if str(name) == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    kind, _, index = str(name).partition(":")
    if (
        kind not in ("cpu", "cuda")
        or (index and not index.isdecimal())
        or (kind == "cpu" and int(index or 0))
    ):
        raise OptionError(f"unknown device {str(name)!r}", "known: auto, cpu, cuda, cuda:<index>")
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        reason = "this torch is built without CUDA" if torch.version.cuda is None else "torch sees no GPU"
        raise OptionError(f"device {str(name)!r} is not available: {reason}", "use --device cpu or auto")
    if int(index or 0) >= count:
        raise OptionError(f"device {str(name)!r} does not exist", f"there are {count} GPUs, counted from 0")
    return torch.device("cuda", int(index or 0))


def cache_folder() -> Path | None:
    """Where a user's files go that can be made again: thinrank in XDG_CACHE_HOME or ~/.cache. None without a home."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    if Path(named).is_absolute():  # the XDG specification: any other is ignored
        return Path(named) / "thinrank"
    try:
        return Path.home() / ".cache" / "thinrank"
    except RuntimeError:
        return None


def physical_memory() -> int:
    """Bytes of main memory that the machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_memory(device: torch.device) -> tuple[int, int]:
    """Bytes that are free and bytes that there are: of the GPU, or of main memory for the CPU."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free, total
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"), physical_memory()


def upload(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of (nested lists of) numbers on a device. The host does not wait for what the device is doing."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
