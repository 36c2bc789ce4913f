"""What a trial launches and computes; its time, on a GPU."""

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from thinrank.bench import step_timer
from thinrank.bench.shapes import SHAPES, random_model
from thinrank.bench.step_timer import StepTimer, enough_layers
from thinrank.kernels.tuning import GemvConfig, Launch, LaunchSettings
from thinrank.model.packed_decoder import PackedDecoder

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def decoder():
    """Three layers of equal launches."""
    model = random_model("tiny", "uniform", 0.5, torch.float32, DEVICE, 0)
    packed = PackedDecoder.build(model.config, model.get, model.dtype, DEVICE, 1024)
    return replace(packed, launch_settings=LaunchSettings())


def test_launches_are_listed_once(decoder):
    """Ranks 42 (q, o, gate, up and down) and 32 (k and v), padded to 64 columns."""
    assert StepTimer(decoder, 2, (1,)).launches() == [
        Launch("norm_project", 106, 128),
        Launch("project_rope", 512, 64),
        Launch("project", 42, 256),
        Launch("project_residual", 128, 64),
        Launch("norm_project", 84, 128),
        Launch("project_silu_mul", 256, 64),
        Launch("norm_project", 192, 128),
    ]


def test_the_sequence_has_every_launch_in_its_order(decoder):
    timer = StepTimer(decoder, 3, (1,))
    *layer, head = timer.launches()
    layer[4:] = [*layer[4:], *layer[2:4]]  # down is as o
    assert timer.sequence() == [*layer * 3, head]


def test_logits_do_not_depend_on_the_settings(decoder):
    """To 1e-4: float32 sums in another order. They do depend on the layers that are timed, and on nothing before."""
    short = 20  # the interpreter takes 12 s for 512 tokens
    timer = StepTimer(decoder, 2, (1,), short)
    expected = timer.logits(LaunchSettings())
    split = {launch: GemvConfig(1, 1, 16, 2) for launch in timer.launches() if launch.op == "project"}
    torch.testing.assert_close(timer.logits(LaunchSettings(split)), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(timer.logits(LaunchSettings()), expected)
    assert not torch.allclose(
        StepTimer(decoder, 1, (1,), short).logits(LaunchSettings()), expected, atol=1e-2
    )


def test_enough_layers(decoder, monkeypatch):
    assert enough_layers(decoder) == 3  # all that there are
    monkeypatch.setattr(step_timer, "ENOUGH_BYTES", 1)
    assert enough_layers(decoder) == 3
    assert enough_layers(replace(decoder, layers=decoder.layers * 3)) == 4
    qkv, gate_up, o_or_down = 106 * 128 + 512 * 64, 84 * 128 + 512 * 64, 42 * 256 + 128 * 64
    monkeypatch.setattr(step_timer, "ENOUGH_BYTES", 4 * 5 * (qkv + gate_up + 2 * o_or_down))
    assert enough_layers(replace(decoder, layers=decoder.layers * 3)) == 5


@pytest.mark.gpu
def test_times_are_of_the_layers_that_are_timed(decoder):
    one, three = (StepTimer(decoder, count, (1, 8, 16)).microseconds(LaunchSettings()) for count in (1, 3))
    assert all(0 < short < long for short, long in zip(one, three, strict=True))


@pytest.mark.gpu
def test_every_kernel_of_a_step_has_its_time(decoder):
    """One after the other, so that together they take what the step takes, and what the profiler adds."""
    timer = StepTimer(decoder, 3, (1,))
    (step_us,) = timer.microseconds(LaunchSettings())
    names, times = zip(*timer.kernels(LaunchSettings()), strict=True)
    assert [name for name in names if "project" in name] == [
        f"_{launch.op.removesuffix('_residual')}_kernel" for launch in timer.sequence()
    ]
    assert (names[0], names[-1]) == ("_embed_kernel", "_greedy_kernel")
    assert all(time > 0 for time in times)
    assert 0.5 * step_us < sum(times) < 2 * step_us + 100


@pytest.mark.gpu
def test_a_profile_of_a_step(tmp_path, monkeypatch, capsys):
    file = tmp_path / "profile.json"
    monkeypatch.setattr(sys, "argv", ["step_profile.py", "--shape", "tiny", "--output", str(file)])
    runpy.run_path(str(BENCHMARKS / "step_profile.py"), run_name="__main__")
    report = json.loads(file.read_text())
    layers = SHAPES["tiny"]["num_hidden_layers"]
    launched = {row["kernel"]: row["launches"] for row in report["rows"]}
    assert launched["decode"] == launched["project_silu_mul 256 x 64"] == layers
    assert launched["embed"] == launched["greedy"] == 1
    assert report["header"]["device"] == torch.cuda.get_device_name()
    assert "of the bandwidth" in capsys.readouterr().out
