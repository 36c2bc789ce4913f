"""Every kernel compiles for sm_90, and those that stream weights or the cache have what makes them fast. No GPU needed.

All other tests of kernels run in Triton's interpreter where there is no GPU, and it takes what the compiler refuses.
"""

import ast
from pathlib import Path

import pytest

pytest.importorskip("triton")

import thinrank.kernels
from without_interpreter import run_script

SCRIPT = "compile_kernels.py"
PROCESSES = 2

GEMVS = {"_norm_project_kernel", "_project_kernel", "_project_rope_kernel", "_project_silu_mul_kernel"}
STREAMING = {*GEMVS, "_decode_kernel"}

pytestmark = pytest.mark.slow  # half a minute on two cores


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What `compile_kernels.py` says of each kernel."""
    shares = ((share, PROCESSES) for share in range(PROCESSES))
    return run_script(SCRIPT, tmp_path_factory.mktemp("triton"), *shares)


def launched_kernels():
    """Names of all that the package launches: `kernel[grid](...)`."""
    names = set()
    for path in Path(thinrank.kernels.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                names.add(ast.unparse(node.func.value))
    return names


def test_every_kernel_compiles(compiled):
    errors = {f"{entry['case']}: {entry['kernel']}": entry["error"] for entry in compiled if entry["error"]}
    assert not errors, "\n\n".join(f"{where}\n{error}" for where, error in errors.items())


def test_no_kernel_is_left_out(compiled):
    """A new one needs a case in `compile_kernels.py`."""
    assert {entry["kernel"] for entry in compiled} == launched_kernels()


def test_streaming_kernels_keep_all_in_registers(compiled):
    """The rule's settings leave room for all tiles that are under way."""
    found = [entry for entry in compiled if entry["kernel"] in STREAMING and not entry["error"]]
    assert {entry["kernel"] for entry in found} == STREAMING
    assert not [entry for entry in found if entry["stack"]]


def test_streaming_kernels_load_16_bytes_at_a_time(compiled):
    """An input that may lie anywhere makes the compiler load number by number, and so does a narrow row."""
    for entry in compiled:
        if entry["kernel"] in STREAMING and not entry["error"]:
            wide = entry["loads"].get("v4.b32", 0)
            others = {width: count for width, count in entry["loads"].items() if width != "v4.b32"}
            assert wide > sum(others.values()), entry
            assert all(width.endswith(("32", "64")) for width in others), entry


def test_gemvs_multiply_on_tensor_cores(compiled):
    assert all(entry["mma"] for entry in compiled if entry["kernel"] in GEMVS and not entry["error"])


def test_ranks_that_differ_compile_few_kernels(tmp_path):
    """A first start compiles them all: 27 when numbers of rows were told apart by whether they are multiples of 16;
    now only what a launch has (table or rule) and whether its rounds come out even counts."""
    uniform, hetero = run_script(SCRIPT, tmp_path, ("count", "uniform"), ("count", "hetero"))
    assert hetero["_norm_project_kernel"] <= uniform["_norm_project_kernel"]
    assert sum(hetero.values()) <= sum(uniform.values()) + 6
