"""Compression of a dense model into a low-rank one, layer by layer.

One decoder layer is in memory at a time, beside the activations of the calibration tokens. Statistics come
from the original model's activations, so one pass serves every keep_ratio. Finished layers go to a work
folder beside the destination; the checkpoint itself appears when everything is done.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm

from ..checkpoint.balance import balancing_scale
from ..checkpoint.folder import tokenizer_files
from ..checkpoint.format import (
    LowRankSection,
    expected_tensors,
    factor_in_name,
    factor_out_name,
    guard_name,
)
from ..checkpoint.load import DTYPES, OpenCheckpoint, open_checkpoint
from ..checkpoint.safetensors_reader import read_safetensors
from ..checkpoint.save import check_destination, save_checkpoint, work_folder
from ..checkpoint.tensors import LazyTensor
from ..config import ModelConfig
from ..device import resolve_device
from ..errors import CheckpointError, OptionError, unknown_name
from ..model.cost import parameters
from ..model.layers import DecoderLayer
from ..text import Tokenizer
from ..version import __version__
from .calibration import calibration_sequences, run_layer
from .methods import method_by_name
from .methods.method import Method, Scaling
from .report import CompressionReport
from .truncate import Spectrum, rank_for, spectrum

__all__ = ["CompressionReport", "compress"]


@dataclass
class _Target:
    """One checkpoint in the making."""

    keep_ratio: float
    destination: Path
    config: ModelConfig
    work: Path = Path()
    errors: dict[str, float] = field(default_factory=dict)


@torch.inference_mode()
def compress(
    source: str | Path,
    destination: str | Path,
    *,
    method: str = "svd-llm",
    keep_ratio: float | Sequence[float],
    calibration_text: str | Path | None = None,
    calibration_samples: int = 32,
    calibration_length: int = 512,
    calibration_format: str = "text",
    dtype: str | None = None,
    device: str | torch.device = "auto",
    force: bool = False,
    progress: bool = True,
) -> list[CompressionReport]:
    """Factor the attention and MLP projections of a dense model; embedding, norms and lm_head stay.

    source: dense folder in safetensors. destination: folder to write; with several keep_ratios it must
    contain "{keep_ratio}". method: a name in `methods.METHODS`. keep_ratio: share of each projection's
    parameters to keep, above 0, to 1; at 1 nothing is factored. calibration_text: UTF-8 file, None for the
    built-in English text. calibration_format: "text", or "chat" to wrap it in the model's chat template,
    which keeps a chat model able to answer. dtype: of the factors, None for the source's own. Computes in
    float32, statistics and decompositions in float64, on `device`.

    Warns when there are fewer calibration tokens than the widest input has channels.
    Raises CheckpointError, OptionError or OutputError; then every destination is as it was.
    """
    started = time.monotonic()
    chosen = method_by_name(method)
    if dtype is not None and dtype not in DTYPES:
        raise unknown_name("dtype", dtype, list(DTYPES))
    ratios = [float(ratio) for ratio in ([keep_ratio] if isinstance(keep_ratio, int | float) else keep_ratio)]
    destinations = _destinations(str(destination), ratios)
    for path in destinations:
        check_destination(path, force=force)
    checkpoint = open_checkpoint(source)
    if checkpoint.config.ranks:
        raise CheckpointError(f"{source} is low-rank already", "name the dense model that it was made from")
    targets = [
        _Target(ratio, path, _low_rank_config(checkpoint.config, ratio))
        for ratio, path in zip(ratios, destinations, strict=True)
    ]
    target_device = resolve_device(device)
    sequences = None
    if chosen.scaling is not None:
        tokenizer = Tokenizer(checkpoint.path)
        sequences = calibration_sequences(
            tokenizer, calibration_text, calibration_samples, calibration_length, calibration_format
        )
        _warn_if_few(sequences, checkpoint.config)

    with ExitStack() as stack:
        for target in targets:
            target.work = stack.enter_context(work_folder(target.destination))
        _factor_layers(checkpoint, chosen, sequences, targets, dtype, target_device, progress)
        for target in targets:
            _save(checkpoint, chosen, target, force, progress)
    return [
        CompressionReport(
            method=method,
            keep_ratio=target.keep_ratio,
            source=str(source),
            destination=str(target.destination),
            ranks=dict(target.config.ranks),
            parameters=parameters(target.config),
            dense_parameters=parameters(checkpoint.config),
            relative_errors=target.errors,
            calibration_tokens=0 if sequences is None else sequences.numel(),
            seconds=time.monotonic() - started,
        )
        for target in targets
    ]


def _destinations(destination: str, ratios: list[float]) -> list[Path]:
    if not ratios:
        raise OptionError("no keep_ratio is given", "name at least one, above 0, to 1")
    for ratio in ratios:
        if not 0 < ratio <= 1:
            raise OptionError(
                f"keep_ratio is {ratio:g}", "it is the share of parameters to keep: above 0, to 1"
            )
    if len(set(ratios)) < len(ratios):
        raise OptionError("a keep_ratio is given twice", "name each once")
    if len(ratios) > 1 and "{keep_ratio}" not in destination:
        raise OptionError(
            f"{len(ratios)} keep_ratios would all be written to {destination}",
            "put {keep_ratio} into the destination, like model-{keep_ratio}",
        )
    return [Path(destination.replace("{keep_ratio}", f"{ratio:g}")) for ratio in ratios]


def _low_rank_config(config: ModelConfig, keep_ratio: float) -> ModelConfig:
    if keep_ratio == 1:
        return config
    ranks = {
        module: rank_for(keep_ratio, shape.out_features, shape.in_features)
        for module, shape in config.linears().items()
        if module != "lm_head"
    }
    return replace(config, ranks=ranks)


def _warn_if_few(sequences: Tensor, config: ModelConfig) -> None:
    widest = max(shape.in_features for shape in config.linears().values())
    if sequences.numel() < widest:
        warnings.warn(
            f"{sequences.numel()} calibration tokens are fewer than the {widest} input channels of the widest"
            " module; the result will be poor; raise --calibration-samples",
            stacklevel=3,
        )


def _factor_layers(
    checkpoint: OpenCheckpoint,
    method: Method,
    sequences: Tensor | None,
    targets: Sequence[_Target],
    dtype: str | None,
    device: torch.device,
    progress: bool,
) -> None:
    """Factor one layer after the other for all targets, into their work folders."""
    config = checkpoint.config

    def get(name: str) -> Tensor:
        return checkpoint.read(name, device, "float32")

    length = 0 if sequences is None else sequences.shape[1]
    damped: list[str] = []
    hidden = None
    if sequences is not None:
        ids = sequences.flatten()
        hidden = checkpoint.tensors["model.embed_tokens.weight"].read()[ids].float()
    for index in tqdm(range(config.num_hidden_layers), desc=method.name, unit="layer", disable=not progress):
        grams: dict[str, Tensor] = {}
        if hidden is not None:
            grams = run_layer(DecoderLayer.build(config, index, get), hidden, length)
        factors: dict[Path, dict[str, Tensor]] = {target.work: {} for target in targets}
        scalings: dict[int, Scaling] = {}
        prefix = f"model.layers.{index}."
        for module in (name for name in config.linears() if name.startswith(prefix)):
            gram = grams.get(module.rpartition(".")[2])
            if method.scaling is not None and gram is not None and id(gram) not in scalings:
                scalings[id(gram)] = method.scaling(gram)
            weight = get(f"{module}.weight")
            if not weight.isfinite().all():
                raise CheckpointError(f"{module}.weight has NaN or infinite values", "the source is damaged")
            scaling = None if gram is None else scalings[id(gram)]
            if scaling is not None and scaling.damping:
                damped.append(module)
            decomposed = spectrum(weight, None if scaling is None else scaling.matrix)
            for target in (target for target in targets if module in target.config.ranks):
                target.errors[module] = decomposed.error(target.config.ranks[module])
                stored = checkpoint.tensors[f"{module}.weight"].dtype if dtype is None else DTYPES[dtype]
                factors[target.work] |= _factor(module, decomposed, target.config.ranks[module], stored)
        for work, tensors in factors.items():
            if tensors:
                save_file(tensors, work / f"layer-{index:05d}.safetensors")
    if damped:
        warnings.warn(
            f"the calibration inputs do not span all channels of {', '.join(damped[:3])}"
            f"{f' and {len(damped) - 3} others' if damped[3:] else ''};"
            " their Gram matrices were damped; more varied text may help",
            stacklevel=3,
        )


def _factor(module: str, decomposed: Spectrum, rank: int, dtype: torch.dtype) -> dict[str, Tensor]:
    factor_in, factor_out = decomposed.cut(rank)
    scale = balancing_scale(factor_in, [factor_out])
    return {
        factor_in_name(module): (factor_in * scale[:, None]).to(dtype).cpu().contiguous(),
        factor_out_name(module): (factor_out / scale).to(dtype).cpu().contiguous(),
    }


def _save(checkpoint: OpenCheckpoint, method: Method, target: _Target, force: bool, progress: bool) -> None:
    factors: dict[str, LazyTensor] = {}
    for path in sorted(target.work.glob("layer-*.safetensors")):
        factors |= read_safetensors(path)
    tensors: dict[str, LazyTensor] = {}
    for name in expected_tensors(target.config):
        module = name.removesuffix(".weight")
        if name in factors:
            tensors[name] = factors[name]
        elif module in target.config.ranks:
            dtype = factors[factor_out_name(module)].dtype
            tensors[guard_name(module)] = LazyTensor.of(torch.empty(0, dtype=dtype))
        else:
            tensors[name] = checkpoint.tensors[name.replace(".factor_out.bias", ".bias")]
    config = dict(checkpoint.raw_config)
    if target.config.ranks:
        source = {
            "family": method.name,
            "keep_ratio": target.keep_ratio,
            "tool": f"thinrank {__version__}",
            "base_model": checkpoint.path.resolve().name,
        }
        config["quantization_config"] = LowRankSection(target.config.ranks, source=source).to_json()
    files: Mapping[str, bytes] = tokenizer_files(checkpoint.path)
    save_checkpoint(target.destination, config, tensors, files, force=force, progress=progress)
