"""Every op has a test and a benchmark of its name, and what a benchmark times computes what its reference does."""

import ast
import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

import thinrank.kernels

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks" / "kernels"

#: What benchmark files share.
SHARED = {"harness", "layer"}


def launches(path: Path) -> bool:
    """Whether a file launches a kernel: `kernel[grid](...)`."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return any(isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) for node in nodes)


OPS = sorted(path.stem for path in Path(thinrank.kernels.__file__).parent.glob("*.py") if launches(path))


def test_every_op_has_a_test_and_every_benchmark_an_op():
    tests = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    assert "norm_project" in OPS
    assert not set(OPS) - tests
    assert {path.stem for path in BENCHMARKS.glob("*.py")} - SHARED == set(OPS)


@pytest.mark.parametrize("op", OPS)
def test_benchmarks_time_what_the_reference_computes(op, monkeypatch):
    """At small sizes, in 16 bits.

    Tolerance: a result that is rounded once differs by one unit in the last place, 2^-7 (bfloat16) or 2^-10
    (float16) of the largest at most; attention rounds its weights of the values, too.
    """
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    try:
        benchmark, harness = importlib.import_module(op), importlib.import_module("harness")
        assert benchmark.SIZES and benchmark.SMALL
        cases = [case for size in benchmark.SMALL for case in benchmark.cases(*size)]
        assert op in {case.name.split()[0].rstrip(":") for case in cases}
        for case in cases:
            assert case.nbytes or case.flops
            assert case.outputs or case.in_parts
            assert case.error() <= (2**-6 if harness.DEVICE.type == "cuda" else 2**-9), case.name
    finally:
        for name in set(sys.modules) - before:  # their names say nothing to other tests
            if (
                getattr(sys.modules[name], "__file__", None)
                and Path(sys.modules[name].__file__).parent == BENCHMARKS
            ):
                del sys.modules[name]
