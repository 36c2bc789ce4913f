"""`thinrank`: collects the commands, and turns errors into one line on stderr and an exit code.

Exit codes: 0 done, 2 a mistake that the message explains, 3 a result beyond a limit that was set, 130
interrupted. A bug shows its traceback.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ..errors import ThinrankError
from ..version import __version__
from . import output
from .bench import bench
from .chat import chat
from .compress import compress
from .convert import convert
from .demo import demo
from .eval import evaluate
from .export import export
from .generate import generate
from .inspect import inspect
from .plan import plan
from .serve import serve
from .tune import tune

COMMANDS = {
    command.__name__: command
    for command in (convert, export, inspect, generate, chat, serve, plan, compress, tune, demo)
}
#: Commands that have commands of their own.
GROUPS = {"bench": bench, "eval": evaluate}

app = typer.Typer(add_completion=False)
for name, command in COMMANDS.items():
    app.command(name)(command)
for name, group in GROUPS.items():
    app.add_typer(group, name=name)

#: What to lower when memory runs out, by command.
_MEMORY_HINTS = {
    "generate": "lower --kv-cache-memory, --max-model-len or --n",
    "chat": "lower --kv-cache-memory or --max-model-len",
    "serve": "lower --kv-cache-memory, --max-model-len or --max-num-seqs",
    "tune": "use a GPU that has room for the model",
    "bench": "lower --batch-size, --input-len or --output-len, or take fewer --baseline",
    "eval": "lower --num-prompts or --window, or use --device cpu",
    "compress": "lower --calibration-length or --calibration-samples, or use --device cpu",
}

#: With what a file system refuses a path that a person named, wherever it is first looked at.
_REFUSALS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.EIO, errno.ESTALE)


def _print_version(wanted: bool) -> None:
    if wanted:
        output.write(f"thinrank {__version__}\n")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run SVD-compressed (low-rank) language models as fast as their smaller size promises."""
    if context.invoked_subcommand is None:
        output.write(context.get_help() + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line, `sys.argv` by default, and return the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            return _run(arguments)
        except ThinrankError as error:
            output.write_message("error", str(error))
            return 2
        except typer.TyperException as error:
            output.write_message("error", _usage_message(error, arguments))
            return 2
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            hint = _MEMORY_HINTS.get(arguments[0], "use a machine with more memory")
            output.write_message("error", f"out of memory: {hint}")
            return 2
        except KeyboardInterrupt:
            output.write_message("error", "interrupted")
            return 130
        except BrokenPipeError:
            # The reader is gone. Python flushes stdout once more when it ends; that must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except OSError as error:
            if error.errno not in _REFUSALS or error.filename is None:
                raise
            output.write_message("error", f"cannot use {os.fsdecode(error.filename)}: {error.strerror}")
            return 2


def _run(arguments: list[str]) -> int:
    root = typer.main.get_command(app)
    try:
        with root.make_context("thinrank", arguments) as context:
            root.invoke(context)
    except typer.Exit as exit:
        return exit.exit_code
    return 0


def _usage_message(error: typer.TyperException, arguments: list[str]) -> str:
    message = error.format_message().rstrip(".")
    named = []
    command: Any = typer.main.get_command(app)
    for name in arguments:
        command = getattr(command, "commands", {}).get(name)
        if command is None:
            break
        named.append(name)
    return f"{message[:1].lower()}{message[1:]} (see {' '.join(['thinrank', *named, '--help'])})"


def _is_out_of_memory(error: BaseException) -> bool:
    """torch's CPU allocator raises a plain RuntimeError."""
    torch = sys.modules.get("torch")
    return (
        isinstance(error, MemoryError)
        or (torch is not None and isinstance(error, torch.OutOfMemoryError))
        or "can't allocate memory" in str(error)
    )


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    output.write_message("warning", str(message))
