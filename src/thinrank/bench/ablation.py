"""`ablation`: what each mechanism of the decode step gives, alone, added one by one, and taken away.

All variants continue the same sequence with the same weights and kernels under one setting, at batch 1, so that the
factors of the ladder multiply out to the whole; and the dense model of the same shape beside the low-rank one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..checkpoint.load import DTYPES
from ..device import resolve_device
from ..errors import OptionError, ThinrankError, unknown_name
from .gate import BOUNDS, Check, check_system
from .report import Report, ReportFile, at_least, header, require_gpu
from .shapes import BenchModel, fast_decoder, random_model
from .timing import Nvml, Percentiles, count_launches, milliseconds, reset_memory, synchronize
from .variants import FULL, Comparison, Variant, comparisons

if TYPE_CHECKING:
    from .variant_step import FilledCache, VariantStep

#: Decode steps of one measurement; they end where the context is full.
WINDOW_STEPS = 16
#: Steps whose logits are compared, and steps that the profiler watches.
CHECKED_STEPS = 3
PROFILED_STEPS = 4


@dataclass(frozen=True)
class Timing:
    """Of one variant. host_ms: from the call to its return, the GPU idle before. tpot_ms: of a window of
    steps, each launched without waiting for the one before. launches and copies: by the host, a token."""

    launches_per_token: float
    copies_per_token: float
    host_ms: float
    tpot_ms: Percentiles


@dataclass(frozen=True)
class AblationRow:
    """One variant of one system in one series; see `Comparison` for series and change, `Variant` for mechanisms.

    launches_per_token: kernels and graphs that the host launches. copies_per_token: copies that the host starts; the
    token itself stays on the device. host_ms: median time to launch a step without waiting for it. tpot_ms:
    of a window of steps that are launched without waiting; percentiles over the windows. gain: how much faster than
    the system's base. factor: how much faster the change makes it: against the base (alone), the rung before
    (ladder), or the full path against this variant (without). The factors of a ladder multiply out to `gain`.
    """

    system: str
    series: str
    change: str
    dense_kv: bool
    pack_qkv: bool
    pack_mlp: bool
    graph: str
    pdl: bool
    launches_per_token: float
    copies_per_token: float
    host_ms: float
    tpot_ms_p20: float
    tpot_ms_p50: float
    tpot_ms_p80: float
    gain: float
    factor: float


def ablation(
    shape: str = "llama-7b",
    *,
    keep_ratio: float = 0.5,
    context_len: int = 512,
    num_iters: int = 20,
    num_iters_warmup: int = 3,
    dtype: str = "bfloat16",
    device: str = "auto",
    seed: int = 0,
    output_json: str | Path | None = None,
    command: str | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Report[AblationRow]:
    """Measure every variant of a named shape with random weights, uniform ranks, and of its dense model.

    context_len: tokens that the last step of a measurement attends to; a variant without dense keys and values
    rebuilds so many (whole blocks of them) in every step. num_iters: windows of `WINDOW_STEPS` steps. output_json:
    the file to write, after each row. command: for the header. on_progress: told what is being done.

    Before any time is taken, the engine's logits are compared with float32 arithmetic, and those of every variant
    with the full path's: the same relative error is allowed, `gate.BOUNDS`, as both round to the weights' dtype at
    different places.

    Raises OptionError for an option that is unknown or out of range, and without a GPU of compute capability 9.0;
    ThinrankError when logits differ; OutputError when the file cannot be written.
    """
    at_least(1, num_iters=num_iters)
    at_least(0, num_iters_warmup=num_iters_warmup, seed=seed)
    at_least(WINDOW_STEPS, context_len=context_len)
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, list(DTYPES))
    target = resolve_device(device)
    measured = random_model(shape, "uniform", keep_ratio, DTYPES[dtype], target, seed)
    positions = measured.config.max_position_embeddings
    if context_len > positions:
        raise OptionError(f"context_len is {context_len}, {shape} has {positions} positions", "lower it")
    require_gpu("bench ablation", target)
    if torch.cuda.get_device_capability(target) < (9, 0):
        raise OptionError(
            f"bench ablation measures programmatic launch, which {torch.cuda.get_device_name(target)} has not",
            "run it on a GPU of compute capability 9.0 or later",
        )
    settings = {
        "shape": shape,
        "structure": measured.structure,
        "keep_ratio": keep_ratio,
        "context_len": context_len,
        "window_steps": WINDOW_STEPS,
        "num_iters": num_iters,
        "num_iters_warmup": num_iters_warmup,
    }
    file = ReportFile[AblationRow](
        output_json, header("ablation", measured, Nvml(target), command, **settings)
    )
    systems = {"low-rank": measured, "dense": measured.dense()}
    for system, model in systems.items():
        on_progress(f"checking {system}")
        reset_memory(target)
        file.add(checks=check_system(system, model, 1))
    for system, model in systems.items():
        reset_memory(target)
        _measure_system(file, system, model, context_len, num_iters, num_iters_warmup, on_progress)
    return file.report


@torch.inference_mode()
def _measure_system(
    file: ReportFile[AblationRow],
    system: str,
    model: BenchModel,
    context_len: int,
    num_iters: int,
    num_iters_warmup: int,
    on_progress: Callable[[str], None],
) -> None:
    from ..kernels.compilation import compile_kernels
    from ..model.packed_decoder import PackedDecoder
    from .variant_step import FilledCache, VariantStep

    decoder = fast_decoder(model)
    assert isinstance(decoder, PackedDecoder)
    filled = FilledCache.build(decoder, context_len, WINDOW_STEPS, model.seed)
    compared = comparisons(dense=system == "dense")

    def launch() -> None:
        for variant in dict.fromkeys(replace(comparison.variant, graph="none") for comparison in compared):
            VariantStep(filled, variant)()

    on_progress(f"compiling the kernels of {system}")
    compile_kernels(launch)
    expected = logits(filled, VariantStep(filled, FULL))
    errors: list[float] = []
    timings: dict[Variant, Timing] = {}
    for comparison in compared:  # a neighbour comes before what is compared with it
        variant = comparison.variant
        if variant not in timings:
            on_progress(f"measuring {system}, {describe(variant)}")
            step = VariantStep(filled, variant)
            errors.append(checked_error(system, variant, logits(filled, step), expected, model.dtype))
            timings[variant] = _time(filled, step, num_iters, num_iters_warmup)
            del step
            reset_memory(model.device)
        file.add(rows=[_row(system, comparison, timings, timings[compared[0].variant])])
    file.add(checks=[Check(system, "variants' logits", max(errors), BOUNDS[model.dtype], "the full path's")])


def describe(variant: Variant) -> str:
    """The mechanisms that it uses, in one phrase."""
    used = [name for name, value in asdict(variant).items() if value is True]
    if variant.graph != "none":
        used.append(f"{variant.graph} graph")
    return " + ".join(used) or "no mechanism"


def logits(filled: FilledCache, step: VariantStep, count: int = CHECKED_STEPS) -> Tensor:
    """float32 logits [count, vocab_size] of the first steps, given tokens 1, 2, ..."""
    filled.rewind()
    rows = []
    for index in range(count):
        filled.state.token_ids.fill_(1 + index)
        step()
        rows.append(filled.state.logits[0].clone())
    return torch.stack(rows)


def checked_error(
    system: str, variant: Variant, found: Tensor, expected: Tensor, dtype: torch.dtype
) -> float:
    """Relative to the full path's logits. Raises ThinrankError when the variant computes something else."""
    error = float((found - expected).norm() / expected.norm())
    if not error <= BOUNDS[dtype]:  # not NaN
        raise ThinrankError(
            f"{system} with {describe(variant)} is wrong: its logits differ from the full path's by {error:.2g}, "
            f"allowed are {BOUNDS[dtype]:.2g}",
            "this is a bug of thinrank or of this installation's kernels; no time is reported",
        )
    return error


def _time(filled: FilledCache, step: VariantStep, num_iters: int, num_iters_warmup: int) -> Timing:
    device = filled.decoder.device

    def run_steps(count: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(count):
                step()
            synchronize(device)

        return run

    times, host = [], []
    for _ in range(num_iters_warmup + num_iters):
        filled.rewind()
        times.append(milliseconds(run_steps(WINDOW_STEPS), device) / WINDOW_STEPS)
    for _ in range(num_iters_warmup + num_iters):
        filled.rewind()
        host.append(milliseconds(step, device))  # a step does not wait for itself
    filled.rewind()
    launches = count_launches(run_steps(PROFILED_STEPS), device)
    return Timing(
        (launches.kernels + launches.graphs) / PROFILED_STEPS,
        launches.copies / PROFILED_STEPS,
        Percentiles.of(host[num_iters_warmup:]).p50,
        Percentiles.of(times[num_iters_warmup:]),
    )


def _row(system: str, comparison: Comparison, timings: dict[Variant, Timing], base: Timing) -> AblationRow:
    timing = timings[comparison.variant]
    factor = timings[comparison.neighbour].tpot_ms.p50 / timing.tpot_ms.p50
    return AblationRow(
        system=system,
        series=comparison.series,
        change=comparison.change,
        **asdict(comparison.variant),
        launches_per_token=timing.launches_per_token,
        copies_per_token=timing.copies_per_token,
        host_ms=timing.host_ms,
        tpot_ms_p20=timing.tpot_ms.p20,
        tpot_ms_p50=timing.tpot_ms.p50,
        tpot_ms_p80=timing.tpot_ms.p80,
        gain=base.tpot_ms.p50 / timing.tpot_ms.p50,
        factor=1 / factor if comparison.series == "without" else factor,
    )
