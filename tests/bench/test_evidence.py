"""What benchmarks/evidence.py would run on a GPU is what the library takes."""

import inspect
import runpy
from pathlib import Path

import pytest

from thinrank.bench.shapes import SHAPES, STRUCTURES
from thinrank.bench.systems import BASELINES

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "evidence.py"
RUNS = runpy.run_path(str(SCRIPT))["runs"]()


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_what_the_library_takes(name: str) -> None:
    run, arguments = RUNS[name]
    inspect.signature(run).bind(**arguments, output_json=None, command=None, on_progress=print)
    assert arguments["shape"] in SHAPES
    assert arguments.get("structure", "uniform") in STRUCTURES
    assert set(arguments.get("baseline", [])) <= set(BASELINES)
