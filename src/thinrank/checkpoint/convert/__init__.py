"""Conversion of foreign checkpoints into the thinrank format.

    locate -> open_foreign -> detect_family -> adapter -> complete (base) -> lay_out -> save

Adapters, one a family, only translate names. Importing this module executes nothing of a checkpoint, and
nothing here ever does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from ...config import ModelConfig
from ...errors import CheckpointError, unknown_name
from ...model.registry import parse_config
from ...version import __version__
from ..detect import detect_family
from ..folder import VOCABULARY_FILES
from ..format import LowRankSection, expected_tensors
from ..load import DTYPES, check_tensors
from ..save import check_destination, save_checkpoint
from ..tensors import LazyTensor
from . import asvd, basis_sharing, dobi_svd, hf_dense, lowrank_arena, svd_llm
from .complete import complete
from .dense_config import dense_config
from .foreign import ForeignCheckpoint, locate, open_foreign
from .layout import lay_out
from .report import ConversionReport
from .source_model import SourceModel
from .tokenizer_files import drop_unknown_pad_token

__all__ = ["ConversionReport", "convert"]

Adapter = Callable[[ForeignCheckpoint, Mapping[str, Any]], SourceModel]

ADAPTERS: dict[str, Adapter] = {
    module.FAMILY: module.read for module in (svd_llm, basis_sharing, dobi_svd, asvd, lowrank_arena, hf_dense)
} | {"gguf": hf_dense.read}  # a GGUF file is read under Hugging Face names


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    base: str | Path | None = None,
    dtype: str | None = None,
    force: bool = False,
    progress: bool = True,
) -> ConversionReport:
    """Convert a checkpoint of a public compressor, or a dense model, into the thinrank format.

    source: folder, file or hub id ("org/name"); its family is detected from its content. destination:
    folder to write. base: the dense model that the source was made from; gives the config, the tokenizer
    and the tensors that the source lacks. dtype: "float32", "float16" or "bfloat16"; None keeps each
    tensor's own. force: replace an existing checkpoint.

    Raises CheckpointError, UnsafePickleError, UnsupportedModelError, OptionError or OutputError; then the
    destination is as it was.
    """
    if dtype is not None and dtype not in DTYPES:
        raise unknown_name("dtype", dtype, list(DTYPES))
    destination = Path(destination)
    sources = [Path(path) for path in (source, base) if path is not None]
    check_destination(destination, force=force, sources=sources)
    foreign = open_foreign(locate(source))
    base_foreign = None if base is None else open_foreign(locate(base))
    config = _dense_config(foreign, base_foreign)
    family = foreign.family or detect_family(foreign.config, foreign.tensors)
    model = ADAPTERS[family](foreign, config)
    from_base = complete(model, config, base_foreign)
    tokenizer = dict(foreign.tokenizer_files) or dict(base_foreign.tokenizer_files if base_foreign else {})
    dropped = [*foreign.dropped, *model.dropped, *drop_unknown_pad_token(tokenizer)]

    layout = lay_out(model, None if dtype is None else DTYPES[dtype])
    if "lm_head" in layout.ranks or "lm_head.weight" in layout.tensors:
        config["tie_word_embeddings"] = False
    parsed = parse_config(config, ranks=layout.ranks, tied_factors=layout.tied_factors)
    check_tensors(parsed, layout.tensors, str(foreign.path))
    ordered = {name: layout.tensors[name] for name in expected_tensors(parsed)}
    keep_ratio = _keep_ratio(parsed, ordered)
    base_model = _base_name(foreign, base)
    report = ConversionReport(
        family=family,
        source=str(foreign.path),
        destination=str(destination),
        architecture=config["architectures"][0],
        base_model=base_model,
        ranks=layout.ranks,
        densified=layout.densified,
        tied_factors=len(layout.tied_factors),
        parameters=sum(t.numel for t in ordered.values()),
        dense_parameters=sum(prod(shape) for shape in expected_tensors(parse_config(config)).values()),
        keep_ratio=keep_ratio,
        dtypes=_count_dtypes(ordered),
        from_base=from_base,
        dropped=dropped,
        tokenizer=any(name in tokenizer for name in VOCABULARY_FILES),
        sha256={path.name: _sha256(path, progress) for path in foreign.weights},
    )
    config["torch_dtype"] = max(report.dtypes, key=lambda name: report.dtypes[name])
    if layout.ranks:
        source_section = {
            "family": family,
            "keep_ratio": keep_ratio,
            "tool": f"thinrank {__version__}",
            "base_model": base_model,
        }
        section = LowRankSection(layout.ranks, layout.tied_factors, source_section)
        config["quantization_config"] = section.to_json()
    save_checkpoint(destination, config, ordered, tokenizer, force=force, progress=progress)
    return report


def _dense_config(foreign: ForeignCheckpoint, base: ForeignCheckpoint | None) -> dict[str, Any]:
    """The dense model's config: the base's own where one is named, else what the source says."""
    raw = base.config if base and base.config else foreign.config
    if raw is None:
        raise CheckpointError(
            f"{foreign.path} has no config.json", "name the dense model that it was made from with --base"
        )
    config = dense_config(raw)
    parse_config(config)  # refuses what is not implemented before anything is read
    return config


def _base_name(foreign: ForeignCheckpoint, base: str | Path | None) -> str | None:
    name = str(base) if base is not None else (foreign.config or {}).get("_name_or_path")
    return Path(name).name if isinstance(name, str) and name else None


def _keep_ratio(config: ModelConfig, tensors: Mapping[str, LazyTensor]) -> float | None:
    """Parameters stored for the factored modules over those of the same modules when dense."""
    if not config.ranks:
        return None
    linears = config.linears()
    dense = sum(linears[module].out_features * linears[module].in_features for module in config.ranks)
    kept = sum(
        t.numel for name, t in tensors.items() if ".factor_in." in name or ".factor_out.weight" in name
    )
    return round(kept / dense, 6)


def _count_dtypes(tensors: Mapping[str, LazyTensor]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for tensor in filter(lambda tensor: tensor.numel, tensors.values()):  # guards are empty
        name = str(tensor.dtype).removeprefix("torch.")
        counts[name] = counts.get(name, 0) + tensor.numel
    return counts


def _sha256(path: Path, progress: bool) -> str:
    digest = hashlib.sha256()
    size = path.stat().st_size
    with (
        path.open("rb") as file,
        tqdm(total=size, unit="B", unit_scale=True, desc="Hashing", disable=not progress, leave=False) as bar,
    ):
        while chunk := file.read(2**24):
            digest.update(chunk)
            bar.update(len(chunk))
    return digest.hexdigest()
