"""python compile_ahead.py: compiles kernels ahead for sm_90 with a driver that cannot launch any; prints JSON."""

import json
import sys
import threading
import time
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.errors import TritonError
from triton.runtime import driver
from triton.runtime._async_compile import active_mode
from triton.runtime.jit import JITFunction

from thinrank.kernels.compilation import compile_kernels

TENSOR = torch.empty(64, device="meta")


class NoGpu:
    """Says what to compile for."""

    launched = 0

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def __getattr__(self, name: str) -> Any:
        NoGpu.launched += 1
        raise RuntimeError(f"{name} of a driver is for launches")


@triton.jit
def double(x, SIZE: tl.constexpr):
    columns = tl.arange(0, SIZE)
    tl.store(x + columns, 2 * tl.load(x + columns))


@triton.jit
def broken(x):
    tl.static_assert(False, "as intended")


def compiled() -> int:
    return len(double.device_caches[0][0])


def launch() -> None:
    for size in (64, 128, 64):
        double[(1,)](TENSOR, SIZE=size)


def error_of(run: Any) -> str:
    try:
        compile_kernels(run)
    except (TritonError, ArithmeticError) as error:
        return type(error).__name__
    return "none"


def threads_used() -> int:
    """Threads that compile four kernels that take a while."""
    names, compile_one = set[int](), double.compile

    def slowly(*arguments: Any, **options: Any) -> Any:
        names.add(threading.get_ident())
        time.sleep(0.2)
        return compile_one(*arguments, **options)

    double.compile = slowly
    try:
        compile_kernels(lambda: [double[(1,)](TENSOR, SIZE=size) for size in (256, 512)] and None)
    finally:
        double.compile = compile_one
    return len(names)


def warmups() -> dict[str, bool]:
    """Of launches during a pass, by this thread and by another."""
    seen: dict[int, bool] = {}
    run = JITFunction.run
    JITFunction.run = lambda self, *arguments, **options: seen.update(
        {threading.get_ident(): options["warmup"]}
    )
    other = threading.Thread(target=launch)

    def both() -> None:
        launch()
        other.start()
        other.join()

    try:
        compile_kernels(both)
    finally:
        JITFunction.run = run
    mine = seen.pop(threading.get_ident())
    return {"mine": mine, "other": seen.popitem()[1]}


def main() -> None:
    driver.set_active(NoGpu())
    run = JITFunction.run
    found: dict[str, Any] = {"compiled": []}
    for _ in range(2):
        compile_kernels(launch)
        found["compiled"].append(compiled())
    found["errors"] = [error_of(lambda: broken[(1,)](TENSOR)), error_of(lambda: 1 // 0)]
    found["as_before"] = JITFunction.run is run and active_mode.get() is None
    compile_kernels(lambda: double[(1,)](TENSOR, SIZE=1024))
    found["compiled_after_errors"] = compiled()
    found["threads"] = threads_used()
    found["warmup"] = warmups()
    found["launched"] = NoGpu.launched
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
