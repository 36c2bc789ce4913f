"""A compression that is killed and started again writes the same bytes as an unbroken one."""

import errno
import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from thinrank import ThinrankError, compress
from thinrank.checkpoint.save import resumable_folder
from thinrank.compression import ALLOCATIONS
from thinrank.compression.methods import METHODS
from thinrank.compression.ranks import uniform
from thinrank.compression.store import HiddenStates
from tiny_text_models import dense_model

#: Runs compress and dies, as by SIGKILL, when the so many-th intermediate file or stage becomes complete.
KILLED = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from thinrank import compress
count, limit = 0, int(sys.argv[4])
replace = Path.replace
def counted(self, target):
    global count
    count += 1
    if count > limit:
        os.kill(os.getpid(), signal.SIGKILL)
    return replace(self, target)
Path.replace = counted
compress(sys.argv[1], sys.argv[2], keep_ratio=0.6, allocate="loss", update=True, calibration_text=sys.argv[3],
    calibration_samples=8, calibration_length=32, device="cpu", progress=False)
"""


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def interrupted(*_):
    raise KeyboardInterrupt


def run(folder, destination, text, limit):
    command = [sys.executable, "-c", KILLED, str(folder), str(destination), str(text), str(limit)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_killed_at_any_file_and_resumed(tmp_path, text_file):
    _, folder = dense_model(tmp_path)
    done = run(folder, tmp_path / "unbroken", text_file, 10**6)
    assert done.returncode == 0, done.stderr
    work = tmp_path / ".broken.work"
    for limit in (1, 2, 3, 8, 20, 3, 2):  # each run gets so much further than the one before it
        assert run(folder, tmp_path / "broken", text_file, limit).returncode == -signal.SIGKILL
        assert work.is_dir() and not (tmp_path / "broken").exists()
    last = run(folder, tmp_path / "broken", text_file, 10**6)
    assert last.returncode == 0, last.stderr
    assert digests(tmp_path / "broken") == digests(tmp_path / "unbroken")
    assert not work.exists()


@pytest.mark.slow
def test_killed_at_a_random_moment(tmp_path, text_file):
    _, folder = dense_model(tmp_path)
    assert run(folder, tmp_path / "unbroken", text_file, 10**6).returncode == 0
    command = [sys.executable, "-c", KILLED, str(folder), str(tmp_path / "broken"), str(text_file), "1000000"]
    with subprocess.Popen(command) as process:
        while process.poll() is None and not list(tmp_path.glob(".broken.work/spectra-*/*")):
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    assert run(folder, tmp_path / "broken", text_file, 10**6).returncode == 0
    assert digests(tmp_path / "broken") == digests(tmp_path / "unbroken")


#: For every method: an unbroken run, one that is killed at every sixth file that becomes complete, and one that is
#: killed at two moments between. A fork a run, for importing takes longer than compressing.
FORKED = """
import os, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
import thinrank.text
from thinrank import compress
folder, root, text = map(Path, sys.argv[1:4])
replace = Path.replace
def run(method, name, files=10**6, seconds=None):
    child = os.fork()
    if child == 0:
        count = 0
        def counted(self, target):
            nonlocal count
            count += 1
            if count > files:
                os.kill(os.getpid(), signal.SIGKILL)
            return replace(self, target)
        Path.replace = counted
        own = {"steps": 2} if method == "dobi-svd" else {}
        try:
            compress(folder, root / f"{method}-{name}", method=method, keep_ratio=0.6, calibration_text=text,
                calibration_samples=8, calibration_length=32, device="cpu", progress=False, **own)
            os._exit(0)
        finally:
            os._exit(1)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]
for method in sys.argv[4:]:
    begin = time.monotonic()
    assert run(method, "unbroken") == 0
    duration = time.monotonic() - begin
    kills = 0
    while (status := run(method, "counted", files=6)) == signal.SIGKILL:
        kills += 1
    assert status == 0 and kills >= 2, (method, status, kills)
    for share in (0.6, 0.3):
        run(method, "timed", seconds=share * duration)
    assert run(method, "timed") in (0, 256)  # it may have been done before its time
"""


@pytest.mark.slow
def test_every_method_is_killed_and_goes_on(tmp_path, text_file):
    _, folder = dense_model(tmp_path)
    command = [sys.executable, "-c", FORKED, str(folder), str(tmp_path), str(text_file), *METHODS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for method in METHODS:
        expected = digests(tmp_path / f"{method}-unbroken")
        assert digests(tmp_path / f"{method}-counted") == expected, method
        assert digests(tmp_path / f"{method}-timed") == expected, method
    assert not list(tmp_path.glob(".*.work"))


def test_killed_between_two_ratios(tmp_path, calibrated, monkeypatch):
    """What the killed run has written is written again; what was there before is not touched."""
    _, folder = dense_model(tmp_path)
    ratios = [0.5, 0.9]
    compress(folder, tmp_path / "whole-{keep_ratio}", keep_ratio=ratios, **calibrated)
    with monkeypatch.context() as patch:
        calls = []

        def interrupt(problem):
            calls.append(problem)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return uniform(problem)

        patch.setitem(ALLOCATIONS, "uniform", interrupt)
        with pytest.raises(KeyboardInterrupt):
            compress(folder, tmp_path / "r-{keep_ratio}", keep_ratio=ratios, allocate="uniform", **calibrated)
    assert (tmp_path / "r-0.5").exists() and not (tmp_path / "r-0.9").exists()
    with pytest.raises(ThinrankError, match="exists already"):  # other options
        compress(folder, tmp_path / "r-{keep_ratio}", keep_ratio=ratios, method="svd", **calibrated)
    compress(folder, tmp_path / "r-{keep_ratio}", keep_ratio=ratios, allocate="uniform", **calibrated)
    for ratio in ratios:
        assert digests(tmp_path / f"r-{ratio}") == digests(tmp_path / f"whole-{ratio}")
    with pytest.raises(ThinrankError, match="exists already"):  # finished
        compress(folder, tmp_path / "r-{keep_ratio}", keep_ratio=ratios, allocate="uniform", **calibrated)


def test_finished_statistics_are_not_collected_again(tmp_path, calibrated, monkeypatch):
    _, folder = dense_model(tmp_path)
    options = calibrated | {"statistics": tmp_path / "kept"}
    compress(folder, tmp_path / "first", keep_ratio=0.5, **options)

    def never(*_):
        raise AssertionError("collected again")

    monkeypatch.setattr("thinrank.compression.statistics._observe", never)
    compress(folder, tmp_path / "second", keep_ratio=0.5, **options)
    compress(folder, tmp_path / "third", keep_ratio=0.7, method="basis-sharing", **options)
    assert digests(tmp_path / "first") == digests(tmp_path / "second")
    with pytest.raises(AssertionError, match="again"):  # other tokens
        compress(folder, tmp_path / "fourth", keep_ratio=0.5, **options | {"calibration_samples": 7})
    weights = folder / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))
    with pytest.raises(AssertionError, match="again"):  # other weights, perhaps
        compress(folder, tmp_path / "fourth", keep_ratio=0.5, **options)


def test_losses_of_ranks_serve_every_ratio(tmp_path, calibrated, monkeypatch):
    _, folder = dense_model(tmp_path)
    options = calibrated | {"allocate": "loss", "statistics": tmp_path / "kept"}
    compress(folder, tmp_path / "first", keep_ratio=0.5, **options)

    def never(*_):
        raise AssertionError("computed again")

    monkeypatch.setattr("thinrank.compression.loss_allocation.loss_curve", never)
    compress(folder, tmp_path / "second", keep_ratio=0.7, **options)
    with pytest.raises(AssertionError, match="again"):  # gradients of other tokens
        other = options | {"calibration_samples": 7}
        compress(folder, tmp_path / "third", keep_ratio=0.7, method="svd", **other)


def test_an_interrupted_run_leaves_its_folder_and_a_refused_one_does_not(tmp_path, calibrated, monkeypatch):
    _, folder = dense_model(tmp_path)
    monkeypatch.setattr("thinrank.compression.spectra.spectrum", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compress(folder, tmp_path / "out", keep_ratio=0.5, **calibrated)
    assert list((tmp_path / ".out.work").glob("statistics-*/layer-*"))
    monkeypatch.undo()
    compress(folder, tmp_path / "out", keep_ratio=0.5, **calibrated)
    assert not (tmp_path / ".out.work").exists()


@pytest.mark.parametrize("file", [1, 3, 8, 20])
def test_a_disk_that_fills_up_costs_nothing_that_was_done(file, tmp_path, calibrated, monkeypatch):
    """Whichever file does not fit: one line, nothing half-written, and the next run goes on to the same bytes."""
    _, folder = dense_model(tmp_path)
    options = calibrated | {"keep_ratio": 0.6, "allocate": "loss", "update": True}
    compress(folder, tmp_path / "whole", **options)
    replace, count = Path.replace, 0

    def full(self, target):
        nonlocal count
        count += 1
        if count >= file:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(ThinrankError, match=r"disk filled up.*what is done stays in .*/\.out\.work"):
            compress(folder, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    compress(folder, tmp_path / "out", **options)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
    assert not (tmp_path / ".out.work").exists()


def test_a_mistake_costs_nothing_that_a_killed_run_has_done(tmp_path, calibrated, monkeypatch):
    _, folder = dense_model(tmp_path)
    monkeypatch.setattr("thinrank.compression.spectra.spectrum", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compress(folder, tmp_path / "out", keep_ratio=0.5, **calibrated)
    monkeypatch.undo()
    done = sorted((tmp_path / ".out.work").rglob("*"))
    with pytest.raises(ThinrankError, match="no chat template"):
        compress(folder, tmp_path / "out", keep_ratio=0.5, calibration_format="chat", **calibrated)
    assert sorted((tmp_path / ".out.work").rglob("*")) == done


def test_one_process_writes_a_destination(tmp_path, calibrated):
    _, folder = dense_model(tmp_path)
    with resumable_folder(tmp_path / "out") as work:  # as another process has it
        (work / "file").touch()
        with pytest.raises(ThinrankError, match="another process is writing"):
            compress(folder, tmp_path / "out", keep_ratio=0.5, **calibrated)
        assert (work / "file").exists()
    compress(folder, tmp_path / "out", keep_ratio=0.5, **calibrated)


#: Methods at the same moment, all with one folder of statistics.
TOGETHER = """
import os, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
import thinrank.text
from thinrank import compress
folder, root, text = map(Path, sys.argv[1:4])
children = []
for method in sys.argv[4:]:
    child = os.fork()
    if child == 0:
        own = {"steps": 2} if method == "dobi-svd" else {"allocate": "loss", "update": method == "svd-llm"}
        try:
            compress(folder, root / f"{method}-together", method=method, keep_ratio=0.6, calibration_text=text,
                calibration_samples=8, calibration_length=32, device="cpu", progress=False,
                statistics=root / "shared", **own)
            os._exit(0)
        finally:
            os._exit(1)
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0] * len(children)
"""


@pytest.mark.slow
def test_processes_share_statistics(tmp_path, text_file):
    _, folder = dense_model(tmp_path)
    methods = ["svd-llm", "basis-sharing", "dobi-svd"]
    command = [sys.executable, "-c", TOGETHER, str(folder), str(tmp_path), str(text_file), *methods]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("shared/statistics-*"))) == 1
    assert not list(tmp_path.rglob("*.part"))
    options = {"calibration_text": text_file, "calibration_samples": 8, "calibration_length": 32}
    options |= {"device": "cpu", "progress": False, "keep_ratio": 0.6}
    for method in methods:
        own = {"steps": 2} if method == "dobi-svd" else {"allocate": "loss", "update": method == "svd-llm"}
        compress(folder, tmp_path / method, method=method, **own, **options)
        assert digests(tmp_path / f"{method}-together") == digests(tmp_path / method), method


def test_hidden_states_go_on_after_the_last_complete_stage(tmp_path):
    states = HiddenStates(tmp_path, "x", (3, 2))
    assert states.stage is None
    for stage in range(3):
        states.new().fill_(stage)
        states.commit(stage)
    states.new().fill_(9)  # never committed
    again = HiddenStates(tmp_path, "x", (3, 2))
    assert again.stage == 2
    assert again.read(2).eq(2).all()
    assert [path.name for path in tmp_path.glob("*.f32")] == ["x-00002.f32"]
    again.remove()
    assert not list(tmp_path.iterdir())
