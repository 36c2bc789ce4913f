"""Compiling kernels before their first launch, several at a time. Imports triton."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextvars import copy_context
from typing import Any

from tqdm import tqdm
from triton import AsyncCompileMode, knobs
from triton.runtime.jit import JITFunction

#: Kernels that are compiled at a time, at most: a compiler holds Python's lock for a quarter of its time.
MAX_THREADS = 8


def compile_kernels(launch: Callable[[], None]) -> None:
    """Compile the kernels that `launch` launches and this process has not yet; none of them runs.

    Launched as usual, each is compiled before the next one is known: 19 kernels of LLaMA-7B take 35 s, and 17 in two
    threads. Raises what the compiler raises.
    """
    if knobs.runtime.interpret:
        return  # it compiles nothing
    # In a context of its own: AsyncCompileMode of Triton 3.6 stays active after an error.
    copy_context().run(_compile, launch)


def _compile(launch: Callable[[], None]) -> None:
    run, thread = JITFunction.run, threading.get_ident()

    def compile_only(self: Any, *arguments: Any, **options: Any) -> Any:
        if threading.get_ident() == thread:  # what others launch meanwhile runs
            options["warmup"] = True
        return run(self, *arguments, **options)

    workers = min(MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as threads, AsyncCompileMode(threads) as mode:
        JITFunction.run = compile_only
        try:
            launch()
        finally:
            JITFunction.run = run
        # For a person who waits: on a terminal only, and not for kernels that are read from Triton's cache.
        waiting, total = as_completed(mode.raw_futures), len(mode.raw_futures)
        for _ in tqdm(waiting, "Compiling", total, unit="kernel", leave=False, delay=1, disable=None):
            pass
