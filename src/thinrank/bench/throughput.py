"""`throughput`: many streams at a time through one engine, low-rank beside dense, and what a shared prompt saves.

All requests of a run arrive at once, as the engine's own continuous batching takes them. Reached through `add` and
`step` alone; what HTTP adds is measured by `bench serve`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from ..config import BLOCK_SIZE, EngineConfig, SamplingParams
from ..device import resolve_device
from ..engine.engine import Engine
from ..errors import OptionError
from ..model.cost import kv_cache_bytes
from .gate import check_system
from .report import Report, ReportFile, at_least, header
from .shapes import BenchModel, chosen_model, fast_decoder
from .systems import OURS, model_for, selected_systems
from .timing import Nvml, read_bandwidth, reset_memory, synchronize

#: Last tokens of a long prompt that are its own; those before are shared.
OWN_TOKENS = BLOCK_SIZE


@dataclass(frozen=True)
class ThroughputRow:
    """`streams` requests at a time in one engine.

    keep_ratio: share of the layers' linear parameters. input_len, output_len: tokens of each request. cached_len:
    tokens of each prompt that the prefix cache had. ttft_ms: time from the arrival of all to a request's first token;
    tpot_ms: time a token from there to its last one, both the median over requests and iterations. itl_ms_p99: of the
    gaps between two tokens of a request. decode_tokens_per_s: of all streams while all of them decode, the median over
    iterations; None if the first had ended before the last began. output_tokens_per_s: from the arrival to the last
    token, prompts included. The rows of the long prompt have one output token, and None for what needs more.
    """

    system: str
    structure: str
    keep_ratio: float
    streams: int
    input_len: int
    output_len: int
    cached_len: int
    ttft_ms: float
    tpot_ms: float | None = None
    itl_ms_p99: float | None = None
    decode_tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None


def throughput(
    model: str | Path | None = None,
    *,
    shape: str | None = None,
    structure: str = "uniform",
    keep_ratio: float = 0.5,
    streams: Sequence[int] = (1, 8, 32, 64),
    input_len: int = 256,
    output_len: int = 128,
    prefix_len: int = 2048,
    num_iters: int = 3,
    num_iters_warmup: int = 1,
    dtype: str = "auto",
    device: str = "auto",
    seed: int = 0,
    output_json: str | Path | None = None,
    command: str | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Report[ThroughputRow]:
    """Measure one model and its dense shape, each in an engine of its own, greedily.

    model: a checkpoint folder; or else shape: a name of `SHAPES`, with random weights of a `structure` and a
    `keep_ratio`. streams: numbers of requests at a time. prefix_len: tokens of a prompt of which all but `OWN_TOKENS`
    are shared with an earlier one; 0 leaves that out. dtype: "auto" is bfloat16 for a shape and what is stored for a
    checkpoint. output_json: the file to write, after every row. command: for the header. on_progress: told what is
    being done.

    Raises OptionError for an option that is unknown or out of range; ThinrankError when logits differ from the float32
    reference's; OutputError when the file cannot be written; what `load_model` raises for a checkpoint.
    """
    if not streams:
        raise OptionError("there is no number of streams", "name one, or several with commas between them")
    for number in streams:
        at_least(1, streams=number)
    at_least(1, input_len=input_len, num_iters=num_iters)
    at_least(2, output_len=output_len)  # the prefill gives the first one
    at_least(0, num_iters_warmup=num_iters_warmup, seed=seed)
    if prefix_len:
        at_least(BLOCK_SIZE + OWN_TOKENS, prefix_len=prefix_len)
    target = resolve_device(device)
    measured = chosen_model(model, shape, structure, keep_ratio, dtype, target, seed)
    longest = max(input_len + output_len, prefix_len + 1)
    positions = measured.config.max_position_embeddings
    if longest > positions:
        raise OptionError(
            f"a request has up to {longest} tokens, the model has {positions} positions",
            "lower input_len, output_len or prefix_len",
        )
    settings = {"shape": measured.name, "num_iters": num_iters, "num_iters_warmup": num_iters_warmup}
    file = ReportFile[ThroughputRow](
        output_json, header("throughput", measured, Nvml(target), command, **settings)
    )
    names = [name for name in selected_systems(["thinrank-dense"], measured) if name in OURS]
    for name in names:
        for number in sorted({min(streams), max(streams)}):  # few rows and many take different kernels
            on_progress(f"checking {name} x{number}")
            reset_memory(target)
            file.add(checks=check_system(f"{name} x{number}", model_for(name, measured), number))
    reset_memory(target)
    file.header["read_bandwidth_bytes_per_s"] = read_bandwidth(target)
    for name in names:
        reset_memory(target)
        bench = _EngineBench(name, model_for(name, measured), max(streams), input_len + output_len, longest)
        for number in streams:
            on_progress(f"measuring {name} x{number}")
            file.add(rows=[bench.streams(number, input_len, output_len, num_iters, num_iters_warmup)])
        if prefix_len:
            on_progress(f"measuring {name}, a shared prompt of {prefix_len} tokens")
            file.add(rows=bench.shared_prompt(prefix_len, num_iters, num_iters_warmup))
        del bench
    return file.report


@dataclass(frozen=True)
class _Timeline:
    """When the tokens of each request came, in seconds after the arrival of all. cached_len: of any one prompt."""

    times: list[list[float]]
    cached_len: int

    @property
    def first(self) -> list[float]:
        return [each[0] for each in self.times]

    @property
    def per_token(self) -> list[float]:
        return [(each[-1] - each[0]) / (len(each) - 1) for each in self.times]

    @property
    def gaps(self) -> list[float]:
        return [after - before for each in self.times for before, after in pairwise(each)]

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second from when the last request has begun until the first one ends."""
        begin, end = max(self.first), min(each[-1] for each in self.times)
        if begin >= end:
            return None
        return sum(begin < time <= end for each in self.times for time in each) / (end - begin)

    @property
    def output_rate(self) -> float:
        return sum(map(len, self.times)) / max(each[-1] for each in self.times)


class _EngineBench:
    """One engine, and prompts that it has never seen. length: of a stream; longest: of any request."""

    def __init__(self, name: str, model: BenchModel, streams: int, length: int, longest: int):
        memory = max(
            kv_cache_bytes(model.config, model.dtype.itemsize, context_len, batch_size)
            for context_len, batch_size in ((length, streams), (longest, 2))
        )
        config = EngineConfig(kv_cache_memory=memory, max_model_len=longest, max_num_seqs=streams)
        self.engine = Engine(fast_decoder(model), config)
        self.name = name
        self.model = model
        self._generator = torch.Generator().manual_seed(model.seed)
        self._salts = count()

    def streams(
        self, number: int, input_len: int, output_len: int, num_iters: int, num_iters_warmup: int
    ) -> ThroughputRow:
        runs = [
            self._run([self._tokens(input_len) for _ in range(number)], output_len, self._salt())
            for _ in range(num_iters_warmup + num_iters)
        ][num_iters_warmup:]
        rates = [run.decode_rate for run in runs if run.decode_rate is not None]
        gaps = torch.tensor([gap for run in runs for gap in run.gaps], dtype=torch.float64)
        return self._row(
            number,
            input_len,
            output_len,
            runs,
            tpot_ms=1e3 * median(_all(run.per_token for run in runs)),
            itl_ms_p99=1e3 * float(gaps.quantile(0.99)),
            decode_tokens_per_s=median(rates) if rates else None,
            output_tokens_per_s=median(run.output_rate for run in runs),
        )

    def shared_prompt(self, prefix_len: int, num_iters: int, num_iters_warmup: int) -> list[ThroughputRow]:
        """A prompt that nobody had, and one that shares all but its end with it."""
        cold: list[_Timeline] = []
        hit: list[_Timeline] = []
        for _ in range(num_iters_warmup + num_iters):
            shared, salt = self._tokens(prefix_len - OWN_TOKENS), self._salt()
            for runs in (cold, hit):
                runs.append(self._run([shared + self._tokens(OWN_TOKENS)], 1, salt))
        return [self._row(1, prefix_len, 1, runs[num_iters_warmup:]) for runs in (cold, hit)]

    def _row(
        self, streams: int, input_len: int, output_len: int, runs: list[_Timeline], **more: float | None
    ) -> ThroughputRow:
        return ThroughputRow(
            self.name,
            self.model.structure,
            self.model.keep_ratio,
            streams,
            input_len,
            output_len,
            runs[0].cached_len,
            1e3 * median(_all(run.first for run in runs)),
            **more,
        )

    def _run(self, prompts: list[list[int]], output_len: int, salt: str) -> _Timeline:
        engine = self.engine
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        synchronize(self.model.device)
        started = perf_counter()
        times: dict[str, list[float]] = {
            engine.add(prompt, params, cache_salt=salt): [] for prompt in prompts
        }
        cached_len = 0
        while engine.has_unfinished:
            tokens = engine.step()
            now = perf_counter() - started
            for token in tokens:
                times[token.request_id].append(now)
                cached_len = token.metrics.num_cached_tokens if token.metrics else 0
        return _Timeline(list(times.values()), cached_len)

    def _tokens(self, length: int) -> list[int]:
        ids: list[int] = torch.randint(
            self.model.config.vocab_size, (length,), generator=self._generator
        ).tolist()
        return ids

    def _salt(self) -> str:
        """Of its own for every run: nothing is shared with another."""
        return str(next(self._salts))


def _all(lists: Iterator[list[float]]) -> list[float]:
    return [value for each in lists for value in each]
