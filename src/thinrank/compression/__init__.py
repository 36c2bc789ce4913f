"""Compression of a dense model into a low-rank one.

Four steps, each of which keeps what it has finished in files: statistics of the projections' inputs
(`statistics`), decompositions (`spectra`), ranks (`ranks`), and, if asked for, factors refitted to the
compressed model (`update`). The checkpoint itself is cut from the decompositions while it is written. At most
one decoder layer is in memory, beside a bounded number of activations.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..checkpoint.folder import tokenizer_files
from ..checkpoint.format import LowRankSection
from ..checkpoint.load import DTYPES, open_checkpoint
from ..checkpoint.save import check_destination, resumable_folder, save_checkpoint
from ..config import ModelConfig
from ..device import resolve_device
from ..errors import CheckpointError, OptionError, unknown_name
from ..model.cost import parameters
from ..version import __version__
from .calibration import Calibration
from .factors import CompressedModel
from .gate import PerplexityGate
from .loss_allocation import by_loss
from .measurements import Measurements
from .method import Method
from .methods import method_by_name
from .ranks import RANK_MULTIPLES, Allocation, RankProblem, Ranks, kept_ratio, read_ranks, uniform
from .report import CompressionReport
from .spectra import Spectra
from .statistics import check_finite, source_key
from .store import fingerprint
from .targets import Run, targets_of, work_beside
from .units import Unit, units_of
from .update import refit

__all__ = ["ALLOCATIONS", "CompressionReport", "compress"]

#: Allocations that every method can have instead of its own.
ALLOCATIONS: dict[str, Allocation] = {"uniform": uniform, "loss": by_loss}

#: Options of methods that say how their own ranks are found.
_OWN_RANKS = ("min_ratio", "steps")

#: How far a rank_multiple may take the kept ratio from what was asked for without a warning.
MULTIPLES_MAY_MISS_BY = 0.02


@torch.no_grad()
def compress(
    source: str | Path,
    destination: str | Path,
    *,
    method: str = "svd-llm",
    keep_ratio: float | Sequence[float] | None = None,
    ranks: str | Path | None = None,
    allocate: str | None = None,
    modules: str = "*",
    rank_multiple: int = 1,
    alpha: float | None = None,
    group_size: int | None = None,
    shared: Sequence[str] | None = None,
    min_ratio: float | None = None,
    steps: int | None = None,
    update: bool = False,
    calibration_text: str | Path = "builtin",
    calibration_samples: int = 32,
    calibration_length: int = 512,
    calibration_format: str = "text",
    seed: int = 0,
    statistics: str | Path | None = None,
    max_perplexity_increase: float | None = None,
    perplexity_text: str | Path | None = None,
    dtype: str | None = None,
    device: str | torch.device = "auto",
    force: bool = False,
    progress: bool = True,
) -> list[CompressionReport]:
    """Factor the attention and MLP projections of a dense model; embedding, norms and lm_head stay.

    source: dense folder in safetensors. destination: folder to write; with several keep_ratios it must
    contain "{keep_ratio}". method: a name in `methods.METHODS`; alpha, group_size, shared, min_ratio, steps:
    the arguments of its function there; None: its default.

    keep_ratio: share of the parameters of all `modules` to keep, above 0, to 1; at 1 nothing is factored.
    ranks: instead, a JSON file as `ranks.read_ranks` has it. allocate: a name in `ALLOCATIONS`; None: the
    method's own. modules: glob of the names of those to factor. rank_multiple: 1, 8, 16 or 64; the kept ratio is
    then as near as that allows. update: refit factor_out to the compressed model.

    calibration_text: a name of `texts.TEXTS` or a file as `texts.read_text` has it, or "self" for text that the
    model writes itself with `seed`. calibration_format: "text", or "chat" to wrap it in the model's chat
    template, which keeps a chat model able to answer. statistics: folder in which statistics and
    decompositions stay for other runs, each under a name made of what it depends on; None: a folder beside the
    destination that is removed at the end. Either way a killed run, started again, goes on where it was and
    writes the same bytes.

    max_perplexity_increase: measure perplexity of the source and of every result on `perplexity_text` (None:
    the built-in held-out text) and say in the report whether it grew by at most this share of the source's,
    0.5 for one half. The checkpoint is written either way.

    dtype: of all tensors, None for the source's own. Computes in float32, decompositions in float64, on
    `device`.

    Warns when there are fewer calibration tokens than the widest input has channels, and about inputs that do
    not span all channels. Raises CheckpointError, OptionError or OutputError; then every destination is as
    it was.
    """
    started = time.monotonic()
    own_options = {
        "alpha": alpha,
        "group_size": group_size,
        "shared": shared,
        "min_ratio": min_ratio,
        "steps": steps,
    }
    chosen = method_by_name(method, {name: value for name, value in own_options.items() if value is not None})
    allocation = _allocation(chosen, allocate)
    if dtype is not None and dtype not in DTYPES:
        raise unknown_name("dtype", dtype, list(DTYPES))
    if rank_multiple not in RANK_MULTIPLES:
        known = ", ".join(map(str, RANK_MULTIPLES))
        raise OptionError(f"rank_multiple is {rank_multiple}", f"it must be one of {known}")
    if ranks is not None and (allocate is not None or rank_multiple != 1):
        raise OptionError(f"{ranks} fixes the ranks", "leave out allocate and rank_multiple")
    for name in _OWN_RANKS:
        if own_options[name] is not None and (ranks is not None or allocate is not None):
            instead = "the file of ranks" if ranks is not None else f"allocate {allocate}"
            raise OptionError(
                f"{name} is for {method}'s own ranks, and {instead} replaces them", "leave out one of the two"
            )
    if perplexity_text is not None and max_perplexity_increase is None:
        raise OptionError(
            "perplexity_text is for a limit, and there is none", "set max_perplexity_increase too"
        )
    targets = targets_of(str(destination), keep_ratio, ranks)
    beside = work_beside(str(destination))
    checkpoint = open_checkpoint(source)
    run = Run(
        beside,
        force,
        fingerprint(
            source_key(checkpoint),
            [method, own_options, str(ranks), allocate, modules, rank_multiple, update, dtype, str(device)],
            [str(calibration_text), calibration_samples, calibration_length, calibration_format, seed],
        ),
    )
    for target in targets:
        force_this = run.may_replace(target.destination)
        check_destination(target.destination, force=force_this, sources=[checkpoint.path])
    if checkpoint.config.ranks:
        raise CheckpointError(f"{source} is low-rank already", "name the dense model that it was made from")
    units = units_of(checkpoint.config, modules, chosen.group_size, chosen.shared)
    fixed = None if ranks is None else read_ranks(ranks, units)
    target_device = resolve_device(device)
    calibrated = chosen.scaling is not None or update or (fixed is None and allocation is not uniform)
    calibrated = calibrated and any(target.keep_ratio != 1 for target in targets)
    check_finite(checkpoint, progress)
    gate = None
    if max_perplexity_increase is not None:
        gate = PerplexityGate.build(checkpoint, max_perplexity_increase, perplexity_text, target_device)

    reports = []
    kept_files = None if statistics is None else Path(statistics)
    with resumable_folder(beside, kept_files) as work:
        root = kept_files or work
        calibration = Calibration(
            calibration_text, calibration_samples, calibration_length, calibration_format, seed
        )
        sequences = calibration.sequences(checkpoint, root, target_device, progress) if calibrated else None
        if sequences is not None:
            _warn_if_few(sequences, checkpoint.config)
        measurements = Measurements(checkpoint, sequences, root, target_device, progress)
        spectra = Spectra(checkpoint, chosen, measurements, root, target_device)
        for target in targets:
            target_ranks: Ranks = fixed or {}
            if target.keep_ratio != 1:
                _decompose(spectra, units, progress)
            if target.keep_ratio is not None and target.keep_ratio < 1:
                problem = RankProblem(units, target.keep_ratio, rank_multiple, spectra, measurements)
                target_ranks = allocation(problem)
            model = CompressedModel(checkpoint, target_ranks, spectra.cut)
            updated = None
            if update and target_ranks:
                updated = refit(model, measurements.tokens, spectra.key, root, target_device, progress)
                model = updated.model
                if not updated.accepted:
                    warnings.warn(
                        "the update was dropped: it does not lower the loss on held-out calibration text;"
                        " more calibration samples may help",
                        stacklevel=3,
                    )
            kept = kept_ratio(units, target_ranks)
            if rank_multiple > 1 and abs(kept - (target.keep_ratio or kept)) > MULTIPLES_MAY_MISS_BY:
                warnings.warn(
                    f"{kept:.3g} of the parameters are kept instead of {target.keep_ratio:g}: ranks are multiples of"
                    f" {rank_multiple}, and modules without room for one stay dense",
                    stacklevel=3,
                )
            replace = run.may_replace(target.destination)
            with run.writing(target.destination):
                _save(model, chosen, kept, target.destination, dtype, replace, progress)
            perplexity = None if gate is None else gate.measure(target.destination)
            reports.append(
                CompressionReport(
                    method=method,
                    keep_ratio=target.keep_ratio,
                    kept_ratio=kept,
                    source=str(source),
                    destination=str(target.destination),
                    ranks=dict(model.config.ranks),
                    parameters=parameters(model.config),
                    dense_parameters=parameters(checkpoint.config),
                    relative_errors={
                        module: spectra.relative_error(unit, rank)
                        for unit, rank in target_ranks.items()
                        for module in unit.modules
                    },
                    calibration_tokens=0 if sequences is None else sequences.numel(),
                    update_losses=None if updated is None else (updated.loss_before, updated.loss_after),
                    perplexity=perplexity,
                    dense_perplexity=None if gate is None else gate.perplexity,
                    within_limit=None if perplexity is None or gate is None else gate.allows(perplexity),
                    seconds=time.monotonic() - started,
                )
            )
    return reports


def _allocation(method: Method, name: str | None) -> Allocation:
    if name is None:
        return method.allocation or uniform
    if name not in ALLOCATIONS:
        raise unknown_name("allocation", name, list(ALLOCATIONS))
    return ALLOCATIONS[name]


def _warn_if_few(sequences: Tensor, config: ModelConfig) -> None:
    widest = max(shape.in_features for shape in config.linears().values())
    if sequences.numel() < widest:
        warnings.warn(
            f"{sequences.numel()} calibration tokens are fewer than the {widest} input channels of the widest"
            " module; the result will be poor; raise --calibration-samples",
            stacklevel=4,
        )


def _decompose(spectra: Spectra, units: Sequence[Unit], progress: bool) -> None:
    """Have every spectrum on disk, and warn about inputs that do not span all channels."""
    damped = [
        unit.name
        for unit in tqdm(units, desc="Decompositions", unit="module", disable=not progress)
        if spectra.damping(unit)
    ]
    if damped:
        warnings.warn(
            f"the calibration inputs do not span all channels of {', '.join(damped[:3])}"
            f"{f' and {len(damped) - 3} others' if damped[3:] else ''};"
            " their Gram matrices were damped; more varied text may help",
            stacklevel=4,
        )


def _save(
    model: CompressedModel,
    method: Method,
    kept: float,
    destination: Path,
    dtype: str | None,
    force: bool,
    progress: bool,
) -> None:
    checkpoint = model.checkpoint
    config = dict(checkpoint.raw_config)
    if model.ranks:
        low_rank = model.config
        source = {
            "family": method.name,
            "keep_ratio": round(kept, 4),
            "tool": f"thinrank {__version__}",
            "base_model": checkpoint.path.resolve().name,
        }
        section = LowRankSection(low_rank.ranks, low_rank.tied_factors, source)
        config["quantization_config"] = section.to_json()
    if dtype is not None:
        config["torch_dtype"] = dtype
        config.pop("dtype", None)
    tensors = model.tensors(None if dtype is None else DTYPES[dtype])
    files = tokenizer_files(checkpoint.path)
    save_checkpoint(destination, config, tensors, files, force=force, progress=progress)
