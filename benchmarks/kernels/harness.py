"""What the kernel benchmarks share: cases, how a launch is compared and timed on a GPU, and how results are printed.

A benchmark file has `cases`, which makes the launches of one size, `SIZES`, those to measure, and `SMALL`, sizes for
Triton's interpreter: `tests/kernels/test_benchmarks.py` compares every kernel with its reference there.

Times are medians over CUDA events around one call. Before each call the L2 cache is filled with something else, as a
model's layers do between two calls of one op; that takes longer than the host needs for a launch, so launching is not
part of the time. The read bandwidth is measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinrank.bench.timing import read_bandwidth
from thinrank.kernels.l2_fetch import fetch_whole_lines

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
#: Triton's interpreter does not multiply bfloat16.
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16

#: Ten times the 50 MB of an H200's L2.
FLUSH_BYTES = 512 * 2**20


@dataclass(frozen=True)
class Case:
    """A launch to time.

    reference: writes what `run` writes, in plain PyTorch. outputs: all that both write; in_parts: of them, those that
    a number takes two places of (`kernels/gemv`), [batch, 2, width]. nbytes: what must be read and written at least,
    ranks without padding; flops: what must be computed, where that is the limit. beside: other ways to the same
    result, to time as well.
    """

    name: str
    run: Callable[[], object]
    reference: Callable[[], object]
    outputs: tuple[Tensor, ...]
    in_parts: tuple[Tensor, ...] = ()
    nbytes: int = 0
    flops: int = 0
    beside: Mapping[str, Callable[[], object]] = field(default_factory=dict)

    def error(self) -> float:
        """The largest difference between `run` and `reference`, over the largest number of the same output.

        The outputs are then as they were, so that both began with the same.
        """
        before = [tensor.clone() for tensor in (*self.outputs, *self.in_parts)]
        found = []
        for write in (self.reference, self.run):
            write()
            found.append([*map(_exact, self.outputs), *(_exact(tensor).sum(1) for tensor in self.in_parts)])
            for tensor, value in zip((*self.outputs, *self.in_parts), before, strict=True):
                tensor.copy_(value)
        differences = [
            (actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
            for expected, actual in zip(*found, strict=True)
        ]
        return torch.stack(differences).max().item()  # NaN if any is


def _exact(tensor: Tensor) -> Tensor:
    """A copy in float64."""
    return tensor.to(torch.float64, copy=True)


def nbytes(*tensors: Tensor) -> int:
    """Of all together."""
    return sum(tensor.nbytes for tensor in tensors)


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


def measure(case: Case, bandwidth: float) -> dict[str, Any]:
    """A row of the result. bandwidth: bytes a second."""
    error, us = case.error(), microseconds(case.run)
    return {
        "case": case.name,
        "us": us,
        "bytes": case.nbytes or None,
        "gb_per_s": case.nbytes / us * 1e-3 if case.nbytes else None,
        "share_of_bandwidth": case.nbytes / us * 1e6 / bandwidth if case.nbytes else None,
        "tflop_per_s": case.flops / us * 1e-6 if case.flops else None,
        "max_error": error,
        "beside_us": {name: microseconds(run) for name, run in case.beside.items()},
    }


def line(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    cells = [f"{row['case']:58} {row['us']:9.1f} us"]
    if row["bytes"]:
        cells.append(f"{row['bytes']:13,} bytes {row['gb_per_s']:6.0f} GB/s {row['share_of_bandwidth']:6.1%}")
    if row["tflop_per_s"]:
        cells.append(f"{row['tflop_per_s']:5.0f} TFLOP/s")
    cells.append(f"error {row['max_error']:.1e}")
    cells += [f"{name} {us:.1f} us" for name, us in row["beside_us"].items()]
    return "  ".join(cells)


def command_line() -> argparse.ArgumentParser:
    """The options that all benchmarks have; the description is the calling script's docstring."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the result here as JSON, too")
    return parser


def main(
    cases: Callable[..., Iterable[Case]],
    sizes: Iterable[tuple[Any, ...]],
    options: argparse.Namespace | None = None,
) -> None:
    """Measure and print the cases of all sizes. options: the parsed command line, where a file adds to it."""
    options = options or command_line().parse_args()
    if DEVICE.type != "cuda":
        sys.exit("this needs a GPU")
    fetch_whole_lines(DEVICE)  # as a decoder does
    header = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "command": shlex.join(["python", *sys.argv]),
        "read_bandwidth_bytes_per_s": read_bandwidth(DEVICE),
    }
    bandwidth = header["read_bandwidth_bytes_per_s"]
    print(
        f"{header['device']}, torch {header['torch']}, triton {header['triton']}, {bandwidth / 1e9:.0f} GB/s read"
    )
    rows = []
    for case in _all(cases, sizes):
        rows.append(measure(case, bandwidth))
        print(line(rows[-1]), flush=True)
    if options.output:
        options.output.write_text(
            json.dumps({"header": header, "rows": rows}, indent=1) + "\n", encoding="utf-8"
        )


def _all(cases: Callable[..., Iterable[Case]], sizes: Iterable[tuple[Any, ...]]) -> Iterator[Case]:
    for size in sizes:
        yield from cases(*size)
