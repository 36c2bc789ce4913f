"""thinrank: SVD-compressed language models as fast as their smaller size promises.

Names are imported on first use, so that `thinrank --version` needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .config import SamplingParams
from .errors import ThinrankError
from .version import __version__

if TYPE_CHECKING:
    from .checkpoint.convert import convert
    from .checkpoint.export import export
    from .compression import compress
    from .llm import LLM
    from .planning import plan

_HOMES = {
    "LLM": ".llm",
    "convert": ".checkpoint.convert",
    "export": ".checkpoint.export",
    "compress": ".compression",
    "plan": ".planning",
}

__all__ = [
    "LLM",
    "SamplingParams",
    "ThinrankError",
    "__version__",
    "compress",
    "convert",
    "export",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'thinrank' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
