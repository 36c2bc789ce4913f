"""Tuning: the search with a timer that knows the best settings, the file that grows, and a run on a GPU."""

import json
from math import log2

import pytest
import torch

from thinrank.bench.tune import TOLERANCE, descend, neighbours, tune, tune_file
from thinrank.errors import OutputError, ThinrankError
from thinrank.kernels.settings_file import read_settings, settings_for, write_settings
from thinrank.kernels.tuning import GemvConfig, Launch, LaunchSettings, choices, gemv_rule

CARD = "NVIDIA H200"
PROJECT, ROPE = Launch("project", 1024, 4096), Launch("project_rope", 12288, 4096)
BEST = {PROJECT: GemvConfig(4, 2, 16, 4), ROPE: GemvConfig(16, 1)}


class FakeTimer:
    """A step takes 1 us more for each doubling of a field away from BEST; cost8 says the same of batch 8."""

    num_layers = 4

    def __init__(self, cost8=lambda launch, config: 0.0, wrong=None):
        self.cost8, self.wrong = cost8, wrong

    def launches(self):
        return [ROPE, PROJECT]

    def compile(self, settings):
        pass

    def microseconds(self, settings):
        configs = {launch: settings.config(launch) for launch in BEST}
        one = sum(
            abs(log2(value / best))
            for launch, config in configs.items()
            for value, best in zip(config, BEST[launch], strict=True)
        )
        return 100.0 + one, 200.0 + sum(self.cost8(*item) for item in configs.items())

    def logits(self, settings):
        bad = self.wrong is not None and self.wrong in {settings.config(launch) for launch in BEST}
        return torch.tensor([1.0, float("nan") if bad else 2.0])


def search(timer, start=None):
    start = start or LaunchSettings()
    steps = list(descend(timer, start, timer.microseconds(start)))
    return [tuned for tuned, _ in steps], steps[-1][1]


def test_the_search_finds_the_best():
    launches, settings = search(FakeTimer())
    assert {launch: settings.config(launch) for launch in BEST} == BEST
    first, second = launches
    assert (first.launch, second.launch) == (PROJECT, ROPE)
    assert (first.before, first.after) == (GemvConfig(16, 4, 8), BEST[PROJECT])
    assert second.step_us_after == 100.0
    assert first.step_us_after == second.step_us_before  # each starts from what the one before has found


def test_the_search_takes_few_trials():
    """Of 120 and 15 possible settings."""
    project, rope = search(FakeTimer())[0]
    assert project.trials < 50 and rope.trials < 15
    assert [tuned.trials for tuned in search(FakeTimer(), LaunchSettings(BEST))[0]] == [
        1 + len(neighbours(launch, BEST[launch])) for launch in (PROJECT, ROPE)
    ]


def test_trials_are_compiled_before_they_are_timed():
    """Together, several at a time; none that is not timed."""

    class Strict(FakeTimer):
        def __init__(self):
            super().__init__()
            self.compiled, self.timed = [], []

        def compile(self, settings):
            self.compiled += [dict(each.entries) for each in settings]

        def microseconds(self, settings):
            assert dict(settings.entries) in [{}, *self.compiled]
            self.timed.append(dict(settings.entries))
            return super().microseconds(settings)

    timer = Strict()
    search(timer)
    assert len(timer.compiled) > 2
    assert all(settings in timer.timed for settings in timer.compiled)


def test_a_pair_of_unequal_width_does_not_load_far_ahead():
    """Where its rounds do not come out even: that takes a minute to compile."""
    uneven, even = (Launch("project_silu_mul", 11008, 1536, width) for width in (1408, 1024))
    assert gemv_rule(uneven).ahead == 1
    assert gemv_rule(even).ahead == gemv_rule(Launch("project_silu_mul", 11008, 1536)).ahead == 4
    assert {config.ahead for config in neighbours(uneven, GemvConfig(2, 2))} == {1, 2}
    assert GemvConfig(2, 4) in neighbours(even, GemvConfig(2, 2))


def test_noise_moves_nothing():
    class Noisy(FakeTimer):
        def microseconds(self, settings):
            return 100.0 if settings.config(PROJECT) == GemvConfig(16, 4, 8) else 99.9, 200.0

    launches, settings = search(Noisy())
    assert settings.config(PROJECT) == launches[0].before == launches[0].after


def test_batch_8_may_not_get_much_slower():
    """Settings that are the best at batch 1 are not taken if they cost more than 3 % at batch 8."""

    def splits_cost(launch, config):
        return 200 * (TOLERANCE + 0.001) * (config.splits > 2)

    _, settings = search(FakeTimer(splits_cost))
    assert settings.config(PROJECT) == BEST[PROJECT]._replace(splits=2)
    _, settings = search(FakeTimer(lambda *launch: 0.9 * splits_cost(*launch)))
    assert settings.config(PROJECT) == BEST[PROJECT]


def test_batch_8_pays_once_for_all_launches():
    def warps_cost(launch, config):
        return 200 * 0.6 * TOLERANCE * (config != LaunchSettings().config(launch))

    _, settings = search(FakeTimer(warps_cost))
    assert settings.config(PROJECT) != LaunchSettings().config(PROJECT)
    assert settings.config(ROPE) == LaunchSettings().config(ROPE)


@pytest.mark.parametrize(
    "launch", [PROJECT, ROPE, Launch("norm_project", 128256, 4096), Launch("project", 1, 64)]
)
def test_neighbours_are_possible_and_one_move_away(launch):
    config = LaunchSettings().config(launch)
    found = neighbours(launch, config)
    assert found and config not in found and len(set(found)) == len(found)
    for other in found:
        assert all(getattr(other, name) in values for name, values in choices(launch.op).items())
        moves = [log2(new / old) for new, old in zip(other, config, strict=True) if new != old]
        assert sorted(moves) in ([-1], [1], [-1, 1])
        assert launch.rows < 100_000 or other.splits == 1  # enough programs without


def test_the_file_keeps_what_is_not_tuned(tmp_path):
    path = tmp_path / "table.json"
    other = {Launch("project", 64, 64): GemvConfig(1, 1)}
    write_settings(path, CARD, LaunchSettings({**other, ROPE: GemvConfig(1, 1)}))
    report = tune_file(FakeTimer(), LaunchSettings(), path, CARD, 0.01)
    assert read_settings(path, CARD).entries == {**other, **BEST}
    assert (report.file, report.entries, report.layers) == (str(path), 3, 4)
    assert report.step_us_after == (100.0, 200.0) and report.step_us_before[0] > 100.0
    assert json.loads(json.dumps(report.to_json()))["launches"][1] == {
        "op": "project_rope", "rows": 12288, "width": 4096, "narrowest": 0, "trials": report.launches[1].trials,
        "before": {"num_warps": 2, "ahead": 4, "rows": 16, "splits": 1},
        "after": {"num_warps": 16, "ahead": 1, "rows": 16, "splits": 1},
        "step_us_before": 105.0, "step_us_after": 100.0,
    }  # fmt: skip


def test_a_new_file_has_what_held_before(tmp_path):
    """So that the user's first table does not hide the shipped one's other shapes."""
    other = {Launch("project", 64, 64): GemvConfig(1, 1)}
    tune_file(FakeTimer(), LaunchSettings(other, "shipped"), tmp_path / "table.json", CARD, 0.01)
    assert read_settings(tmp_path / "table.json", CARD).entries == {**other, **BEST}


def test_settings_that_compute_something_else_are_not_written(tmp_path):
    path = tmp_path / "table.json"
    with pytest.raises(ThinrankError, match="project_rope with 16 warps, 1 ahead, 16 rows is wrong"):
        tune_file(FakeTimer(wrong=BEST[ROPE]), LaunchSettings(), path, CARD, 0.01)
    assert read_settings(path, CARD).entries == {PROJECT: BEST[PROJECT]}  # which was there before


@pytest.mark.gpu
@pytest.mark.slow
def test_on_a_gpu(tmp_path, monkeypatch):
    """A decoder that is built afterwards reads the file, which has what held before and what was tuned."""
    from thinrank.bench.shapes import random_decoder

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = settings_for(torch.device("cuda")).entries
    report = tune(shape="tiny", layers=2)
    assert 0 < report.step_us_after[0] <= 1.2 * report.step_us_before[0]
    decoder = random_decoder("tiny", "uniform", 0.5, torch.bfloat16, torch.device("cuda"), 0)
    settings = decoder.launch_settings
    assert settings.source == report.file
    tuned = {tuned.launch: tuned.after for tuned in report.launches}
    assert dict(settings.entries) == {**before, **tuned}
    with pytest.raises(OutputError, match="name a file in a folder that exists"):
        tune(shape="tiny", output=tmp_path / "no" / "folder.json")
