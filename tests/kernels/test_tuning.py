"""Launch settings: the rule, and a table that goes before it."""

import json
from pathlib import Path

import pytest

from thinrank.errors import OptionError
from thinrank.kernels.tuning import OPS, GemvConfig, Launch, LaunchSettings, choices, gemv_rule

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize("op", OPS)
def test_the_rule_gives_what_an_op_can_do(op):
    """No round is longer than a row, so that no warp is without work."""
    for rows in (1, 576, 3072, 128256):
        for width in range(64, 16385, 64):
            for narrowest in (64, width - 64):
                config = gemv_rule(Launch.of(op, rows, width, max(narrowest, 64)))
                assert config.step <= width
                assert all(getattr(config, name) in values for name, values in choices(op).items())


MEASURED = json.loads((RESULTS / "h200_launch_settings.json").read_text())["launches"]


@pytest.mark.parametrize(
    "launch", MEASURED, ids=lambda launch: f"{launch['shape']}-{launch['op']}-{launch['rows']}"
)
def test_the_rule_is_what_was_measured(launch):
    """Within 1.2 % of a step of the best settings, launch by launch; a step of the same settings varies by 0.5 %."""
    times = {tuple(launch["rule"].values()): launch["rule_step_us"]}
    for trial in launch["trials"]:
        *config, time = trial.values()
        times[tuple(config)] = min(time, times.get(tuple(config), time))
    chosen = gemv_rule(Launch(launch["op"], launch["rows"], launch["width"]))
    assert times[chosen] <= 1.012 * min(times.values())


def test_the_table_goes_before_the_rule():
    listed, other = Launch("project", 1024, 4096), Launch("project", 1024, 4160)
    settings = LaunchSettings({listed: GemvConfig(2, 1, 8, 2)}, "table.json")
    assert settings.config(listed) == GemvConfig(2, 1, 8, 2) != gemv_rule(listed)
    assert settings.config(other) == gemv_rule(other)
    assert (settings.origin(listed), settings.origin(other)) == ("table", "rule")


def test_an_unknown_op_is_an_error():
    with pytest.raises(OptionError, match="unknown op 'projekt': known: norm_project, project,"):
        LaunchSettings().config(Launch("projekt", 64, 64))


def test_even_launches():
    """Every matrix ends after whole rounds of every program."""
    config = GemvConfig(4, 2, 8, splits=2)
    assert config.step == 512
    assert config.is_even(1024) and config.is_even(1024, 2048)
    assert not config.is_even(512) and not config.is_even(1024, 1536)


def test_more_rows_a_program_above_four_batch_rows():
    """At least 16, and 32 where some 256 programs are left; never more than an op can have, and nothing else changes
    that would change a sum."""
    config = GemvConfig(8, 2, 8, splits=2)
    assert config.for_batch(4, 32000) == config
    assert config.for_batch(5, 3072) == config._replace(rows=16)
    assert config.for_batch(8, 8192) == config._replace(rows=32)
    assert config.for_batch(8, 8192, 16) == config._replace(rows=16)


def test_launches_by_their_widths():
    equal, unequal = Launch.of("project_rope", 12288, 4096, 4096), Launch.of("project_rope", 12288, 576, 4096)
    assert equal == Launch("project_rope", 12288, 4096) and equal.shape == "12288 x 4096"
    assert unequal == Launch("project_rope", 12288, 4096, 576) and unequal.shape == "12288 x 576 to 4096"
    # What is left of the wide matrix when the narrow ones are done needs more warps.
    assert gemv_rule(unequal).num_warps > gemv_rule(equal).num_warps


def test_settings_in_words():
    assert str(GemvConfig(1, 4, 8, 2)) == "1 warp, 4 ahead, 8 rows, 2 splits"
    assert str(GemvConfig(2, 4)) == "2 warps, 4 ahead, 16 rows"
