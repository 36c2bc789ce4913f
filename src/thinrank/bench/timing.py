"""Measuring: time, read bandwidth, launches, energy, memory. Knows nothing about models."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import Any

import torch

from ..device import device_memory

#: Bytes that the bandwidth measurement reads, on a GPU and on a CPU: many times any cache.
BANDWIDTH_BYTES = {"cuda": 4 * 2**30, "cpu": 2**28}
#: An energy counter is refreshed some ten times a second, so a shorter window would be noise.
ENERGY_SECONDS = 2.0

#: Host calls that launch one kernel, and those that launch a whole graph, as the profiler names them.
KERNEL_LAUNCHES = frozenset(
    {
        "cudaLaunchKernel",
        "cudaLaunchKernelExC",
        "cudaLaunchCooperativeKernel",
        "cuLaunchKernel",
        "cuLaunchKernelEx",
        "cuLaunchCooperativeKernel",
        "hipLaunchKernel",
        "hipExtLaunchKernel",
    }
)
GRAPH_LAUNCHES = frozenset({"cudaGraphLaunch", "cuGraphLaunch", "hipGraphLaunch"})
COPIES = frozenset(
    {"cudaMemcpy", "cudaMemcpyAsync", "cuMemcpyAsync", "hipMemcpyAsync", "hipMemcpyWithStream"}
)


@dataclass(frozen=True)
class Percentiles:
    """Of a series of measurements, in its own unit."""

    p20: float
    p50: float
    p80: float

    @staticmethod
    def of(values: Iterable[float]) -> Percentiles:
        """Linear between the two nearest values."""
        data = torch.tensor(list(values), dtype=torch.float64)
        return Percentiles(*data.quantile(data.new_tensor([0.2, 0.5, 0.8])).tolist())


@dataclass(frozen=True)
class Launches:
    """What the host launched: kernels one by one, graphs, and copies."""

    kernels: int
    graphs: int
    copies: int


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """How long one call takes from an idle device until its result is there.

    `run` must wait for its own result, and for nothing else: what it launches ahead for a later call is not
    part of this one. So the clock is the host's, not a pair of events, which would wait for everything; the
    synchronisation costs some 10 us, nothing beside the milliseconds that are measured here.
    """
    synchronize(device)
    started = perf_counter()
    run()
    return 1e3 * (perf_counter() - started)


def read_bandwidth(device: torch.device, iterations: int = 10) -> float:
    """Bytes a second that the device reads from its memory: the maximum of a large int32 tensor, median time.

    The tensor is random, because zeros may read faster than real data. It has `BANDWIDTH_BYTES`, or half of
    the free memory where that is less.
    """
    free, _ = device_memory(device)
    size = min(BANDWIDTH_BYTES[device.type], free // 2)
    data = torch.empty(size // 4, dtype=torch.int32, device=device).random_()
    passes = 16 if device.type == "cuda" else 1  # so that launching the first costs little of the whole

    def read() -> None:
        for _ in range(passes):
            data.max()
        synchronize(device)

    read()
    times = [milliseconds(read, device) for _ in range(iterations)]
    return passes * data.nbytes / (Percentiles.of(times).p50 * 1e-3)


def count_launches(run: Callable[[], object], device: torch.device) -> Launches:
    """Host-side launches during one call, by torch's profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    synchronize(device)
    with torch.profiler.profile(activities=activities) as profile:
        run()
        synchronize(device)
    counts = {event.key: event.count for event in profile.key_averages()}
    kinds = (KERNEL_LAUNCHES, GRAPH_LAUNCHES, COPIES)
    return Launches(*(sum(count for name, count in counts.items() if name in kind) for kind in kinds))


class Nvml:
    """NVIDIA's management library, where there is one; every answer is None where it cannot tell."""

    def __init__(self, device: torch.device):
        self.device = device

    @cached_property
    def _handle(self) -> tuple[Any, Any] | None:
        """The module and the device's handle."""
        if self.device.type != "cuda":
            return None
        try:
            import pynvml  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            return None
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            uuid = f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"
            return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
        return None

    def driver(self) -> str | None:
        """Version of the driver."""
        if self._handle is None:
            return None
        nvml, _ = self._handle
        return str(nvml.nvmlSystemGetDriverVersion())

    def joules(self) -> float | None:
        """Energy that the device has used since the driver was loaded."""
        if self._handle is None:
            return None
        nvml, handle = self._handle
        with suppress(nvml.NVMLError):
            return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
        return None


def energy(
    run: Callable[[], object], nvml: Nvml, seconds: float = ENERGY_SECONDS
) -> tuple[float, int] | None:
    """Joules used while `run` is called again and again for at least `seconds`, and the number of calls.

    None where the energy counter cannot be read.
    """
    synchronize(nvml.device)
    before, started, calls = nvml.joules(), perf_counter(), 0
    if before is None:
        return None
    while perf_counter() - started < seconds:
        run()
        synchronize(nvml.device)
        calls += 1
    after = nvml.joules()
    return None if after is None else (after - before, calls)


def reset_memory(device: torch.device) -> None:
    """Free what is no longer referenced, and start counting the peak anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int | None:
    """Bytes of tensors at the highest point since `reset_memory`; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
