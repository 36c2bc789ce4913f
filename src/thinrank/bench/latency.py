"""`latency`: time to the first token and time per output token of thinrank beside its baselines.

Every system runs the same prompts in this process, one after the other, and is freed before the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from ..config import ModelConfig, SamplingParams
from ..device import resolve_device
from ..engine.explain import explain as explain_engine
from ..errors import OptionError
from .engine_system import EngineSystem
from .gate import Check, check_system
from .report import Report, ReportFile, at_least, header
from .shapes import BenchModel, chosen_model
from .system import System
from .systems import OURS, build_system, model_for, selected_systems
from .timing import (
    Nvml,
    Percentiles,
    count_launches,
    energy,
    milliseconds,
    peak_memory,
    read_bandwidth,
    reset_memory,
    synchronize,
)

#: Decode steps that the profiler watches.
PROFILED_STEPS = 4


@dataclass(frozen=True)
class Workload:
    """Prompts of `input_len` tokens, `output_len` tokens for each, `batch_size` of them together.

    temperature: at which thinrank samples; 0 is greedy, as all baselines are.
    """

    batch_size: int
    input_len: int
    output_len: int
    temperature: float = 0.0

    def __post_init__(self) -> None:
        at_least(1, batch_size=self.batch_size, input_len=self.input_len)
        at_least(2, output_len=self.output_len)  # the prefill gives the first one
        SamplingParams(temperature=self.temperature)  # knows what a temperature may be

    @property
    def decode_steps(self) -> int:
        return self.output_len - 1

    @property
    def mean_context_len(self) -> int:
        """Tokens that a decode step attends to, itself included, averaged over the steps."""
        return self.input_len + (self.decode_steps + 1) // 2

    def prompts(self, config: ModelConfig, seed: int) -> Tensor:
        """int64 [batch_size, input_len]."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(config.vocab_size, (self.batch_size, self.input_len), generator=generator)


@dataclass(frozen=True)
class LatencyRow:
    """One system's result.

    keep_ratio: share of the layers' linear parameters. temperature: 0 is greedy. graph: whether decode steps
    launch a CUDA graph. ttft_ms: median time from a batch of prompts to the first token of each. tpot_ms: time
    of a decode step, averaged over the steps of one generation; percentiles over the generations.
    launches_per_token: kernels and graphs that the host launches a step. bytes_per_step: what a step must read
    at least, with true ranks and the average context. mbu: bytes_per_step over the median time and the measured
    read bandwidth. load_s: making or reading the weights. warmup_s: from there to the end of the first
    generation, compilation included. peak_memory_bytes: of tensors on the device. joules_per_token: while
    decoding. None: cannot be measured here.
    """

    system: str
    shape: str
    structure: str
    keep_ratio: float
    batch_size: int
    input_len: int
    output_len: int
    temperature: float
    graph: bool | None
    ttft_ms: float
    tpot_ms_p20: float
    tpot_ms_p50: float
    tpot_ms_p80: float
    launches_per_token: float | None
    bytes_per_step: int
    mbu: float
    load_s: float
    warmup_s: float
    peak_memory_bytes: int | None
    joules_per_token: float | None


def latency(
    model: str | Path | None = None,
    *,
    shape: str | None = None,
    structure: str = "uniform",
    keep_ratio: float = 0.5,
    input_len: int = 512,
    output_len: int = 32,
    batch_size: int = 1,
    temperature: float = 0.0,
    num_iters: int = 10,
    num_iters_warmup: int = 2,
    baseline: Sequence[str] = ("thinrank-dense",),
    dtype: str = "auto",
    device: str = "auto",
    seed: int = 0,
    output_json: str | Path | None = None,
    verify: bool = False,
    explain: bool = False,
    command: str | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Report[LatencyRow]:
    """Measure one model.

    model: a checkpoint folder; or else shape: a name of `SHAPES`, with random weights of a `structure` and a
    `keep_ratio`. temperature: above 0, thinrank samples; baselines stay greedy. baseline: names of `BASELINES`,
    or "all". dtype: "auto" is bfloat16 for a shape and what is stored for a checkpoint. output_json: the file to
    write, after every system. verify: only the correctness gate. explain: say in the header what our own systems run.
    command: for the header. on_progress: told what is being done.

    Raises OptionError for an option that is unknown or out of range; ThinrankError when the gate fails;
    OutputError when the file cannot be written; what `load_model` raises for a checkpoint.
    """
    work = Workload(batch_size, input_len, output_len, temperature)
    at_least(1, num_iters=num_iters)
    at_least(0, num_iters_warmup=num_iters_warmup, seed=seed)
    target = resolve_device(device)
    measured = chosen_model(model, shape, structure, keep_ratio, dtype, target, seed)
    if verify and explain:
        raise OptionError("explain describes what is timed, and verify times nothing", "leave one out")
    positions = measured.config.max_position_embeddings
    if input_len + output_len > positions:
        raise OptionError(
            f"input_len and output_len are {input_len + output_len} tokens together, the model has "
            f"{positions} positions",
            "lower them",
        )
    names = selected_systems(baseline, measured)
    nvml = Nvml(target)
    settings = {"num_iters": num_iters, "num_iters_warmup": num_iters_warmup}
    file = ReportFile[LatencyRow](output_json, header("latency", measured, nvml, command, **settings))
    checks: list[Check] = []
    for name in names:
        if name in OURS:
            on_progress(f"checking {name}")
            reset_memory(target)
            checks += check_system(name, model_for(name, measured), batch_size)
    reset_memory(target)
    file.add(checks=checks)
    if not verify:
        bandwidth = read_bandwidth(target)
        file.header["read_bandwidth_bytes_per_s"] = bandwidth
        for name in names:
            on_progress(f"measuring {name}")
            reset_memory(target)
            explained = file.header.setdefault("explained", {}) if explain else None
            file.add(
                rows=[_row(name, measured, work, num_iters, num_iters_warmup, bandwidth, nvml, explained)]
            )
            torch.compiler.reset()  # compiled code holds on to the weights
    return file.report


def _row(
    name: str,
    measured: BenchModel,
    work: Workload,
    num_iters: int,
    num_iters_warmup: int,
    bandwidth: float,
    nvml: Nvml,
    explained: dict[str, list[str]] | None,
) -> LatencyRow:
    """explained: gets what a system of ours runs, by its name."""
    model = model_for(name, measured)
    device, steps = model.device, work.decode_steps
    started = perf_counter()
    system = build_system(name, model, work.temperature)
    synchronize(device)
    loaded = perf_counter()
    system.prepare(work.prompts(model.config, model.seed), work.output_len)
    if explained is not None and isinstance(system, EngineSystem) and system.engine is not None:
        explained[name] = explain_engine(system.engine).lines()
    system.prefill()
    system.decode_steps(steps)
    synchronize(device)
    warm = perf_counter()

    ttft, tpot = [], []
    for _ in range(num_iters_warmup + num_iters):
        ttft.append(milliseconds(system.prefill, device))
        tpot.append(milliseconds(lambda: system.decode_steps(steps), device) / steps)
    times = Percentiles.of(tpot[num_iters_warmup:])
    launches, profiled = None, max(1, min(PROFILED_STEPS, steps - 1))
    if device.type == "cuda":
        system.rewind()
        system.decode_steps(steps - profiled)  # the first step may launch the second ahead
        launches = count_launches(lambda: system.decode_steps(profiled), device)
    joules = _joules_per_token(system, work, nvml)
    bytes_per_step = system.step_bytes(work.mean_context_len, work.batch_size)
    return LatencyRow(
        system=name,
        shape=model.name,
        structure=model.structure,
        keep_ratio=model.keep_ratio,
        batch_size=work.batch_size,
        input_len=work.input_len,
        output_len=work.output_len,
        temperature=work.temperature if name in OURS else 0.0,
        graph=None if launches is None else launches.graphs > 0,
        ttft_ms=Percentiles.of(ttft[num_iters_warmup:]).p50,
        tpot_ms_p20=times.p20,
        tpot_ms_p50=times.p50,
        tpot_ms_p80=times.p80,
        launches_per_token=None if launches is None else (launches.kernels + launches.graphs) / profiled,
        bytes_per_step=bytes_per_step,
        mbu=bytes_per_step / (times.p50 * 1e-3) / bandwidth,
        load_s=loaded - started,
        warmup_s=warm - loaded,
        peak_memory_bytes=peak_memory(device),
        joules_per_token=joules,
    )


def _joules_per_token(system: System, work: Workload, nvml: Nvml) -> float | None:
    """Energy of decoding alone: prefills happen only when a system has no room to go on."""
    if nvml.joules() is None:
        return None
    done = system.room

    def decode() -> None:
        nonlocal done
        if done + work.decode_steps > system.room:
            system.rewind()
            done = 0
        system.decode_steps(work.decode_steps)
        done += work.decode_steps

    decode()  # the prefill comes before the window
    used = energy(decode, nvml)
    return None if used is None else used[0] / (used[1] * work.decode_steps * work.batch_size)
