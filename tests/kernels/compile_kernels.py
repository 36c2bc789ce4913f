"""python compile_kernels.py SHARE OF: compiles for sm_90 what decoders of real shapes launch; needs no GPU.
python compile_kernels.py count STRUCTURE: how many kernels a decode step of a whole LLaMA-7B compiles, by name.

test_compiles.py runs it, in processes without Triton's interpreter, which takes what the compiler refuses. Decoders of
one layer are built on the meta device, where tensors have a shape and no data. Their launches are recorded instead of
run, and every different kernel is compiled as that launch would: every OF-th of them, from the SHARE-th on. Prints a
line of JSON for each.
"""

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.errors import TritonError
from triton.runtime.jit import JITFunction

from thinrank.bench.shapes import SHAPES, STRUCTURES
from thinrank.checkpoint.format import expected_tensors
from thinrank.engine.kv_cache import allocate_kv_cache
from thinrank.kernels.tuning import SPLIT_OPS, GemvConfig, Launch, LaunchSettings
from thinrank.model.batch import ForwardBatch, PagedContext
from thinrank.model.packed_decoder import PackedDecoder
from thinrank.model.registry import parse_config

META = torch.device("meta")
TARGET = GPUTarget("cuda", 90, 32)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}


class SplitSums(LaunchSettings):
    """The rule's settings, in two splits where an op can be split."""

    def config(self, launch: Launch) -> GemvConfig:
        return super().config(launch)._replace(splits=2 if launch.op in SPLIT_OPS else 1)


def decoder(
    shape: str, structure: str, settings: LaunchSettings | None = None, **changes: Any
) -> PackedDecoder:
    """One layer of a named shape in bfloat16. changes: to its config.json."""
    config = parse_config({**SHAPES[shape], "num_hidden_layers": 1, **changes})
    config = replace(config, ranks=STRUCTURES[structure](config, 0.5, 0)[0])
    shapes = expected_tensors(config)
    packed = PackedDecoder.build(
        config, lambda name: torch.empty(shapes[name], device=META), torch.bfloat16, META, 1024
    )
    return replace(packed, pdl=True, launch_settings=settings or LaunchSettings())


#: What a kernel may be specialised for: grouped heads, dense modules among low-rank ones, biases, norms, windows.
CASES: dict[str, Callable[[], PackedDecoder]] = {
    "low-rank": lambda: decoder("llama-7b", "uniform"),
    "dense, grouped heads": lambda: decoder("llama3-8b", "dense"),
    # Small heads and ranks: a program takes a whole head, and one of 128 takes a minute to compile.
    "q/k norm, window": lambda: decoder(
        "smollm2-135m",
        "uniform",
        model_type="qwen3",
        use_sliding_window=True,
        layer_types=["sliding_attention"],
        sliding_window=40,
    ),
    "bias, mixed, split sums": lambda: decoder("qwen2.5-7b", "mixed", SplitSums()),
}


@torch.no_grad()
def decode(packed: PackedDecoder) -> None:
    """One row, and more than the GEMVs take."""
    for rows in (1, 64):
        state = packed.decode_state(rows, 16, idle_block=0)
        packed.decode_step(state, allocate_kv_cache(packed.config, 4, packed.dtype, META))
    packed.sample_step(state)


@torch.no_grad()
def prefill(packed: PackedDecoder) -> None:
    """Two prompts, the first with history."""
    cache = allocate_kv_cache(packed.config, 4, packed.dtype, META)
    tables = torch.empty(2, 2, dtype=torch.int64, device=META)
    tokens = torch.empty(50, dtype=torch.int64, device=META)
    packed(ForwardBatch(tokens, tokens, (20, 30), PagedContext((70, 30), tables, tokens)), cache)


class Kernel(NamedTuple):
    """A kernel and what a launch specialises it for: as `triton.compile` has it."""

    function: JITFunction
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int], list[list[Any]]]
    options: dict[str, Any]

    @staticmethod
    def of(function: JITFunction, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> "Kernel":
        """By Triton's rules: 1 and None are constants; addresses and numbers are multiples of 16, or not."""
        named = {**dict(zip(function.arg_names, arguments, strict=False)), **keywords}
        options = {key: named.pop(key) for key in list(named) if key not in function.arg_names}
        signature, constants, attributes = {}, {}, {}
        for index, parameter in enumerate(function.params):
            name, value, special = parameter.name, named[parameter.name], not parameter.do_not_specialize
            if parameter.is_constexpr or value is None or (special and type(value) is int and value == 1):
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, float):
                signature[name] = "fp32"
            else:
                is_pointer = isinstance(value, torch.Tensor)
                wide = not is_pointer and value >= 2**31
                number = parameter.annotation_type or ("i64" if wide else "i32")
                signature[name] = POINTERS[value.dtype] if is_pointer else number
                if is_pointer or (special and value % 16 == 0):
                    attributes[(index,)] = [["tt.divisibility", 16]]
        del options["grid"], options["warmup"]
        return Kernel(function, signature, constants, attributes, options)


@contextmanager
def recorded() -> Iterator[list[Kernel]]:
    """What would be launched meanwhile."""
    kernels: list[Kernel] = []
    run = JITFunction.run
    JITFunction.run = lambda self, *arguments, **options: kernels.append(Kernel.of(self, arguments, options))
    try:
        yield kernels
    finally:
        JITFunction.run = run


def different_kernels() -> list[tuple[str, Kernel]]:
    """Each once, with the case that it is from."""
    found: dict[str, tuple[str, Kernel]] = {}
    for case, build in CASES.items():
        with recorded() as kernels:
            packed = build()
            decode(packed)
            prefill(packed)
        for kernel in kernels:
            found.setdefault(repr(kernel), (case, kernel))
    return list(found.values())


@torch.no_grad()
def count_kernels(structure: str) -> Counter[str]:
    """Of a decode step of one row of LLaMA-7B, all layers: kernels that are compiled anew, by name."""
    packed = decoder("llama-7b", structure, num_hidden_layers=SHAPES["llama-7b"]["num_hidden_layers"])
    with recorded() as kernels:
        state = packed.decode_state(1, 16, idle_block=0)
        packed.decode_step(state, allocate_kv_cache(packed.config, 1, packed.dtype, META))
    return Counter(
        kernel.function.__name__ for kernel in {repr(kernel): kernel for kernel in kernels}.values()
    )


def facts(kernel: Kernel) -> dict[str, Any]:
    """Of a compiled kernel: bytes of registers that a thread spills, tensor core instructions, loads by width.

    Of one that the compiler refuses: its message.
    """
    function, signature, constants, attributes, options = kernel
    try:
        source = ASTSource(function, signature, constants, attributes)
        compiled = triton.compile(source, target=TARGET, options=options).asm
    except (TritonError, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    loads = re.findall(r"ld\.global\S*?\.((?:v\d\.)?[bufs]\d+)\s", compiled["ptx"])
    return {
        "error": None,
        "stack": int(re.findall(r"STACK:(\d+)", usage)[0]),
        "registers": int(re.findall(r"REG:(\d+)", usage)[0]),
        "mma": compiled["ptx"].count("mma.sync"),
        "loads": {width: loads.count(width) for width in sorted(set(loads))},
    }


if __name__ == "__main__":
    if sys.argv[1] == "count":
        sys.stdout.write(json.dumps(count_kernels(sys.argv[2])) + "\n")
        sys.exit()
    share, of = map(int, sys.argv[1:])
    for case, kernel in different_kernels()[share::of]:
        line = {"case": case, "kernel": kernel.function.__name__, **facts(kernel)}
        sys.stdout.write(json.dumps(line) + "\n")
