"""Where a decode step's time goes, kernel by kernel, on one GPU.

    python benchmarks/step_profile.py --shape llama-7b --output benchmarks/results/h200_l7b_profile.json

Replays the graph of a whole step under torch's profiler. With programmatic launch kernels overlap, so a kernel's time
is from the end of the one before it to its own end; the times of a step add up to it. bytes: of the weights as they
are stored, ranks padded, where all matrices of a launch are equally wide; floor_us: at the read bandwidth measured in
the same run.
"""

import argparse
import json
import shlex
import sys
from collections import defaultdict
from pathlib import Path

import torch

from thinrank.bench.report import header
from thinrank.bench.shapes import SHAPES, STRUCTURES, fast_decoder, random_model
from thinrank.bench.step_timer import StepTimer
from thinrank.bench.timing import Nvml, read_bandwidth
from thinrank.device import resolve_device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama-7b", choices=list(SHAPES))
    parser.add_argument("--structure", default="uniform", choices=list(STRUCTURES))
    parser.add_argument("--keep-ratio", type=float, default=0.5)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    device = resolve_device("cuda")
    model = random_model(options.shape, options.structure, options.keep_ratio, torch.bfloat16, device, 0)
    decoder = fast_decoder(model)
    bandwidth = read_bandwidth(device)
    with torch.inference_mode():
        timer = StepTimer(decoder, len(decoder.layers), (options.batch_size,), options.context)
        (step_us,) = timer.microseconds(decoder.launch_settings)
        gemvs, kernels = iter(timer.sequence()), timer.kernels(decoder.launch_settings)
    took: dict[str, list[float]] = defaultdict(list)
    nbytes: dict[str, int] = {}
    for name, time in kernels:
        name = name.strip("_").removesuffix("_kernel")
        if "project" in name:
            launch = next(gemvs)
            name = f"{launch.op} {launch.shape}"
            if not launch.narrowest:
                pair = 2 if launch.op == "project_silu_mul" else 1
                nbytes[name] = pair * launch.rows * launch.width * decoder.dtype.itemsize
        took[name].append(time)
    rows = [
        {
            "kernel": name,
            "launches": len(times),
            "us": sum(times),
            "bytes": len(times) * nbytes[name] if name in nbytes else None,
            "floor_us": 1e6 * len(times) * nbytes[name] / bandwidth if name in nbytes else None,
        }
        for name, times in took.items()
    ]
    print(
        f"a step takes {step_us:.0f} us, its kernels {sum(row['us'] for row in rows):.0f} under the profiler"
    )
    for row in rows:
        share = f"{row['floor_us'] / row['us']:4.0%} of the bandwidth" if row["bytes"] else ""
        each = row["us"] / row["launches"]
        print(f"{row['kernel']:<40} {row['launches']:4} x {each:7.2f} us = {row['us']:7.1f} us  {share}")
    if options.output:
        about = header(
            "step_profile", model, Nvml(device), shlex.join(["python", *sys.argv]), shape=options.shape,
            structure=options.structure, keep_ratio=options.keep_ratio, batch_size=options.batch_size,
            context=options.context,
        )  # fmt: skip
        about["read_bandwidth_bytes_per_s"] = bandwidth
        report = {"header": about, "step_us": step_us, "rows": rows}
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
