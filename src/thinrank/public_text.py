"""Public text through the package `datasets`, an extra: for calibration and for perplexity."""

from __future__ import annotations

from typing import Any

from .errors import OptionError


def load_public_text(name: str, *arguments: str, **options: Any) -> Any:
    """Rows of a data set, by the arguments of `datasets.load_dataset`.

    Raises OptionError when the package is missing or cannot get the data.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise OptionError(
            f"{name} needs the package datasets", "run: pip install 'thinrank[datasets]', or name a text file"
        ) from error
    try:
        return load_dataset(name, *arguments, **options)
    except (OSError, ValueError, RuntimeError) as error:  # offline, not cached, moved
        raise OptionError(f"cannot get {name}: {error}", "check the connection, or name a file") from error
