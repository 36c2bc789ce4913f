"""What the kernel benchmarks share: how an op is timed on a GPU, and how a result is printed.

Times are medians over CUDA events around one call. Before each call the L2 cache is filled with something else, as a
model's layers do between two calls of one op; that takes longer than the host needs for a launch, so launching is not
part of the time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

DEVICE = torch.device("cuda")

#: Ten times the 50 MB of an H200's L2.
FLUSH_BYTES = 512 * 2**20


def microseconds(run: Callable[[], object], iterations: int = 30) -> float:
    """Median time of one call."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=DEVICE)
    run()  # compiles
    events = []
    for _ in range(iterations):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return 1e3 * statistics.median(start.elapsed_time(end) for start, end in events)


def header() -> None:
    """Where the numbers that follow are from."""
    from importlib.metadata import version

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {version('triton')}")


def report(name: str, run: Callable[[], object], *, nbytes: float = 0, flops: float = 0) -> None:
    """Time an op and print it. nbytes: what it must read and write at least; flops: what it must compute."""
    time = microseconds(run)
    rates = [f"{nbytes / time * 1e-6:6.2f} TB/s"] if nbytes else []
    rates += [f"{flops / time * 1e-6:6.0f} TFLOP/s"] if flops else []
    print(f"{name:64} {time:9.1f} us  {'  '.join(rates)}")
