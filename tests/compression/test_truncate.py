"""Truncation is optimal: its error is the tail of the singular values of W S (Eckart and Young)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinrank.compression.methods.svd_llm import whitening
from thinrank.compression.truncate import rank_for, relative_error, spectrum


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 80), st.integers(0, 2**31), st.data())
@settings(max_examples=60, deadline=None)
def test_weighted_error_is_the_tail_of_the_spectrum(out_features, in_features, tokens, seed, data):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out_features, in_features, generator=generator)
    inputs = torch.randn(tokens, in_features, generator=generator, dtype=torch.float64)
    inputs *= torch.logspace(0, 3, in_features, dtype=torch.float64)  # channels of very different scale
    rank = data.draw(st.integers(1, min(out_features, in_features)))
    gram = inputs.T @ inputs + 1e-6 * torch.eye(in_features, dtype=torch.float64)
    scaling = whitening(gram).matrix
    cut = spectrum(weight, scaling)
    factor_in, factor_out = cut.cut(rank)
    assert factor_in.shape == (rank, in_features)
    assert factor_out.shape == (out_features, rank)
    lost = (weight.double() - factor_out @ factor_in) @ scaling
    values = torch.linalg.svdvals(weight.double() @ scaling)
    total = values.norm()
    tail = values[rank:].norm() / total
    assert (lost.norm() / total).item() == pytest.approx(tail.item(), rel=1e-3, abs=1e-7)
    assert relative_error(cut.values, rank) == pytest.approx(tail.item(), rel=1e-3, abs=1e-7)


@pytest.mark.parametrize("shape", [(12, 12), (20, 9), (9, 20)])
def test_full_rank_reproduces_the_weight(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    factor_in, factor_out = spectrum(weight, None).cut(min(shape))
    torch.testing.assert_close(factor_out @ factor_in, weight.double(), atol=1e-10, rtol=0)


@pytest.mark.parametrize("shape", [(30, 16), (16, 30)])
def test_plain_svd_agrees_with_torch(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    u, s, vt = torch.linalg.svd(weight, full_matrices=False)
    factor_in, factor_out = spectrum(weight, None).cut(5)
    torch.testing.assert_close(factor_out @ factor_in, u[:, :5] * s[:5] @ vt[:5], atol=1e-9, rtol=0)


def test_singular_inputs_are_damped():
    inputs = torch.randn(3, 10, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    inputs[:, 4] = 0  # a dead channel, and fewer tokens than channels
    scaling = whitening(inputs.T @ inputs)
    assert scaling.damping > 0
    factor_in, factor_out = spectrum(torch.randn(8, 10), scaling.matrix).cut(5)
    assert factor_in.isfinite().all() and factor_out.isfinite().all()


def test_all_zero_inputs_stay_finite():
    scaling = whitening(torch.zeros(6, 6, dtype=torch.float64))
    factor_in, factor_out = spectrum(torch.randn(4, 6), scaling.matrix).cut(2)
    assert factor_in.isfinite().all() and factor_out.isfinite().all()


@pytest.mark.parametrize(
    ("keep_ratio", "shape", "rank"),
    [(0.5, (4096, 4096), 1024), (0.5, (11008, 4096), 1492), (0.8, (576, 576), 230), (1e-9, (8, 8), 1)],
)
def test_rank_rule(keep_ratio, shape, rank):
    assert rank_for(keep_ratio, *shape) == rank
