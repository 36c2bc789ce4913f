"""`tune`: the fastest launch settings of a model's decode step on this card, found launch by launch.

From what runs now, a launch moves to the best of its neighbours until none is better. A trial compiles a kernel, some
3 s, and a grid over all settings of all launches half an hour; this takes a dozen trials a launch. On the measured
grid of benchmarks/results/h200_tune_l7b.json it ends at most 0.5 % of a step from the best settings, launch by launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ..device import resolve_device
from ..errors import OptionError, OutputError, ThinrankError
from ..kernels.settings_file import read_settings, user_file, write_settings
from ..kernels.tuning import OPS, GemvConfig, Launch, LaunchSettings, choices
from .gate import BOUNDS
from .report import at_least, require_gpu
from .shapes import chosen_model, fast_decoder

if TYPE_CHECKING:
    from ..model.packed_decoder import PackedDecoder

#: The first one's time decides.
BATCH_SIZES = (1, 8)
#: By which share the others may get slower, all launches together.
TOLERANCE = 0.03
#: A smaller gain is noise: medians of the same step differ by some 0.1 %.
MIN_GAIN = 0.002
#: A launch that has more programs than this needs no splits.
ENOUGH_PROGRAMS = 4096


class Timer(Protocol):
    """What tuning needs of a `StepTimer`."""

    num_layers: int

    def launches(self) -> list[Launch]: ...

    def compile(self, settings: Sequence[LaunchSettings]) -> None: ...

    def microseconds(self, settings: LaunchSettings) -> tuple[float, ...]: ...

    def logits(self, settings: LaunchSettings) -> Tensor: ...


@dataclass(frozen=True)
class TunedLaunch:
    """What became of a launch. trials: steps timed. step_us: of the timed layers and the head, at batch 1."""

    launch: Launch
    before: GemvConfig
    after: GemvConfig
    trials: int
    step_us_before: float
    step_us_after: float

    def to_json(self) -> dict[str, Any]:
        return self.launch._asdict() | {
            "before": self.before._asdict(),
            "after": self.after._asdict(),
            "trials": self.trials,
            "step_us_before": self.step_us_before,
            "step_us_after": self.step_us_after,
        }


@dataclass(frozen=True)
class TuneReport:
    """device: the card's name. step_us: of a step of `layers` layers and the head, at each batch size. entries: of
    the file, those of other shapes included."""

    device: str
    layers: int
    batch_sizes: tuple[int, ...]
    step_us_before: tuple[float, ...]
    step_us_after: tuple[float, ...]
    launches: tuple[TunedLaunch, ...]
    file: str
    entries: int

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"launches": [launch.to_json() for launch in self.launches]}


def tune(
    model: str | Path | None = None,
    *,
    shape: str | None = None,
    structure: str = "uniform",
    keep_ratio: float = 0.5,
    layers: int | None = None,
    dtype: str = "auto",
    device: str = "auto",
    seed: int = 0,
    output: str | Path | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> TuneReport:
    """Find settings and write them into a file, after each launch; what it holds of other launches stays.

    model, shape, structure, keep_ratio, dtype, seed: as in `latency`. layers: how many are timed; None: enough that
    their weights exceed the L2 cache. Launches that only later layers have are not tuned. output: None is the user's
    file for this card, which every decoder built on it reads.

    Raises OptionError for an option that is unknown or out of range, and without a GPU; ThinrankError when settings
    change the logits, or a file of settings is damaged; OutputError when the file cannot be written; what
    `load_model` raises for a checkpoint.
    """
    at_least(0, seed=seed)
    target = resolve_device(device)
    measured = chosen_model(model, shape, structure, keep_ratio, dtype, target, seed)
    most = measured.config.num_hidden_layers
    if layers is not None:
        at_least(1, layers=layers)
        if layers > most:
            raise OptionError(f"layers is {layers}, the model has {most}", "lower it")
    require_gpu("tune", target)
    card = torch.cuda.get_device_name(target)
    path = user_file(card) if output is None else Path(output)
    if path is None:
        raise OutputError("there is no home folder to write to", "name a file with --output")
    if output is not None and (path.is_dir() or not path.parent.is_dir()):
        raise OutputError(f"cannot write {path}", "name a file in a folder that exists")
    from .step_timer import StepTimer, enough_layers

    on_progress("loading the model")
    decoder: PackedDecoder = fast_decoder(measured)  # type: ignore[assignment] # it is a GPU
    timer = StepTimer(decoder, layers or enough_layers(decoder), BATCH_SIZES)
    with torch.inference_mode():
        return tune_file(timer, decoder.launch_settings, path, card, BOUNDS[decoder.dtype], on_progress)


def tune_file(
    timer: Timer,
    start: LaunchSettings,
    path: Path,
    card: str,
    max_error: float,
    on_progress: Callable[[str], None] = lambda text: None,
) -> TuneReport:
    """Tune from `start` on, into a file. max_error: of the logits, relative to those before."""
    known = dict((read_settings(path, card) or start).entries)
    before, expected = timer.microseconds(start), timer.logits(start)
    settings, launches = start, []
    for tuned, settings in descend(timer, start, before, on_progress):
        error = float((timer.logits(settings) - expected).norm() / expected.norm())
        if not error <= max_error:  # not NaN
            raise ThinrankError(
                f"{tuned.launch.op} with {tuned.after} is wrong: logits differ from those with {tuned.before} by "
                f"{error:.2g}, allowed are {max_error:.2g}",
                "this is a bug of thinrank or of this installation's kernels; the settings are not written",
            )
        launches.append(tuned)
        known[tuned.launch] = tuned.after
        write_settings(path, card, replace(start, entries=known))
    after = timer.microseconds(settings)
    return TuneReport(
        card, timer.num_layers, BATCH_SIZES, before, after, tuple(launches), str(path), len(known)
    )


def descend(
    timer: Timer,
    start: LaunchSettings,
    before: Sequence[float],
    on_progress: Callable[[str], None] = lambda text: None,
) -> Iterator[tuple[TunedLaunch, LaunchSettings]]:
    """Coordinate descent: each launch in turn, all others as they are by then. Yields it and all settings so far.

    before: the step's times with `start`, which bound what later batch sizes may come to.
    """
    limits = [(1 + TOLERANCE) * time for time in before[1:]]
    launches = sorted(timer.launches(), key=lambda launch: OPS.index(launch.op))
    settings = start
    for number, launch in enumerate(launches, start=1):
        first = best = settings.config(launch)
        times = {best: timer.microseconds(settings)}
        about = f"launch {number} of {len(launches)}, {launch.op} {launch.shape}"
        while moves := [config for config in neighbours(launch, best) if config not in times]:
            on_progress(f"{about}: compiling {len(moves)} settings")
            timer.compile([_changed(settings, launch, config) for config in moves])
            for config in moves:
                on_progress(f"{about}: trying {config}")
                times[config] = timer.microseconds(_changed(settings, launch, config))
            allowed = [
                config
                for config in moves
                if all(time <= limit for time, limit in zip(times[config][1:], limits, strict=True))
            ]
            found = min(allowed, key=lambda config: times[config][0], default=best)
            if times[found][0] > (1 - MIN_GAIN) * times[best][0]:
                break
            best = found
        settings = _changed(settings, launch, best)
        yield TunedLaunch(launch, first, best, len(times), times[first][0], times[best][0]), settings


def neighbours(launch: Launch, config: GemvConfig) -> list[GemvConfig]:
    """Settings with one field doubled or halved, or one doubled and another one halved."""
    values, possible = config._asdict(), choices(launch.op)
    changes = [{name: factor} for name in values for factor in (2, 0.5)]
    changes += [{one: 2, other: 0.5} for one, other in permutations(values, 2)]
    moved = [
        GemvConfig(**{name: int(value * change.get(name, 1)) for name, value in values.items()})
        for change in changes
    ]
    return [
        config
        for config in dict.fromkeys(moved)
        if all(getattr(config, name) in values for name, values in possible.items())
        and _is_sensible(launch, config)
    ]


def _is_sensible(launch: Launch, config: GemvConfig) -> bool:
    """Whether every warp has a block of 64 columns, enough of them for what it loads ahead, and splits are of use.

    And whether it compiles in time: a minute, not 10 s, where a pair of matrices of unequal width is loaded 4 blocks
    ahead and a round does not come out even; the fastest load one or two.
    """
    blocks = -(-launch.width // (64 * config.splits))
    programs = launch.rows // config.rows * config.splits
    unequal_pair = launch.op == "project_silu_mul" and launch.narrowest > 0
    return (
        config.num_warps * config.ahead <= max(2, blocks)
        and (config.splits == 1 or programs <= ENOUGH_PROGRAMS)
        and (not unequal_pair or config.ahead <= 2 or config.is_even(launch.width, launch.narrowest))
    )


def _changed(settings: LaunchSettings, launch: Launch, config: GemvConfig) -> LaunchSettings:
    return LaunchSettings(MappingProxyType({**settings.entries, launch: config}), settings.source)
