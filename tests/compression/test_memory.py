"""Peak memory of a compression: one decoder layer and a bounded number of activations, not the model.

Every measurement has a process of its own, which compresses a tiny model first: libraries take what they take on
first use.
"""

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tiny_text_models import TEXT, dense_model

#: Prints MiB by which the peak grows, first through compress, then to what the whole model would take.
MEASURE = """
import json, sys, torch
from pathlib import Path
torch.set_num_threads(1)
from thinrank import compress
from thinrank.checkpoint.load import open_checkpoint
def peak():  # not ru_maxrss, which begins with the peak of the process that started this one
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1024
tiny, source, destination, options = *map(Path, sys.argv[1:4]), json.loads(sys.argv[4])
compress(tiny, destination / "warm", device="cpu", progress=False, **options)
before = peak()
compress(source, destination / "out", device="cpu", progress=False, **options)
compressed = peak()
model = {name: tensor.read().clone() for name, tensor in open_checkpoint(source).tensors.items()}
print(compressed - before, peak() - before)
"""


def measure(tiny: Path, folder: Path, destination: Path, **options: object) -> tuple[float, float]:
    """MiB that a compression adds to the peak of its process, and that the whole model does."""
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tiny), str(folder), str(destination), json.dumps(options)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    compressed, held = map(float, run.stdout.split())
    return compressed, held


@pytest.fixture
def tiny(tmp_path):
    (tmp_path / "tiny").mkdir()
    return dense_model(tmp_path / "tiny")[1]


@pytest.mark.slow
def test_one_layer_is_held_and_not_the_model(tiny, text_file, tmp_path):
    """Through every step: statistics, backward pass, decompositions, update, and what is written."""
    sizes = {"num_hidden_layers": 40, "hidden_size": 256, "intermediate_size": 512, "head_dim": 32}
    _, folder = dense_model(tmp_path, **sizes, num_attention_heads=8)
    options = {"calibration_text": str(text_file), "calibration_samples": 5, "calibration_length": 64}
    options |= {"keep_ratio": 0.5, "modules": "*.up_proj", "allocate": "loss", "update": True}
    grown, held = measure(tiny, folder, tmp_path, **options)
    size = (folder / "model.safetensors").stat().st_size / 2**20
    assert held > size > 80  # the measurement sees a model that is held
    # A layer has 2 MiB, its Gram matrices 4, and the backward pass about 40 activations of each of 320 tokens.
    assert grown < size / 2, grown


@pytest.mark.slow
def test_activations_are_bounded(tiny, tmp_path):
    """Eight times the tokens, and no more memory than their residual stream, which lies in mapped files."""
    (tmp_path / "text.txt").write_text("".join(Random(6).choices(TEXT, k=33_000)))
    _, folder = dense_model(tmp_path, hidden_size=48, intermediate_size=1024)
    options = {"keep_ratio": 0.5, "calibration_text": str(tmp_path / "text.txt"), "calibration_length": 64}
    few, many = (
        measure(tiny, folder, tmp_path / f"{samples}", calibration_samples=samples, **options)[0]
        for samples in (64, 512)
    )
    assert few > 30  # 4096 tokens, which pass through a layer together
    assert many < 2 * few
