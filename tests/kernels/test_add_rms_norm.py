"""add_rms_norm against its reference."""

import pytest
import torch

pytest.importorskip("triton")

from thinrank.kernels import reference as ops
from thinrank.kernels.add_rms_norm import add_rms_norm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-5

#: Both compute in float32, sums in another order; the result is then rounded once, to half an ulp of values up to 8.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("hidden_size", [64, 576, 1024, 4160])
@pytest.mark.parametrize("addends", ["nothing", "projection", "projection and bias"])
def test_agrees_with_the_reference(addends, hidden_size, dtype):
    """Sizes below, at and beside powers of two; a large mean shows a sum that is not over hidden_size."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE)

    tokens = 5
    residual = randn(tokens, hidden_size) + 3
    projection = None if addends == "nothing" else randn(tokens, hidden_size).to(dtype)
    bias = randn(hidden_size) if addends == "projection and bias" else None
    weight = randn(hidden_size)
    out = torch.full((tokens, hidden_size), float("nan"), dtype=dtype, device=DEVICE)
    expected_residual = residual.clone()
    expected = ops.add_rms_norm(expected_residual, projection, bias, weight, EPS)
    add_rms_norm(residual, projection, bias, weight, EPS, out)
    torch.testing.assert_close(residual, expected_residual, atol=1e-6, rtol=1e-6)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)


def test_without_a_projection_the_residual_keeps_its_bits():
    residual = torch.randn(3, 100, device=DEVICE)
    before = residual.clone()
    add_rms_norm(residual, None, None, torch.ones(100, device=DEVICE), EPS, torch.empty_like(residual))
    assert torch.equal(residual, before)


def test_eps_counts():
    residual = torch.full((2, 64), 1e-3, device=DEVICE)
    out = torch.empty_like(residual)
    add_rms_norm(residual, None, None, torch.ones(64, device=DEVICE), 3e-6, out)
    torch.testing.assert_close(out, torch.full_like(out, 0.5))  # 1e-3 / sqrt(1e-6 + 3e-6)
