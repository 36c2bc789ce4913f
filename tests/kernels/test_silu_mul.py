"""silu_mul against its reference."""

import pytest
import torch

pytest.importorskip("triton")

from thinrank.kernels import reference as ops
from thinrank.kernels.silu_mul import silu_mul

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

#: Both compute in float32; the result is rounded once, which is relative.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("columns", [8, 1024, 1500])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_agrees_with_the_reference(in_place, has_bias, columns, dtype):
    """gate and up are columns of one wider matrix, whose other columns must stay as they are."""
    generator = torch.Generator().manual_seed(0)
    packed = (torch.randn(4, 2 * columns + 64, generator=generator) * 3).to(DEVICE, dtype)
    before = packed.clone()
    gate, up = packed[:, :columns], packed[:, columns + 64 :]
    bias = torch.randn(2 * columns, generator=generator).to(DEVICE) if has_bias else None
    first, second = (0, 0) if bias is None else bias.chunk(2)
    expected = ops.silu_mul(gate.float() + first, up.float() + second)
    out = gate if in_place else torch.full_like(gate, float("nan"))
    silu_mul(gate, up, bias, out)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out.float(), expected, atol=1e-5, rtol=tolerance)
    start = columns if in_place else 0
    assert torch.equal(packed[:, start:], before[:, start:])


def test_large_values_do_not_overflow():
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4]], device=DEVICE)
    out = torch.empty_like(gate)
    silu_mul(gate, torch.ones_like(gate), None, out)
    torch.testing.assert_close(out, torch.tensor([[0.0, 0.0, 0.0, 100.0, 1e4]], device=DEVICE))
