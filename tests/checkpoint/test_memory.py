"""Peak memory of a conversion is about one tensor, whatever the file's size; each runs in its own process."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from tiny_models import random_tensors, tiny_config

#: 2 layers of about 60 MB each and an embedding of 51 MB: 220 MB in all, the largest tensor 51 MB.
CONFIG = tiny_config(
    vocab_size=12_800, hidden_size=1000, num_attention_heads=10, head_dim=100, intermediate_size=4000
)

MEASURE = """
import sys
from pathlib import Path
from thinrank import convert
from thinrank.checkpoint.load import open_checkpoint
def peak():  # not ru_maxrss, which begins with the peak of the process that started this one
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1024
before = peak()
convert(sys.argv[1], sys.argv[2], progress=False)
open_checkpoint(sys.argv[2])
print(peak() - before)
"""


@pytest.mark.parametrize("kind", ["safetensors", "bin", "one pickled file"])
def test_conversion_streams(kind, tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    tensors = random_tensors(CONFIG)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if kind == "safetensors":
        save_file(tensors, folder / "model.safetensors")
    else:
        torch.save(tensors, folder / ("pytorch_model.bin" if kind == "bin" else "anything.pt"))
    total = sum(tensor.nbytes for tensor in tensors.values()) / 2**20
    largest = max(tensor.nbytes for tensor in tensors.values()) / 2**20
    assert total > 200
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder), str(tmp_path / "out")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    # One tensor, a copy of it, and what the libraries allocate on first use.
    assert float(run.stdout) < 2 * largest + 40, run.stdout
