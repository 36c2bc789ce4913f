"""The documentation keeps up with the code."""

import importlib.util
import json
import re
from pathlib import Path

import scale_tables

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "thinrank"


def test_every_module_has_a_line_in_the_architecture():
    table = re.findall(r"`([\w/]+)`", (ROOT / "docs" / "architecture.md").read_text())
    named = {name.removeprefix("checkpoint/") for name in table}
    modules = {
        str(path.relative_to(SOURCE).with_suffix(""))
        for path in SOURCE.rglob("*.py")
        if path.name not in ("__main__.py", "version.py") and path.stat().st_size
    }
    packages = {"checkpoint/convert/__init__": "convert/__init__", "compression/methods/__init__": None}
    missing = set()
    for module in modules:
        name = packages.get(module, module.removeprefix("checkpoint/"))
        if name is not None and name not in named and not module.startswith("cli/__init__"):
            missing.add(module)
    assert not missing


def test_the_readme_names_every_command():
    readme = (ROOT / "README.md").read_text()
    commands = {path.stem for path in (SOURCE / "cli").glob("*.py")} - {
        "__init__",
        "main",
        "options",
        "output",
    }
    assert not [command for command in commands if f"thinrank {command.replace('_', ' ')}" not in readme]


def test_the_numbers_of_the_scale_guide_are_computed():
    """python tests/scale_tables.py prints them."""
    page = (ROOT / "docs" / "scale.md").read_text()
    for table in (scale_tables.reads(), scale_tables.sends(), scale_tables.break_even()):
        assert table in page


def test_the_table_of_methods_is_what_was_measured():
    """benchmarks/compression_methods.py prints it."""
    path = ROOT / "benchmarks" / "compression_methods.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    result = json.loads((ROOT / "benchmarks" / "results" / benchmark.RESULT).read_text())
    assert "\n".join(benchmark.table(result["rows"])) in (ROOT / "docs" / "compression.md").read_text()
