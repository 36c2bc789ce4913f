"""Writes a thinrank checkpoint as a plain dense Hugging Face folder: W = factor_out @ factor_in."""

from __future__ import annotations

from pathlib import Path

import torch

from ..errors import unknown_name
from .folder import tokenizer_files
from .format import factor_bias_name, factor_in_name, factor_out_name
from .load import DTYPES, OpenCheckpoint, open_checkpoint
from .save import check_destination, save_checkpoint
from .tensors import LazyTensor


def export(
    source: str | Path,
    destination: str | Path,
    *,
    dtype: str | None = None,
    force: bool = False,
    progress: bool = True,
) -> None:
    """Multiply all factors out and write the dense model, for llama.cpp and for comparisons.

    Products are computed in float32. dtype: what they are rounded to; None rounds each to the dtype of
    its factor_out, "float32" keeps them exact.

    Raises CheckpointError, UnsupportedModelError, OptionError or OutputError.
    """
    if dtype is not None and dtype not in DTYPES:
        raise unknown_name("dtype", dtype, list(DTYPES))
    check_destination(Path(destination), force=force, sources=[Path(source)])
    checkpoint = open_checkpoint(source)
    config = {key: value for key, value in checkpoint.raw_config.items() if key != "quantization_config"}
    if dtype is not None:
        config["torch_dtype"] = dtype
        config.pop("dtype", None)
    tensors = dense_tensors(checkpoint, None if dtype is None else DTYPES[dtype])
    files = tokenizer_files(checkpoint.path)
    save_checkpoint(Path(destination), config, tensors, files, force=force, progress=progress)


def dense_tensors(checkpoint: OpenCheckpoint, dtype: torch.dtype | None = None) -> dict[str, LazyTensor]:
    """The tensors of the dense model by Hugging Face name; see `export` for `dtype`."""
    config, stored = checkpoint.config, checkpoint.tensors
    tensors = {name: stored[name] for name in config.other_tensors()}
    for module, shape in config.linears().items():
        if module in config.ranks:
            tensors[f"{module}.weight"] = _product(checkpoint, module, dtype)
        else:
            tensors[f"{module}.weight"] = stored[f"{module}.weight"]
        if shape.bias:
            bias = factor_bias_name(module) if module in config.ranks else f"{module}.bias"
            tensors[f"{module}.bias"] = stored[bias]
    return {name: tensor.to(dtype or tensor.dtype) for name, tensor in tensors.items()}


def _product(checkpoint: OpenCheckpoint, module: str, dtype: torch.dtype | None) -> LazyTensor:
    holder = checkpoint.config.tied_factors.get(factor_in_name(module), factor_in_name(module))
    factor_in, factor_out = checkpoint.tensors[holder], checkpoint.tensors[factor_out_name(module)]
    rounded = dtype or factor_out.dtype

    def read() -> torch.Tensor:
        return (factor_out.read().float() @ factor_in.read().float()).to(rounded)

    return LazyTensor((factor_out.shape[0], factor_in.shape[1]), rounded, read)
