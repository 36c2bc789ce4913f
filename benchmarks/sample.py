"""What a sampled token costs beside a greedy one: `kernels/sample` after `kernels/greedy`, in one graph.

    python benchmarks/sample.py --output benchmarks/results/sample.json

Random logits of a standard deviation of 3, which is about what a language model's have. Medians over replays; the
microseconds are those of both kernels less those of the greedy one alone.
"""

import argparse
import json
import platform
from pathlib import Path

import torch

from thinrank.bench.timing import Percentiles
from thinrank.engine.graph import capture
from thinrank.kernels.greedy import greedy, greedy_workspace
from thinrank.kernels.sample import RowSampling, SampleWorkspace, sample

DEVICE = torch.device("cuda")
VOCABULARIES = (32000, 128256, 152064, 262144)
NONE = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "seed": 1, "stream": 0}
SETTINGS = {
    "temperature": {},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 50": {"top_k": 50},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 50, top_p 0.95": {"top_k": 50, "top_p": 0.95},
    "temperature 100, top_k 50, top_p 0.95": {"temperature": 100.0, "top_k": 50, "top_p": 0.95},
}


def microseconds(launch, replays: int) -> float:
    """Median time of a launch in a graph of 20."""
    graph = capture(lambda: [launch() for _ in range(20)], DEVICE)
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / 20)
    return Percentiles.of(times).p50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--replays", type=int, default=30)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    pdl = torch.cuda.get_device_capability() >= (9, 0)
    rows = []
    for vocab_size in VOCABULARIES:
        for batch in (1, 8):
            generator = torch.Generator(DEVICE).manual_seed(0)
            logits = 3 * torch.randn(batch, vocab_size, device=DEVICE, generator=generator)
            token_ids = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
            positions, lengths = (torch.zeros(batch, dtype=torch.int32, device=DEVICE) for _ in range(2))
            history = torch.zeros(8, batch, dtype=torch.int64, device=DEVICE)
            scratch = greedy_workspace(batch, vocab_size, DEVICE)
            sampling = RowSampling.allocate(batch, DEVICE)
            workspace = SampleWorkspace.allocate(batch, vocab_size, DEVICE)

            def choose():
                greedy(logits, token_ids, positions, lengths, history, scratch, pdl=pdl)  # noqa: B023

            def draw():
                choose()
                sample(logits, token_ids, positions, history, sampling, workspace, pdl=pdl)  # noqa: B023

            alone = microseconds(choose, arguments.replays)
            for name, settings in SETTINGS.items():
                sampling.load(**{key: [value] * batch for key, value in (NONE | settings).items()})
                both = microseconds(draw, arguments.replays)
                rows.append({"vocab_size": vocab_size, "batch": batch, "settings": name, "us": both - alone})
                print(f"{vocab_size:>7} x {batch}: {both - alone:6.1f} us  {name}")
    if arguments.output:
        header = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        arguments.output.write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
