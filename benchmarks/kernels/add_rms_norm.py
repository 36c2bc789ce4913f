"""python benchmarks/kernels/add_rms_norm.py: the fused norm of prefill beside PyTorch's single operations."""

import torch
from harness import DEVICE, header, report

from thinrank.kernels import reference
from thinrank.kernels.add_rms_norm import add_rms_norm

EPS = 1e-5


def measure(tokens: int, hidden_size: int) -> None:
    residual = torch.randn(tokens, hidden_size, device=DEVICE)
    projection = torch.randn(tokens, hidden_size, device=DEVICE).bfloat16()
    weight = torch.randn(hidden_size, device=DEVICE)
    out = torch.empty_like(projection)
    shape, nbytes = f"{tokens} x {hidden_size}", residual.numel() * (4 + 2 + 4 + 2)
    report(
        f"add_rms_norm {shape}",
        lambda: add_rms_norm(residual, projection, None, weight, EPS, out),
        nbytes=nbytes,
    )
    report(
        f"  reference {shape}",
        lambda: reference.add_rms_norm(residual, projection, None, weight, EPS).bfloat16(),
    )


if __name__ == "__main__":
    header()
    for hidden_size in (4096, 5120):
        for tokens in (512, 2048, 8192):
            measure(tokens, hidden_size)
