"""Kernels compiled ahead of their launch, on a machine without a GPU: in a process without Triton's interpreter."""

import os

import pytest

pytest.importorskip("triton")

from thinrank.kernels.compilation import compile_kernels
from without_interpreter import run_script

pytestmark = pytest.mark.slow  # some seconds


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What `compile_ahead.py` prints."""
    [printed] = run_script("compile_ahead.py", tmp_path_factory.mktemp("triton"), ())
    return printed


def test_what_is_launched_is_compiled_and_does_not_run(found):
    """Two kernels, one of them launched twice; a launch would need a driver. A second pass has nothing to do."""
    assert found["compiled"] == [2, 2]
    assert found["launched"] == 0


def test_several_are_compiled_at_a_time(found):
    assert found["threads"] == min(2, os.cpu_count() or 1)


def test_errors_are_raised_and_leave_nothing_behind(found):
    """The compiler's, and those of what launches. Kernels can be launched and compiled ahead afterwards."""
    assert found["errors"] == ["CompileTimeAssertionFailure", "ZeroDivisionError"]
    assert found["as_before"] and found["compiled_after_errors"] == 3


def test_launches_of_other_threads_run(found):
    assert found["warmup"] == {"mine": True, "other": False}


def test_the_interpreter_compiles_nothing(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    compile_kernels(lambda: pytest.fail("it would run"))
