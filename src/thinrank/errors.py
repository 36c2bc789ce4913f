"""Errors that a person can cause. Each says what went wrong and, in `hint`, what to do about it.

Only `cli` (exit code 2) and `server` (HTTP 4xx) translate them. A bug of ours raises something else.
"""

#: Characters of a message: a stranger's file may hold names of megabytes.
MAX_MESSAGE = 2000


class ThinrankError(Exception):
    """Base of all errors caused by input, options or the environment. `str()` is one line of bounded length."""

    def __init__(self, message: str, hint: str | None = None):
        line = " ".join(message.split())
        self.message = line if len(line) <= MAX_MESSAGE else f"{line[:MAX_MESSAGE]} ..."
        self.hint = " ".join(hint.split()) if hint else None
        super().__init__(f"{self.message}: {self.hint}" if self.hint else self.message)


class CheckpointError(ThinrankError):
    """A file or folder is not the checkpoint it should be: missing, truncated, inconsistent."""


class UnsafePickleError(CheckpointError):
    """A pickle wants to call something that is not on the allow-list."""


class UnsupportedModelError(ThinrankError):
    """The model is recognised, but its architecture or one of its settings is not implemented."""


class OptionError(ThinrankError):
    """An option or argument is out of range, unknown, or contradicts another one."""


class OutputError(ThinrankError):
    """The result cannot be written: it exists already, the disk is full, no permission."""


class RequestError(ThinrankError):
    """A generation request cannot be served: prompt too long, token id out of range, no tokenizer."""


def unknown_name(kind: str, name: str, known: list[str]) -> OptionError:
    """The error for a name outside a registry; lists what is known."""
    return OptionError(f"unknown {kind} {name!r}", f"known: {', '.join(sorted(known))}")
