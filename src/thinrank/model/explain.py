"""What the packed decoder launches in a step, in the order of its launches, with their settings in words.

Imports triton. `tests/model/test_explain.py` compares it with what a step asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..kernels.decode_attention import decode_config
from ..kernels.prefill_attention import prefill_config
from ..kernels.tuning import Launch, counted
from .packed_decoder import DECODE_BATCH_SIZES, MAX_GEMV_ROWS, PackedDecoder
from .packing import Matrix, PackedProjections


@dataclass(frozen=True)
class LaunchDescription:
    """shape: of what it multiplies or reads. settings: how it is launched. source: where they come from, "table" or
    "rule"; both empty for a kernel that has nothing to set."""

    op: str
    shape: str
    settings: str = ""
    source: str = ""


@dataclass(frozen=True)
class LaunchGroup:
    """Launches one after the other. layers: those that launch the same; none for what runs once a step."""

    name: str
    layers: tuple[int, ...]
    launches: tuple[LaunchDescription, ...]


def describe_step(decoder: PackedDecoder) -> tuple[LaunchGroup, ...]:
    """A decode step, layers that launch the same in one group; what is different in one of many rows comes last."""
    config = decoder.config
    vocabulary = f"{config.vocab_size} x {config.hidden_size}"
    layers: dict[tuple[LaunchDescription, ...], list[int]] = {}
    for index in range(len(decoder.layers)):
        layers.setdefault(_describe_layer(decoder, index), []).append(index)
    head = (
        *_latents(decoder, decoder.lm_head),
        _gemv(decoder, "project" if decoder.lm_head.inputs else "norm_project", decoder.lm_head.outputs),
        LaunchDescription("greedy", f"{config.vocab_size} logits"),
        LaunchDescription("sample", "in a graph of its own, when a row has a temperature"),
    )
    return (
        LaunchGroup("start", (), (LaunchDescription("embed", vocabulary),)),
        *(
            LaunchGroup(
                f"{'layer' if len(indices) == 1 else 'layers'} {ranges(indices)}", tuple(indices), launches
            )
            for launches, indices in layers.items()
        ),
        LaunchGroup("head", (), head),
        LaunchGroup(f"more than {MAX_GEMV_ROWS} rows", (), tuple(_describe_wide(decoder))),
    )


def describe_prefill(decoder: PackedDecoder) -> str:
    """How prompts attend."""
    block_m, num_warps, num_stages = prefill_config(decoder.config.head_dim, decoder.dtype)
    return (
        "whole prompts of one length by PyTorch's scaled_dot_product_attention; history, windows and unequal lengths "
        f"by prefill_attention ({block_m} queries, {num_warps} warps, {num_stages} stages)"
    )


def ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"; the numbers are sorted."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _describe_layer(decoder: PackedDecoder, index: int) -> tuple[LaunchDescription, ...]:
    layer = decoder.layers[index]
    return (
        *_latents(decoder, layer.qkv),
        _gemv(decoder, layer.rope_op, layer.qkv.outputs),
        _attention(decoder, layer.sliding_window),
        *_output(decoder, layer.o),
        *_latents(decoder, layer.gate_up),
        # Rows of gate and up are multiplied as pairs.
        _gemv(decoder, "project_silu_mul", layer.gate_up.outputs, rows=layer.gate_up.outputs[0].rows),
        *_output(decoder, layer.down),
    )


def _describe_wide(decoder: PackedDecoder) -> Iterable[LaunchDescription]:
    yield LaunchDescription("GEMMs", "projections, as in prefill")
    for batch in DECODE_BATCH_SIZES:
        if batch > MAX_GEMV_ROWS:
            yield _attention(decoder, None, batch)


def _latents(decoder: PackedDecoder, packed: PackedProjections) -> Iterable[LaunchDescription]:
    return [_gemv(decoder, "norm_project", packed.inputs)] if packed.inputs else []


def _output(decoder: PackedDecoder, packed: PackedProjections) -> Iterable[LaunchDescription]:
    if packed.inputs:
        yield _gemv(decoder, "project", packed.inputs)
    yield _gemv(decoder, "project_residual", packed.outputs)


def _gemv(
    decoder: PackedDecoder, op: str, matrices: Sequence[Matrix], rows: int | None = None
) -> LaunchDescription:
    """rows: what the settings go by; None: of all matrices together."""
    total = sum(matrix.rows for matrix in matrices)
    launch = Launch.of(op, total if rows is None else rows, *(matrix.width for matrix in matrices))
    shape = " + ".join(f"{matrix.rows} x {matrix.width}" for matrix in matrices)
    settings = decoder.launch_settings
    return LaunchDescription(op, shape, str(settings.config(launch)), settings.origin(launch))


def _attention(decoder: PackedDecoder, window: int | None, batch: int = 1) -> LaunchDescription:
    config = decoder.config
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    chosen = decode_config(heads, kv_heads, head_dim, decoder.dtype, batch)
    shape = f"{heads} heads, {kv_heads} kv heads of {head_dim}"
    if window:
        shape += f", window {window}"
    if batch > 1:
        shape += f", {batch} rows"
    settings = (
        f"{counted(chosen.num_warps, 'warp')}, {counted(chosen.num_splits, 'split')}, units of {chosen.unit}"
    )
    return LaunchDescription("decode_attention", shape, settings, "rule")
