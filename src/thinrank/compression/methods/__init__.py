"""The compression methods by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from ...errors import OptionError, unknown_name
from ..method import Method
from .adasvd import adasvd
from .asvd import asvd
from .basis_sharing import basis_sharing
from .dobi_svd import dobi_svd
from .svd import svd
from .svd_llm import svd_llm
from .svd_llm_v2 import svd_llm_v2

METHODS: dict[str, Callable[..., Method]] = {
    "svd": svd,
    "asvd": asvd,
    "svd-llm": svd_llm,
    "svd-llm-v2": svd_llm_v2,
    "basis-sharing": basis_sharing,
    "adasvd": adasvd,
    "dobi-svd": dobi_svd,
}


def method_by_name(name: str, options: Mapping[str, Any]) -> Method:
    """The method with these options, which are arguments of its function in `METHODS`.

    Raises OptionError, listing the known names, for an unknown method or option, or one out of range.
    """
    if name not in METHODS:
        raise unknown_name("compression method", name, list(METHODS))
    known = list(signature(METHODS[name]).parameters)
    for option in options:
        if option not in known:
            hint = f"it takes {', '.join(known)}" if known else "it has none of its own"
            raise OptionError(f"the method {name} has no option {option}", hint)
    return METHODS[name](**options)
