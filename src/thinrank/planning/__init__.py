"""Before anyone compresses anything: what each keep_ratio, and plain quantisation, would cost on a card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..bench.shapes import SHAPES
from ..checkpoint.folder import read_json
from ..checkpoint.format import CONFIG_NAME, read_config
from ..config import ModelConfig
from ..errors import CheckpointError, OptionError, unknown_name
from ..model.cost import INT4, INT8, dense_config
from ..model.registry import parse_config
from ..model.tensor_parallel import require_divisible
from .advice import advise
from .cards import Card, find_card, named_memory, this_card
from .choice import Choice, Workload, dense_choice, low_rank_choice, quantized_choice
from .parallel_advice import advise_parallel
from .speed import MAX_BATCH_SIZE, TOLERANCE

KEEP_RATIOS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
DEFAULT_CONTEXT = 4096


@dataclass(frozen=True)
class Plan:
    """context: tokens of each sequence. tensor_parallel_size: cards that share the work. reserved_memory: bytes of a
    card beside weights and cache. tolerance: relative error of predicted times where something was measured. choices:
    by rising keep_ratio, then dense 16-, 8- and 4-bit. advice: sentences."""

    model: str
    card: Card
    context: int
    batch_size: int
    tensor_parallel_size: int
    reserved_memory: int
    tolerance: float
    choices: tuple[Choice, ...]
    advice: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def plan(
    source: str | Path | None = None,
    *,
    shape: str | None = None,
    gpu: str | None = None,
    memory: int | None = None,
    bandwidth: float | None = None,
    context: int | None = None,
    batch_size: int = 1,
    tensor_parallel_size: int = 1,
    keep_ratios: Sequence[float] = KEEP_RATIOS,
) -> Plan:
    """Bytes, longest context and predicted decode time of every way to run a model. Reads its config alone.

    source: a config.json or a folder with one; of a compressed model, its dense original is planned. Or else
    shape: a name of `bench.shapes.SHAPES`. gpu: a name of `cards.CARDS`; or else memory: bytes, and bandwidth:
    bytes/s of the datasheet, without which no time is predicted; without either, the GPU of this machine.
    context: tokens of each of `batch_size` sequences, the last one's step is what is predicted; None for 4096,
    or the model's positions where those are fewer. tensor_parallel_size: of 2 or more, every number is that of one of
    so many cards in vLLM, and no time is predicted. keep_ratios: above 0, below 1.

    Raises OptionError for an option that is unknown, out of range or contradicts another; CheckpointError and
    UnsupportedModelError for a config that cannot be read.
    """
    model, dense = _read_model(source, shape)
    card = _choose_card(gpu, memory, bandwidth)
    positions = dense.max_position_embeddings
    if context is None:
        context = min(DEFAULT_CONTEXT, positions)
    if not 1 <= context <= positions:
        raise OptionError(f"context is {context}", f"it must be 1 to {positions}, the model's positions")
    if not 1 <= batch_size <= MAX_BATCH_SIZE:
        raise OptionError(f"batch_size is {batch_size}", f"it must be 1 to {MAX_BATCH_SIZE}")
    for ratio in keep_ratios:
        if not 0 < ratio < 1:
            raise OptionError(f"keep_ratio is {ratio:g}", "it must be above 0 and below 1, which is dense")
    require_divisible(dense, tensor_parallel_size)
    work = Workload(card, context, batch_size, tensor_parallel_size)
    low_rank = [low_rank_choice(dense, ratio, work) for ratio in sorted(set(keep_ratios))]
    sixteen_bit = dense_choice(dense, work)
    eight_bit, four_bit = (quantized_choice(dense, kind, work) for kind in (INT8, INT4))
    if tensor_parallel_size == 1:
        advice = advise(sixteen_bit, eight_bit, four_bit, low_rank, context)
    else:
        alone = [
            low_rank_choice(dense, c.keep_ratio or 0.0, Workload(card, context, batch_size)) for c in low_rank
        ]
        advice = advise_parallel(sixteen_bit, eight_bit, four_bit, low_rank, alone, work)
    return Plan(
        model=model,
        card=card,
        context=context,
        batch_size=batch_size,
        tensor_parallel_size=tensor_parallel_size,
        reserved_memory=work.reserved_memory,
        tolerance=TOLERANCE,
        choices=(*low_rank, sixteen_bit, eight_bit, four_bit),
        advice=advice,
    )


def _read_model(source: str | Path | None, shape: str | None) -> tuple[str, ModelConfig]:
    if (source is None) == (shape is None):
        problem = "there is no model" if source is None else "both SRC and --shape are given"
        raise OptionError(problem, "pass one of SRC and --shape NAME")
    if shape is not None:
        if shape not in SHAPES:
            raise unknown_name("shape", shape, list(SHAPES))
        return shape, parse_config(SHAPES[shape])
    path = Path(str(source))
    if path.is_file() and path.suffix != ".json":
        raise CheckpointError(
            f"{path} is no folder and no config.json", "thinrank convert makes a folder of it"
        )
    config, _ = read_config(read_json(path if path.is_file() else path / CONFIG_NAME))
    return str(path), dense_config(config)


def _choose_card(gpu: str | None, memory: int | None, bandwidth: float | None) -> Card:
    if gpu is not None and (memory, bandwidth) != (None, None):
        raise OptionError("--gpu is given beside --memory or --bandwidth", "pass a name or the numbers")
    if gpu is not None:
        return find_card(gpu)
    if memory is not None:
        return named_memory(memory, bandwidth)
    if bandwidth is not None:
        raise OptionError("--bandwidth is given without --memory", "pass both")
    return this_card()
