"""`--update`: least squares against a plain implementation, and the guard."""

import pytest
import torch

from thinrank import LLM, ThinrankError, compress
from thinrank.compression import update as update_module
from thinrank.compression.update import Fit, held_out
from thinrank.model.layers import DenseLinear, LowRankLinear
from tiny_text_models import dense_model


def fit_on(inputs, unseen, dense, low_rank):
    fit = Fit(low_rank, dense)
    for is_unseen, x in ((False, inputs), (True, unseen)):
        fit.held_out = is_unseen
        fit(x)
    return fit


def test_the_fit_is_the_least_squares_solution(monkeypatch):
    monkeypatch.setattr(update_module, "RIDGE", 0.0)
    torch.manual_seed(0)
    dense = DenseLinear(torch.randn(6, 9), torch.randn(6))
    low_rank = LowRankLinear(torch.randn(3, 9), torch.randn(6, 3), dense.bias)
    inputs = torch.randn(200, 9)
    found = fit_on(inputs, inputs, dense, low_rank).solve()
    latents, outputs = inputs @ low_rank.factor_in.T, inputs @ dense.weight.T
    expected = torch.linalg.lstsq(latents.double(), outputs.double()).solution.T.float()
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_held_out_error_never_grows(scale):
    """Few inputs to fit, of other channels than those held out."""
    torch.manual_seed(1)
    dense = DenseLinear(torch.randn(6, 40))
    u = torch.linalg.svd(dense.weight, full_matrices=False).U[:, :4]
    low_rank = LowRankLinear(u.T @ dense.weight, u)
    inputs = torch.randn(6, 40) * torch.linspace(1, scale, 40)
    fit = fit_on(inputs, torch.randn(100, 40), dense, low_rank)
    step = fit.solve().double() - u.double()
    change = (step @ fit.energy[1] * step).sum() - 2 * (fit.residual[1] * step).sum()
    assert change <= 1e-6


def test_a_dead_latent_stays_finite():
    low_rank = LowRankLinear(torch.zeros(2, 5), torch.zeros(3, 2))
    fit = fit_on(torch.randn(8, 5), torch.randn(8, 5), DenseLinear(torch.randn(3, 5)), low_rank)
    assert fit.solve().isfinite().all()


@pytest.mark.parametrize("method", ["svd", "svd-llm", "basis-sharing"])
def test_update_of_a_model(method, tmp_path, calibrated):
    _, folder = dense_model(tmp_path, model_type="qwen2")
    for update in (False, True):
        (report,) = compress(
            folder, tmp_path / f"{update}", method=method, keep_ratio=0.5, update=update, **calibrated
        )
    before, after = report.update_losses
    logits = {
        update: LLM(tmp_path / f"{update}", device="cpu").logits(list(range(20))) for update in (False, True)
    }
    assert logits[True].isfinite().all()
    assert torch.equal(logits[True], logits[False]) == (after >= before)
    assert any("update" in line for line in report.lines())


def test_an_update_that_does_not_help_is_dropped(tmp_path, calibrated, monkeypatch):
    _, folder = dense_model(tmp_path)
    losses = iter([1.0, 1.5])
    monkeypatch.setattr(update_module, "mean_loss", lambda *_: next(losses))
    options = {"keep_ratio": 0.5, **calibrated}
    with pytest.warns(UserWarning, match="update was dropped"):
        (report,) = compress(folder, tmp_path / "updated", update=True, **options)
    compress(folder, tmp_path / "plain", **options)
    assert report.update_losses == (1.0, 1.5)
    updated, plain = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("updated", "plain"))
    assert updated == plain


def test_one_sample_cannot_be_split(tmp_path, calibrated):
    _, folder = dense_model(tmp_path)
    options = calibrated | {"calibration_samples": 1}
    with pytest.raises(ThinrankError, match="an update needs at least 2 calibration samples"):
        compress(folder, tmp_path / "out", keep_ratio=0.5, update=True, **options)


@pytest.mark.parametrize(("samples", "unseen"), [(2, 1), (8, 1), (16, 2), (128, 16)])
def test_held_out_share(samples, unseen):
    assert held_out(samples) == unseen
