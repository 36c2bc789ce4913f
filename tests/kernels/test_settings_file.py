"""Tables of launch settings as files: round trip, which file holds, and every way to be damaged."""

import json
from pathlib import Path

import pytest
import torch

from thinrank.device import cache_folder
from thinrank.errors import OutputError, ThinrankError
from thinrank.kernels import settings_file
from thinrank.kernels.settings_file import read_settings, settings_for, user_file, write_settings
from thinrank.kernels.tuning import GemvConfig, Launch, LaunchSettings

CARD = "NVIDIA H200"
SETTINGS = LaunchSettings(
    {
        Launch("project", 1024, 4096): GemvConfig(16, 4, 8, 2),
        Launch("project_rope", 12288, 1024, 576): GemvConfig(2, 4),
    },
    "somewhere",
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "thinrank" / "launch_settings"


@pytest.fixture
def card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: CARD)
    return torch.device("cuda")


def test_round_trip(tmp_path):
    path = tmp_path / "new" / "folder" / "table.json"
    write_settings(path, CARD, SETTINGS)
    settings = read_settings(path, CARD)
    assert settings.entries == SETTINGS.entries
    assert settings.source == str(path)
    write_settings(path, CARD, LaunchSettings())
    assert read_settings(path, CARD).entries == {}
    assert [file.name for file in path.parent.iterdir()] == ["table.json"]


def test_the_user_s_table_goes_before_the_shipped_one(cache, card, tmp_path, monkeypatch):
    monkeypatch.setattr(settings_file, "SHIPPED", tmp_path / "shipped")
    assert settings_for(card) == LaunchSettings()
    shipped, own = tmp_path / "shipped" / "nvidia-h200.json", cache / "nvidia-h200.json"
    write_settings(shipped, CARD, SETTINGS)
    assert settings_for(card).source == str(shipped)
    write_settings(own, CARD, LaunchSettings())
    assert user_file(CARD) == own
    assert settings_for(card).source == str(own)


def test_a_cpu_has_none(cache):
    write_settings(cache / "cpu.json", "cpu", SETTINGS)
    assert settings_for(torch.device("cpu")) == LaunchSettings()


def test_all_shipped_files_are_valid():
    for path in settings_file.SHIPPED.glob("*"):
        name = json.loads(path.read_text())["device"]
        assert path.name == settings_file.file_name(name)
        assert read_settings(path, name).entries


def damaged(**changes):
    """A file with one launch, and changes to its keys or to those of the launch."""
    entry = {
        "op": "project", "rows": 1024, "width": 4096, "narrowest": 0,
        "num_warps": 16, "ahead": 4, "rows_per_program": 8, "splits": 2,
    }  # fmt: skip
    content = {"format_version": 1, "device": CARD, "triton": "3.6.0", "settings": [entry]}
    for name, value in changes.items():
        (entry if name in entry else content)[name] = value
    return content


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "Expecting value"),
        ("{" * 100_000, "Expecting property name"),
        ("[" * 100_000, "recursion"),
        ("\xff", "decode byte"),
        ([], "no format_version 1"),
        (damaged(format_version=2), "no format_version 1"),
        (damaged(device="NVIDIA A100"), "it is for 'NVIDIA A100', this is 'NVIDIA H200'"),
        (damaged(more=1), "its keys are format_version, device, triton, settings, more"),
        (damaged(settings={}), "settings is no list"),
        (damaged(settings=[3]), "entry 1 has not the keys op, rows, width"),
        (damaged(settings=damaged()["settings"] * 2), "a launch is listed twice"),
        (damaged(op="projekt"), "entry 1 has the unknown op 'projekt'"),
        (damaged(op=["project"]), "entry 1 has the unknown op ['project']"),
        (damaged(op="project_rope"), "entry 1 has rows_per_program 8"),
        (damaged(rows=0), "entry 1 has rows 0"),
        (damaged(width=4096.0), "entry 1 has width 4096.0"),
        (damaged(narrowest=-1), "entry 1 has narrowest -1"),
        (damaged(num_warps=3), "entry 1 has num_warps 3"),
        (damaged(ahead=True), "entry 1 has ahead True"),
        (damaged(splits=16), "entry 1 has splits 16"),
        (damaged(splits=None), "entry 1 has splits None"),
    ],
    ids=range(21),
)
def test_a_damaged_file_is_an_error_that_names_it(content, expected, cache, card):
    path = cache / "nvidia-h200.json"
    path.parent.mkdir(parents=True)
    if isinstance(content, str):
        path.write_bytes(content.encode("latin1"))
    else:
        path.write_text(json.dumps(content))
    with pytest.raises(ThinrankError) as error:
        settings_for(card)
    message = str(error.value)
    assert message.startswith(f"{path} holds no launch settings for this GPU: ") and expected in message
    assert message.endswith(": delete it, then tune again or do without")


def test_a_huge_file_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(settings_file, "MAX_BYTES", 10)
    write_settings(tmp_path / "table.json", CARD, SETTINGS)
    with pytest.raises(ThinrankError, match=r"it has [0-9]+ bytes"):
        read_settings(tmp_path / "table.json", CARD)


def test_a_file_that_cannot_be_read_or_written(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ThinrankError, match=r"cannot read .*folder: Is a directory"):
        read_settings(tmp_path / "folder", CARD)
    assert read_settings(tmp_path / "file" / "below", CARD) is None
    with pytest.raises(OutputError, match=r"cannot write .*below: "):
        write_settings(tmp_path / "file" / "below", CARD, SETTINGS)


def test_an_interrupted_write_changes_nothing(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    write_settings(path, CARD, SETTINGS)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_settings(path, CARD, LaunchSettings())
    monkeypatch.undo()
    assert read_settings(path, CARD).entries == SETTINGS.entries


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"XDG_CACHE_HOME": "/some/where", "HOME": "/home/me"}, "/some/where/thinrank"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/home/me"}, "/home/me/.cache/thinrank"),
        ({"HOME": "/home/me"}, "/home/me/.cache/thinrank"),
    ],
)
def test_the_cache_folder(environment, expected, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(cache_folder()) == expected


def test_without_a_home_there_is_no_user_file(monkeypatch):
    """As in a container with a user id that nobody knows."""

    def fail():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", fail)
    assert cache_folder() is None and user_file(CARD) is None
