"""Writing: streamed shards, the rename at the end, and what is left behind when something goes wrong."""

import errno
import json
import threading

import pytest
import torch
from safetensors.torch import load_file

from thinrank.checkpoint import save
from thinrank.checkpoint.claim import claimed, in_turn
from thinrank.checkpoint.save import save_checkpoint
from thinrank.checkpoint.tensors import LazyTensor
from thinrank.errors import OutputError

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def some_tensors():
    return {f"t{i}": (torch.randn(3 + i, 7) * 9).to(dtype) for i, dtype in enumerate(DTYPES)} | {
        "empty": torch.empty(0),
        "scalar": torch.tensor(2.5),
        "transposed": torch.randn(5, 4).T,
    }


def lazy(tensors):
    return {name: LazyTensor.of(tensor) for name, tensor in tensors.items()}


def test_what_is_written_is_what_safetensors_reads(tmp_path):
    tensors = some_tensors()
    save_checkpoint(tmp_path / "out", {"a": 1}, lazy(tensors), {"tokenizer.json": b"{}"}, progress=False)
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"a": 1}
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == b"{}"


def test_large_checkpoints_are_sharded(tmp_path):
    tensors = {f"t{i}": torch.randn(10) for i in range(7)}
    save_checkpoint(tmp_path / "out", {}, lazy(tensors), {}, max_shard_bytes=100, progress=False)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 7 * 40
    assert sorted(set(index["weight_map"].values())) == [
        f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)
    ]
    for name, tensor in tensors.items():
        assert torch.equal(load_file(tmp_path / "out" / index["weight_map"][name])[name], tensor)


def test_one_tensor_is_in_memory_at_a_time(tmp_path):
    alive = []

    def reader(number):
        def read():
            assert all(reference() is None for reference in alive), "an earlier tensor is still held"
            tensor = torch.full((1000,), float(number))
            import weakref

            alive.append(weakref.ref(tensor))
            return tensor

        return read

    tensors = {f"t{i}": LazyTensor((1000,), torch.float32, reader(i)) for i in range(5)}
    save_checkpoint(tmp_path / "out", {}, tensors, {}, progress=False)
    assert len(alive) == 5


def leftovers(folder):
    return sorted(path.name for path in folder.iterdir())


def test_nothing_is_overwritten_without_force(tmp_path):
    save_checkpoint(tmp_path / "out", {"old": 1}, {}, {}, progress=False)
    with pytest.raises(OutputError, match="exists already"):
        save_checkpoint(tmp_path / "out", {"new": 1}, {}, {}, progress=False)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"old": 1}
    save_checkpoint(tmp_path / "out", {"new": 1}, {}, {}, force=True, progress=False)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"new": 1}
    assert leftovers(tmp_path) == ["out"]


@pytest.mark.parametrize("make", [lambda p: (p.mkdir(), (p / "thesis.txt").touch()), lambda p: p.touch()])
def test_force_replaces_checkpoints_only(make, tmp_path):
    make(tmp_path / "out")
    with pytest.raises(OutputError, match="no checkpoint"):
        save_checkpoint(tmp_path / "out", {}, {}, {}, force=True, progress=False)
    assert leftovers(tmp_path) == ["out"]


@pytest.mark.parametrize("existing", [False, True])
def test_a_failure_in_the_middle_leaves_the_old_result(existing, tmp_path):
    if existing:
        save_checkpoint(tmp_path / "out", {"old": 1}, {}, {}, progress=False)

    def disk_full():
        raise OSError(errno.ENOSPC, "No space left on device")

    tensors = lazy({"a": torch.zeros(4)}) | {"b": LazyTensor((4,), torch.float32, disk_full)}
    with pytest.raises(OutputError, match="disk filled up"):
        save_checkpoint(tmp_path / "out", {"new": 1}, tensors, {}, force=True, progress=False)
    assert leftovers(tmp_path) == (["out"] if existing else [])
    if existing:
        assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"old": 1}


def test_too_small_a_disk_is_noticed_before_writing(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(save.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OutputError, match="needs"):
        save_checkpoint(tmp_path / "out", {}, lazy({"a": torch.zeros(4)}), {}, progress=False)
    assert leftovers(tmp_path) == []


def test_a_killed_run_does_not_stand_in_the_way(tmp_path):
    (tmp_path / ".out.incomplete").mkdir()
    (tmp_path / ".out.incomplete" / "model.safetensors").write_bytes(b"half")
    save_checkpoint(tmp_path / "out", {}, lazy({"a": torch.zeros(4)}), {}, progress=False)
    assert leftovers(tmp_path) == ["out"]


def test_two_processes_do_not_write_one_checkpoint(tmp_path):
    with claimed(tmp_path / ".out.incomplete") as is_ours:  # as another process does
        assert is_ours
        (tmp_path / ".out.incomplete" / "model.safetensors").write_bytes(b"half")
        with pytest.raises(OutputError, match="another process is writing"):
            save_checkpoint(tmp_path / "out", {}, lazy({"a": torch.zeros(4)}), {}, progress=False)
        assert (tmp_path / ".out.incomplete" / "model.safetensors").read_bytes() == b"half"
    save_checkpoint(tmp_path / "out", {}, lazy({"a": torch.zeros(4)}), {}, progress=False)
    assert leftovers(tmp_path) == ["out"]


def test_a_folder_that_was_renamed_meanwhile_is_not_claimed(tmp_path, monkeypatch):
    def late(descriptor, operation):
        (tmp_path / "folder").rename(tmp_path / "finished")

    monkeypatch.setattr("thinrank.checkpoint.claim.fcntl.flock", late)
    with claimed(tmp_path / "folder") as is_ours:
        assert not is_ours


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(code, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(code, "no locks here")

    monkeypatch.setattr("thinrank.checkpoint.claim.fcntl.flock", refuse)
    save_checkpoint(tmp_path / "out", {}, lazy({"a": torch.zeros(4)}), {}, progress=False)
    assert leftovers(tmp_path) == ["out"]


def test_a_turn_comes_when_the_other_is_done(tmp_path):
    order, entered = [], threading.Event()

    def second():
        entered.set()
        with in_turn(tmp_path):
            order.append("second")

    with in_turn(tmp_path):
        thread = threading.Thread(target=second)
        thread.start()
        entered.wait()
        thread.join(0.1)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
