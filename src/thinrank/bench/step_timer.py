"""How long a decode step of a few layers takes, with any launch settings. Imports triton.

One CUDA graph a trial, so that a launch is judged among its neighbours: what it loads before it may start, and what it
leaves to the next one, count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..engine.graph import capture
from ..engine.kv_cache import allocate_kv_cache, blocks_for
from ..kernels.compilation import compile_kernels
from ..kernels.tuning import GemvConfig, Launch, LaunchSettings
from ..model.batch import KVLayer
from ..model.packed_decoder import DecodeState, PackedDecoder
from .timing import Percentiles

#: Tokens of context in a trial's first step, unless told otherwise.
CONTEXT = 512
#: Steps that are timed together: an event waits for its launch, which would be 5 us a step.
STEPS = 8
#: Weights of the timed layers together: several times the 50 MB of an H200's L2 cache.
ENOUGH_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Recorder(LaunchSettings):
    """Settings that note what they are asked for."""

    launches: list[Launch] = field(default_factory=list)

    def config(self, launch: Launch) -> GemvConfig:
        self.launches.append(launch)
        return super().config(launch)


def enough_layers(decoder: PackedDecoder) -> int:
    """So many layers that each step reads its weights from memory, and four at least, if the model has them."""
    total = 0
    for count, layer in enumerate(decoder.layers, start=1):
        for packed in (layer.qkv, layer.o, layer.gate_up, layer.down):
            total += sum(matrix.rows * matrix.width for matrix in (*packed.inputs, *packed.outputs))
        if count >= 4 and total * decoder.dtype.itemsize >= ENOUGH_BYTES:
            return count
    return len(decoder.layers)


class StepTimer:
    """Times a decode step of the first `num_layers` layers and the head, at several batch sizes."""

    def __init__(
        self, decoder: PackedDecoder, num_layers: int, batch_sizes: Sequence[int], context: int = CONTEXT
    ):
        self.decoder, self.num_layers = replace(decoder, layers=decoder.layers[:num_layers]), num_layers
        self._context = context
        blocks = blocks_for(context + STEPS)
        self._cases: list[tuple[DecodeState, list[KVLayer]]] = []
        for batch_size in batch_sizes:
            config = replace(decoder.config, num_hidden_layers=num_layers)
            cache = allocate_kv_cache(config, batch_size * blocks, decoder.dtype, decoder.device)
            for layer in cache:
                layer.keys.normal_()
                layer.values.normal_()
            state = decoder.decode_state(batch_size, blocks, idle_block=0)
            tables = torch.arange(batch_size * blocks, dtype=torch.int32, device=decoder.device)
            state.block_tables.copy_(tables.view(batch_size, blocks))
            self._cases.append((state, cache))

    def sequence(self) -> list[Launch]:
        """The GEMVs of a step, in the order of their launch."""
        recorder = Recorder()
        replace(self.decoder, launch_settings=recorder).decode_step(*self._cases[0])
        return recorder.launches

    def launches(self) -> list[Launch]:
        """What a step launches, each kind once."""
        return list(dict.fromkeys(self.sequence()))

    def logits(self, settings: LaunchSettings) -> Tensor:
        """float32 [vocab_size] of a step at the first batch size."""
        state, cache = self._cases[0]
        self._rewind(state)
        replace(self.decoder, launch_settings=settings).decode_step(state, cache)
        return state.logits[0].clone()

    def compile(self, settings: Sequence[LaunchSettings]) -> None:
        """Compile what steps with each of these settings launch, several kernels at a time."""

        def launch() -> None:
            for each in settings:
                decoder = replace(self.decoder, launch_settings=each)
                for state, cache in self._cases:
                    decoder.decode_step(state, cache)

        compile_kernels(launch)

    def microseconds(self, settings: LaunchSettings, repeats: int = 11) -> tuple[float, ...]:
        """Median time of a step at each batch size."""
        times = []
        for state, cache in self._cases:
            graph = self._capture(settings, state, cache)
            samples = []
            for _ in range(repeats):
                self._rewind(state)
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for _ in range(STEPS):
                    graph.replay()
                end.record()
                end.synchronize()
                samples.append(1e3 * start.elapsed_time(end) / STEPS)
            times.append(Percentiles.of(samples).p50)
        return tuple(times)

    def kernels(self, settings: LaunchSettings) -> list[tuple[str, float]]:
        """Every kernel of a step at the first batch size, in order: its name, and how many microseconds after the one
        before it it ended, medians of `STEPS` steps under the profiler."""
        state, cache = self._cases[0]
        graph = self._capture(settings, state, cache)
        self._rewind(state)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(STEPS):
                graph.replay()
            torch.cuda.synchronize(self.decoder.device)
        events = sorted(
            (event.time_range.end, event.name)
            for event in profile.events()
            if event.device_type.name == "CUDA"
        )
        count = len(events) // STEPS
        ends = torch.tensor([end for end, _ in events], dtype=torch.float64)
        # The first kernel of all has none before it.
        took = torch.cat([ends.new_full([1], torch.nan), ends.diff()]).view(STEPS, count).nanmedian(0).values
        return [(name, time) for (_, name), time in zip(events[:count], took.tolist(), strict=True)]

    def _capture(
        self, settings: LaunchSettings, state: DecodeState, cache: list[KVLayer]
    ) -> torch.cuda.CUDAGraph:
        decoder = replace(self.decoder, launch_settings=settings)
        self._rewind(state)
        return capture(lambda: decoder.decode_step(state, cache), decoder.device)

    def _rewind(self, state: DecodeState) -> None:
        """To the first step's context, the last token of which the step is for."""
        state.token_ids.fill_(1)
        state.positions.fill_(self._context - 1)
        state.context_lens.fill_(self._context)
