"""Measure what docs/performance.md shows, on one GPU, into benchmarks/results/.

    python benchmarks/evidence.py                  # everything, some 20 minutes on an H200
    python benchmarks/evidence.py prefill batch-8  # some of it

One JSON file a run, `<GPU>_<run>.json`, rewritten after every row. A run that fails does not stop the others.
"""

import argparse
import json
import shlex
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from thinrank.bench.ablation import ablation
from thinrank.bench.latency import latency
from thinrank.bench.report import file_prefix
from thinrank.bench.sweep import sweep
from thinrank.bench.throughput import throughput
from thinrank.device import resolve_device
from thinrank.errors import ThinrankError

STRUCTURES = ("uniform", "hetero", "shared2", "mixed", "dense")
SEVEN_B: dict[str, Any] = {"shape": "llama-7b", "keep_ratio": 0.5}
#: Names of baselines that run the same factors as thinrank, and dense weights.
STATIC = ["thinrank-dense", "hf-static", "hf-static-dense"]


def runs() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Name -> the library call and its arguments."""
    decode = {
        "l7b_512_32": {"baseline": [*STATIC, "compiled"]},
        "l7b_more_baselines": {"baseline": ["compiled-dense", "densekv", "int4-dense", "hf-compile"]},
        "l7b_8192_128": {"input_len": 8192, "output_len": 128, "num_iters": 5},
        "l7b_batch_8": {"batch_size": 8},
        "l7b_sampled": {"temperature": 0.8, "baseline": []},
        **{f"l7b_{name}": {"structure": name} for name in ("hetero", "shared2", "mixed")},
        "l3_8b": {"shape": "llama3-8b"},
    }
    prefill = {
        f"l7b_prefill_{structure}_{length}": {
            "structure": structure, "input_len": length, "output_len": 2, "num_iters": 7, "baseline": ["hf-static"],
        }
        for structure in STRUCTURES
        for length in (512, 2048, 8192)
    }  # fmt: skip
    return {
        **{name: (latency, SEVEN_B | arguments) for name, arguments in (decode | prefill).items()},
        "l7b_ablation": (ablation, SEVEN_B | {"num_iters": 7, "num_iters_warmup": 1}),
        "l7b_throughput": (throughput, dict(SEVEN_B)),
        "l7b_sweep": (sweep, {"shape": "llama-7b"}),
    }


def show(started: float, text: str) -> None:
    print(f"  {time.monotonic() - started:4.0f} s  {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", help="parts of names of runs; all without one")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--commit", help="what the header says where the sources are no git repository")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    options = parser.parse_args()
    known = runs()
    chosen = [name for name in known if not options.runs or any(part in name for part in options.runs)]
    if options.list or not chosen:
        print("\n".join(known))
        sys.exit(0 if options.list else f"no run has a name like {' or '.join(options.runs)}")
    card = file_prefix(resolve_device("cuda"))
    command, failed = shlex.join(["python", *sys.argv]), []
    for name in chosen:
        run, arguments = known[name]
        started = time.monotonic()
        path = options.output / f"{card}_{name}.json"
        try:
            run(**arguments, output_json=path, command=command, on_progress=partial(show, started))
        except ThinrankError as error:
            failed.append(name)
            print(f"{name}: {error}", flush=True)
        if options.commit and path.exists():
            report = json.loads(path.read_text(encoding="utf-8"))
            report["header"]["commit"] = options.commit
            path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
