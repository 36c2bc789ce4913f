"""python benchmarks/kernels/silu_mul.py: the fused activation of prefill beside PyTorch's single operations."""

import torch
from harness import DEVICE, header, report

from thinrank.kernels import reference
from thinrank.kernels.silu_mul import silu_mul


def measure(tokens: int, columns: int) -> None:
    gate, up, out = (torch.randn(tokens, columns, device=DEVICE).bfloat16() for _ in range(3))
    shape, nbytes = f"{tokens} x {columns}", 2 * (gate.numel() + up.numel() + out.numel())
    report(f"silu_mul {shape}", lambda: silu_mul(gate, up, None, out), nbytes=nbytes)
    report(f"  reference {shape}", lambda: reference.silu_mul(gate, up))


if __name__ == "__main__":
    header()
    for columns in (11008, 14336):
        for tokens in (512, 2048, 8192):
            measure(tokens, columns)
