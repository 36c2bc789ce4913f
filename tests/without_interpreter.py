"""Runs scripts of tests/kernels in processes without Triton's interpreter, which takes what the compiler refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "kernels"


def run_script(name: str, cache: Path, *runs: tuple[Any, ...]) -> list[Any]:
    """What the script prints, JSON a line, run at the same time with each of these arguments; kernels go to `cache`."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPTS / name), *map(str, arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for arguments in runs
    ]  # fmt: skip
    outputs = [process.communicate() for process in processes]
    for process, (_, stderr) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, stderr
    return [json.loads(line) for stdout, _ in outputs for line in stdout.splitlines()]
