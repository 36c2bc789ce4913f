"""A file is the old one or the new one, whatever happens while it is written."""

import errno
import os
from pathlib import Path

import pytest

from thinrank.whole_file import write_whole


def test_a_file_is_made_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    for text in ("old", "größer"):
        write_whole(path, text)
        assert path.read_bytes() == text.encode()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()], ids=["full", "interrupt"]
)
@pytest.mark.parametrize("where", ["write_text", "replace"])
def test_what_goes_wrong_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException
) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")

    def fail(self: Path, *_: object, **__: object) -> None:
        with self.open("w") as file:
            file.write("ne")
        raise error

    monkeypatch.setattr(Path, where, fail)
    with pytest.raises(type(error)):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path: Path) -> None:
    target, link, device = tmp_path / "target", tmp_path / "link", tmp_path / "device"
    link.symlink_to(target)
    device.symlink_to(os.devnull)
    write_whole(link, "text")
    write_whole(device, "text")
    assert link.is_symlink() and target.read_text() == "text"
    assert Path(os.devnull).is_char_device()
