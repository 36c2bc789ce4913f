"""The direction of imports (docs/design: cli, server, bench, eval -> llm -> engine -> checkpoint -> model ->
kernels), what each layer may import from outside, and who may read the environment."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import thinrank

PACKAGE = Path(thinrank.__file__).parent

LEAVES = {"errors", "config", "device", "version", "whole_file"}
RUNTIME = LEAVES | {"kernels", "model", "checkpoint", "engine", "text", "outputs", "llm"}
EVERYTHING = RUNTIME | {
    "compression",
    "builtin_text",
    "public_text",
    "text_files",
    "eval",
    "bench",
    "planning",
    "demo",
    "server",
    "chat",
}

#: Top-level module or package -> those that it may import, beside itself.
MAY_IMPORT = {
    "errors": set(),
    "version": set(),
    "whole_file": set(),
    "builtin_text": set(),
    "public_text": {"errors"},
    "text_files": {"errors"},
    "config": {"errors"},
    "device": {"errors"},
    "text": LEAVES | {"checkpoint"},  # names of tokenizer files
    "kernels": LEAVES,
    "model": LEAVES | {"kernels"},
    "checkpoint": LEAVES | {"model"},
    "compression": LEAVES | {"model", "checkpoint", "text", "builtin_text", "public_text", "text_files"},
    "engine": LEAVES | {"kernels", "model", "checkpoint"},
    "outputs": LEAVES | {"engine", "text"},
    "llm": RUNTIME,
    "integrations": LEAVES | {"model", "checkpoint"},
    "bench": RUNTIME | {"builtin_text"},
    # eval: the same models, report and Hugging Face as are timed
    "eval": RUNTIME | {"builtin_text", "public_text", "text_files", "bench"},
    "planning": LEAVES | {"model", "checkpoint", "compression", "bench"},  # its ranks, its shapes
    "server": RUNTIME | {"bench"},  # the read bandwidth, for the page
    "chat": RUNTIME | {"text_files"},
    "demo": EVERYTHING - {"server", "chat"},
    "cli": EVERYTHING,
}

#: Packages from outside that the library itself, from `llm` down, may import.
THIRD_PARTY = {"torch", "triton", "safetensors", "tokenizers", "transformers", "numpy", "tqdm"}
#: Further ones: only in these places, and only inside functions if "lazily".
EXTRA = {
    "huggingface_hub": ("checkpoint/convert", "lazily"),
    "gguf": ("checkpoint/convert", "lazily"),
    "sentencepiece": ("checkpoint/convert", "lazily"),
    "datasets": ("public_text.py", "lazily"),
    "lm_eval": ("eval/", "at the top"),  # of harness.py, whose class is one of its classes
}
LIBRARY = RUNTIME | {"compression", "builtin_text", "public_text", "text_files", "eval"}

SOURCES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
#: `thinrank/__init__.py` names everything, lazily; the last test covers it.
MODULES = [path for path in SOURCES if path.name not in ("__main__.py",) and path != Path("__init__.py")]


def home(path: Path) -> str:
    """The top-level module or package that a source file belongs to."""
    return path.parts[0].removesuffix(".py")


def parse(path: Path) -> ast.Module:
    return ast.parse((PACKAGE / path).read_text(encoding="utf-8"))


def own_imports(path: Path) -> Iterator[str]:
    """Top-level modules of thinrank that a file imports, wherever in the file."""
    package = ["thinrank", *path.parent.parts]
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = [*base, *(node.module or "").split(".")] if node.module else base
            targets = [[*name, alias.name] for alias in node.names]
        elif isinstance(node, ast.Import):
            targets = [alias.name.split(".") for alias in node.names]
        else:
            continue
        yield from (target[1] for target in targets if target[0] == "thinrank" and len(target) > 1)


def third_party_imports(nodes: Iterator[ast.AST]) -> set[str]:
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add((node.module or "").partition(".")[0])
    return names - set(sys.stdlib_module_names) - {"thinrank"}


def outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes that run on import."""
    for child in ast.iter_child_nodes(tree):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from outside_functions(child)


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_point_downwards(path: Path) -> None:
    assert home(path) in MAY_IMPORT, "a new module needs its place in MAY_IMPORT"
    assert set(own_imports(path)) <= MAY_IMPORT[home(path)] | {home(path)}


@pytest.mark.parametrize("path", [path for path in MODULES if home(path) in LIBRARY], ids=str)
def test_the_library_imports_little_from_outside(path: Path) -> None:
    tree = parse(path)
    for name in third_party_imports(ast.walk(tree)) - THIRD_PARTY:
        assert name in EXTRA
        place, when = EXTRA[name]
        assert path.as_posix().startswith(place)
        assert when != "lazily" or name not in third_party_imports(outside_functions(tree))


@pytest.mark.parametrize("path", [path for path in MODULES if home(path) == "cli"], ids=str)
def test_the_command_line_starts_without_heavy_imports(path: Path) -> None:
    assert third_party_imports(node for node in parse(path).body) <= {"typer"}


@pytest.mark.parametrize("path", [path for path in SOURCES if path != Path("device.py")], ids=str)
def test_only_device_reads_the_environment(path: Path) -> None:
    for node in ast.walk(parse(path)):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        assert name not in ("environ", "environb", "getenv")


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["generate", "--help"], ["generat"]])
def test_torch_is_not_imported_before_it_is_needed(arguments: list[str]) -> None:
    program = (
        "import sys, thinrank\n"
        "from thinrank.cli.main import main\n"
        f"main({arguments})\n"
        "heavy = {'torch', 'transformers', 'numpy', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
