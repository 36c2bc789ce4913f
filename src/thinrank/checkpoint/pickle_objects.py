"""Modules and other objects of a pickle, as inert `Stub`s: taken apart into tensors, attributes and plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite

import torch

from ..errors import CheckpointError
from .pickle_machine import GlobalRef, Stub
from .tensors import LazyTensor

MAX_MODULE_DEPTH = 64
MAX_MODULES = 200_000
MAX_JSON_DEPTH = 32
MAX_JSON_VALUES = 100_000


def stub_attributes(stub: Stub) -> dict[str, object]:
    """The attributes of a pickled object, those in slots included.

    Raises CheckpointError when its state is something else than attributes.
    """
    state = stub.state
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    attributes: dict[str, object] = {}
    for part in parts:
        if not isinstance(part, dict | None):
            raise CheckpointError(f"the pickled {stub.cls} has no attributes, but {type(part).__name__}")
        for name, value in (part or {}).items():
            if not isinstance(name, str):
                raise CheckpointError(f"the pickled {stub.cls} has an attribute whose name is not text")
            attributes[name] = value
    return attributes


def module_tensors(stub: Stub) -> dict[str, LazyTensor]:
    """The `state_dict()` of a pickled `nn.Module`: parameters and persistent buffers by their full names.

    Raises CheckpointError when the tree is not one of modules, contains itself, or is absurdly large.
    """
    tensors: dict[str, LazyTensor] = {}
    pending: list[tuple[str, Stub, tuple[Stub, ...]]] = [("", stub, ())]
    for _ in range(MAX_MODULES):
        if not pending:
            return tensors
        prefix, module, parents = pending.pop()
        where = prefix.removesuffix(".") or "the model"
        if module in parents:
            raise CheckpointError(f"the pickled module {where} contains itself")
        if len(parents) > MAX_MODULE_DEPTH:
            raise CheckpointError(f"the pickled module {where} is nested too deeply")
        attributes = stub_attributes(module)
        transient = attributes.get("_non_persistent_buffers_set") or ()
        if not isinstance(transient, (set, frozenset, list, tuple)):
            raise CheckpointError(f"the pickled module {where} has an unusual list of buffers")
        for name, value in _members(attributes, "_parameters", where):
            tensors[prefix + name] = _as_tensor(value, prefix + name)
        for name, value in _members(attributes, "_buffers", where):
            if name not in transient:
                tensors[prefix + name] = _as_tensor(value, prefix + name)
        children: list[tuple[str, Stub, tuple[Stub, ...]]] = []
        for name, value in _members(attributes, "_modules", where):
            if not isinstance(value, Stub):
                raise CheckpointError(f"the pickled module {prefix + name} is no module")
            children.append((f"{prefix}{name}.", value, (*parents, module)))
        pending.extend(reversed(children))  # the stack gives them back in order
    raise CheckpointError(f"the pickled model has more than {MAX_MODULES} modules")


def _members(attributes: Mapping[str, object], kind: str, where: str) -> Iterator[tuple[str, object]]:
    """Names and values in one of a module's dictionaries; empty slots (no bias) are left out."""
    members = attributes.get(kind)
    if not isinstance(members, dict):
        raise CheckpointError(f"the pickled object {where} is no module: it has no {kind}")
    for name, value in members.items():
        if not isinstance(name, str):
            raise CheckpointError(f"the pickled module {where} has a member whose name is not text")
        if value is not None:
            yield name, value


def _as_tensor(value: object, name: str) -> LazyTensor:
    if not isinstance(value, LazyTensor):
        raise CheckpointError(f"{name} in the pickled module is no tensor")
    return value


class _NotPlain(Exception):
    """A value that JSON cannot express."""


def plain_json(value: object) -> object:
    """A copy of a pickled value as JSON has it: text, numbers, lists, dicts; dtypes and enums as their names.

    Entries of dicts that JSON cannot express are dropped. Raises CheckpointError when the value itself cannot
    be expressed, or is absurdly large or deep.
    """
    budget = iter(range(MAX_JSON_VALUES))
    try:
        return _plain(value, MAX_JSON_DEPTH, budget)
    except _NotPlain as error:
        raise CheckpointError(f"a pickled value cannot be expressed as JSON: {error}") from error


def _plain(value: object, depth: int, budget: Iterator[int]) -> object:
    # Values that are shared many times over are copied each time: hence the budget.
    if next(budget, None) is None or depth == 0:
        raise CheckpointError("a pickled value is too large or too deep to be a setting")
    match value:
        case None | bool() | str():
            return value
        case int() if abs(value) < 1 << 63:
            return value
        case float() if isfinite(value):
            return value
        case list() | tuple():
            return [_plain(item, depth - 1, budget) for item in value]
        case dict():
            result: dict[str, object] = {}
            for key, item in value.items():
                if isinstance(key, str) or (type(key) is int and abs(key) < 1 << 63):
                    try:
                        result[str(key)] = _plain(item, depth - 1, budget)
                    except _NotPlain:  # an attribute that is no setting
                        continue
            return result
        case GlobalRef(module="torch", name=name) if isinstance(vars(torch).get(name), torch.dtype):
            return name
        case Stub(args=(str() as name,), state=None):
            return name
    raise _NotPlain(f"it is of type {type(value).__name__}")
