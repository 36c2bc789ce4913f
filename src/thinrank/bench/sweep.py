"""`sweep`: how time to the first token and time per token grow with keep_ratio, prompt and context.

Prompts run through the engine. For a context the cache is filled with random numbers instead: a decode step takes
the same time whatever the blocks hold, and 16,384 tokens need no prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..checkpoint.load import DTYPES
from ..config import SamplingParams
from ..device import resolve_device
from ..engine.kv_cache import allocate_kv_cache, blocks_for
from ..engine.sequence import Sequence as TokenSequence
from ..errors import OptionError, unknown_name
from .engine_system import EngineSystem
from .gate import check_system
from .report import Report, ReportFile, at_least, header, require_gpu
from .shapes import BenchModel, random_model
from .system import model_step_bytes
from .timing import Nvml, Percentiles, milliseconds, read_bandwidth, reset_memory

#: Decode steps of one measurement.
WINDOW_STEPS = 64
#: Tokens beyond the context: the window's, and that of the step which the last one starts ahead.
ROOM = WINDOW_STEPS + 1


@dataclass(frozen=True)
class SweepRow:
    """One prompt length or one context length at one keep_ratio.

    keep_ratio: 1 is the dense model. input_len: tokens of a prompt; ttft_ms: median time to its first token.
    context_len: tokens that the window's first step attends to; tpot_ms: time of a decode step, averaged over the
    window; percentiles over the windows. bytes_per_step: what a step must read at least, with true ranks, in the
    middle of the window. mbu: bytes_per_step over the median time and the measured read bandwidth. A prompt's row
    has None for what belongs to a context, and the other way round.
    """

    keep_ratio: float
    structure: str
    input_len: int | None = None
    ttft_ms: float | None = None
    context_len: int | None = None
    tpot_ms_p20: float | None = None
    tpot_ms_p50: float | None = None
    tpot_ms_p80: float | None = None
    bytes_per_step: int | None = None
    mbu: float | None = None


def sweep(
    shape: str = "llama-7b",
    *,
    structure: str = "uniform",
    keep_ratios: Sequence[float] = (0.3, 0.5, 0.7, 1.0),
    input_lens: Sequence[int] = (512, 2048, 8192),
    context_lens: Sequence[int] = (512, 2048, 8192, 16384),
    num_iters: int = 10,
    num_iters_warmup: int = 2,
    dtype: str = "bfloat16",
    device: str = "auto",
    seed: int = 0,
    output_json: str | Path | None = None,
    command: str | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Report[SweepRow]:
    """Measure a named shape with random weights at batch 1, every keep_ratio after a check of its logits.

    keep_ratios: 1 is the dense model, whatever the structure. input_lens: of prompts. context_lens: tokens in the
    cache, also more than the shape has positions: with random weights a position is a row of a table. num_iters:
    prompts, and windows of `WINDOW_STEPS` steps, that are measured. output_json: the file to write, after every row.
    command: for the header. on_progress: told what is being done.

    Raises OptionError for an option that is unknown or out of range, and without a GPU; ThinrankError when logits
    differ from the float32 reference's; OutputError when the file cannot be written.
    """
    at_least(1, num_iters=num_iters)
    at_least(0, num_iters_warmup=num_iters_warmup, seed=seed)
    for length in input_lens:
        at_least(1, input_len=length)
    for length in context_lens:
        at_least(1, context_len=length)
    if not keep_ratios:
        raise OptionError("there is no keep_ratio", "name one, or several with commas between them")
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, list(DTYPES))
    target = resolve_device(device)
    longest = max(
        [length + 2 for length in input_lens] + [length + ROOM for length in context_lens], default=0
    )
    models = [
        with_positions(
            random_model(
                shape, "dense" if keep_ratio == 1 else structure, keep_ratio, DTYPES[dtype], target, seed
            ),
            longest,
        )
        for keep_ratio in keep_ratios
    ]
    require_gpu("bench sweep", target)
    settings = {
        "shape": shape,
        "window_steps": WINDOW_STEPS,
        "num_iters": num_iters,
        "num_iters_warmup": num_iters_warmup,
    }
    file = ReportFile[SweepRow](output_json, header("sweep", models[0], Nvml(target), command, **settings))
    bandwidth = read_bandwidth(target)
    file.header["read_bandwidth_bytes_per_s"] = bandwidth
    for model in models:
        name = f"keep_ratio {model.keep_ratio:g}"
        on_progress(f"checking {name}")
        reset_memory(target)
        file.add(checks=check_system(name, model, 1))
        reset_memory(target)
        system = EngineSystem(model)
        for input_len in input_lens:
            on_progress(f"measuring {name}, {input_len} tokens in")
            file.add(rows=[_prompt_row(system, input_len, num_iters, num_iters_warmup)])
        system.engine = None
        for context_len in context_lens:
            on_progress(f"measuring {name}, context {context_len}")
            reset_memory(target)
            file.add(rows=[_context_row(system, context_len, num_iters, num_iters_warmup, bandwidth)])
        del system
    return file.report


def with_positions(model: BenchModel, count: int) -> BenchModel:
    """The model with at least so many positions."""
    positions = max(count, model.config.max_position_embeddings)
    return replace(model, config=replace(model.config, max_position_embeddings=positions))


def _prompt_row(system: EngineSystem, input_len: int, num_iters: int, num_iters_warmup: int) -> SweepRow:
    model = system.model
    generator = torch.Generator().manual_seed(model.seed)
    system.engine = None
    reset_memory(model.device)  # of the cache before the next one is made
    system.prepare(torch.randint(model.config.vocab_size, (1, input_len), generator=generator), 2)
    times = [milliseconds(system.prefill, model.device) for _ in range(1 + num_iters_warmup + num_iters)]
    ttft = Percentiles.of(times[1 + num_iters_warmup :]).p50  # the first one compiles
    return SweepRow(model.keep_ratio, model.structure, input_len=input_len, ttft_ms=ttft)


@torch.inference_mode()
def _context_row(
    system: EngineSystem, context_len: int, num_iters: int, num_iters_warmup: int, bandwidth: float
) -> SweepRow:
    from ..engine.decode_graphs import DecodeGraphs
    from ..engine.graph import DecodeGraph
    from ..model.packed_decoder import PackedDecoder

    model, decoder = system.model, system.decoder
    assert isinstance(decoder, PackedDecoder)
    blocks = blocks_for(context_len + ROOM)
    kv_cache = allocate_kv_cache(model.config, blocks + 1, model.dtype, model.device)
    generator = torch.Generator(model.device).manual_seed(model.seed)
    for layer in kv_cache:
        for tensor in layer:
            tensor.normal_(generator=generator)
    state = decoder.decode_state(1, blocks, blocks)
    graphs = DecodeGraphs([DecodeGraph(decoder, kv_cache, state, idle_block=blocks)])

    def window() -> None:
        sequence = filled_sequence(context_len, blocks)
        for _ in range(WINDOW_STEPS):
            sequence.token_ids += graphs.step([sequence], following=[sequence])

    times = [milliseconds(window, model.device) / WINDOW_STEPS for _ in range(num_iters_warmup + num_iters)]
    tpot = Percentiles.of(times[num_iters_warmup:])
    bytes_per_step = model_step_bytes(model, context_len + WINDOW_STEPS // 2, 1)
    return SweepRow(
        model.keep_ratio,
        model.structure,
        context_len=context_len,
        tpot_ms_p20=tpot.p20,
        tpot_ms_p50=tpot.p50,
        tpot_ms_p80=tpot.p80,
        bytes_per_step=bytes_per_step,
        mbu=bytes_per_step / (tpot.p50 * 1e-3) / bandwidth,
    )


def filled_sequence(context_len: int, blocks: int) -> TokenSequence:
    """A sequence of `context_len` tokens, the last of which waits for its step, in blocks 0, 1, 2, ..."""
    params = SamplingParams(temperature=0, max_tokens=ROOM, ignore_eos=True)
    sequence = TokenSequence("sweep", 0, [0] * context_len, params, frozenset(), ROOM, seed=0)
    sequence.block_table = list(range(blocks))
    return sequence
