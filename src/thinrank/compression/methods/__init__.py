"""The compression methods by name. A method says how a module's inputs are weighted before truncation."""

from __future__ import annotations

from ...errors import unknown_name
from .method import Method
from .svd import SVD
from .svd_llm import SVD_LLM

METHODS: dict[str, Method] = {method.name: method for method in (SVD, SVD_LLM)}


def method_by_name(name: str) -> Method:
    """Raises OptionError, listing the known names, for an unknown one."""
    if name not in METHODS:
        raise unknown_name("compression method", name, list(METHODS))
    return METHODS[name]
