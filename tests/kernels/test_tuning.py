"""Launch settings: the rule, and a table that goes before it."""

import pytest

from thinrank.errors import OptionError
from thinrank.kernels.tuning import OPS, GemvConfig, Launch, LaunchSettings, choices, gemv_rule


@pytest.mark.parametrize("op", OPS)
def test_the_rule_gives_what_an_op_can_do(op):
    """No round is longer than a row, so that no warp is without work."""
    for rows in (1, 576, 3072, 128256):
        for width in range(64, 16385, 64):
            config = gemv_rule(Launch(op, rows, width))
            assert config.step <= width
            assert all(getattr(config, name) in values for name, values in choices(op).items())


@pytest.mark.parametrize(
    ("launch", "config"),
    [
        (Launch("norm_project", 3072, 4096), GemvConfig(4, 4, 8)),
        (Launch("project", 1024, 4096), GemvConfig(16, 4, 8)),
        (Launch("project", 1492, 11008), GemvConfig(8, 4, 8)),
        (Launch("project_residual", 4096, 1024), GemvConfig(4, 4)),
        (Launch("project_rope", 12288, 1024), GemvConfig(2, 4)),
        (Launch("project_silu_mul", 11008, 1536), GemvConfig(2, 4)),
    ],
)
def test_the_rule_is_what_was_measured(launch, config):
    """The best of benchmarks/results/h200_tune_l7b.json, or within 0.5 % of a step of it."""
    assert gemv_rule(launch) == config


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
    """All matrices end together, after whole rounds of every program."""
    config = GemvConfig(4, 2, 8, splits=2)
    assert config.step == 512
    assert config.is_even(1024) and config.is_even(2048, 2048)
    assert not config.is_even(512) and not config.is_even(1024, 2048)


def test_settings_in_words():
    assert str(GemvConfig(1, 4, 8, 2)) == "1 warp, 4 ahead, 8 rows, 2 splits"
    assert str(GemvConfig(2, 4)) == "2 warps, 4 ahead, 16 rows"
