"""GET /stats: the running engine in numbers, for people who watch it. Prometheus has /metrics."""

from __future__ import annotations

from time import monotonic

import torch
from pydantic import BaseModel

from ..bench.timing import read_bandwidth
from ..config import BLOCK_SIZE
from ..device import device_memory
from ..llm import LLM
from ..model.cost import decode_step_bytes, kv_cache_bytes, weight_bytes
from .pace import Pace

#: Bytes that must be free to measure the bandwidth: what fits into a cache reads faster than memory.
_MIN_FREE = 2**30


class Stats(BaseModel):
    """num_... are counts of now; prompt_tokens to decode_seconds count from the engine's start, so that two answers
    give what happened in between.

    time: seconds of a clock that only this server knows. decode_steps, decode_seconds: steps that processed no prompt,
    and the time that they took. decode_step_bytes: what such a step must read, with the contexts of now: every weight
    once, and the keys and values of all sequences. read_bandwidth: bytes a second, measured when the server started;
    null on a CPU. kv_cache_usage: share of the blocks that sequences hold. device_memory...: bytes of a GPU, its other
    users included; null on a CPU.
    """

    device: str
    dtype: str
    time: float
    num_requests_running: int
    num_requests_waiting: int
    prompt_tokens: int
    generation_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_preemptions: int
    decode_steps: int
    decode_seconds: float
    decode_step_bytes: int
    read_bandwidth: float | None
    weight_bytes: int
    kv_cache_bytes: int
    kv_cache_usage: float
    device_memory_used: int | None
    device_memory_total: int | None


class StatsReader:
    """Measures the bandwidth of a GPU, which must be idle, when it is made: a second or less."""

    def __init__(self, llm: LLM, pace: Pace):
        self._config = llm.config
        self._engine = llm.engine
        self._pace = pace
        self._device = llm.engine.decoder.device
        self._dtype = llm.engine.decoder.dtype
        self._on_gpu = self._device.type == "cuda"
        self._name = torch.cuda.get_device_name(self._device) if self._on_gpu else "cpu"
        self._read_bandwidth = _measured_bandwidth(self._device)

    def read(self) -> Stats:
        stats = self._engine.stats()
        decode = self._pace.decode
        # A copy, because the engine's thread changes the list.
        context_lens = [sequence.num_computed for sequence in list(self._engine.scheduler.running)]
        itemsize = self._dtype.itemsize
        free, total = device_memory(self._device) if self._on_gpu else (None, None)
        return Stats(
            device=self._name,
            dtype=str(self._dtype).removeprefix("torch."),
            time=monotonic(),
            num_requests_running=stats.num_running,
            num_requests_waiting=stats.num_waiting,
            prompt_tokens=stats.prompt_tokens,
            generation_tokens=stats.generation_tokens,
            prefix_cache_queries=stats.prefix_cache_queries,
            prefix_cache_hits=stats.prefix_cache_hits,
            num_preemptions=stats.num_preemptions,
            decode_steps=decode.steps,
            decode_seconds=decode.seconds,
            decode_step_bytes=decode_step_bytes(self._config, itemsize, context_lens),
            read_bandwidth=self._read_bandwidth,
            weight_bytes=weight_bytes(self._config, itemsize),
            kv_cache_bytes=kv_cache_bytes(self._config, itemsize, self._engine.pool.num_blocks * BLOCK_SIZE),
            kv_cache_usage=stats.kv_cache_usage,
            device_memory_used=None if free is None or total is None else total - free,
            device_memory_total=total,
        )


def _measured_bandwidth(device: torch.device) -> float | None:
    """None on a CPU, and where too little memory is free to tell."""
    if device.type != "cuda" or device_memory(device)[0] < _MIN_FREE:
        return None
    bandwidth = read_bandwidth(device, iterations=3)
    torch.cuda.empty_cache()  # of what it read
    return bandwidth
