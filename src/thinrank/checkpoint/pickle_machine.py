"""Reads a pickle as data: an interpreter of its opcodes that never imports, calls or instantiates anything.

A pickle is a program; `pickle.Unpickler` runs it. `PickleMachine` walks the same opcodes with a stack of its
own. A global becomes an inert `GlobalRef`, an object an inert `Stub`. The few calls that honest checkpoints
contain (an ordered dictionary, a set, bytes) are imitated; any other call raises `UnsafePickleError`.

Time and memory are bounded by the length of the pickle, whatever it says. Knows nothing about files or
tensors: whoever creates the machine passes in the calls and persistent ids of its file type.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NoReturn

from ..errors import CheckpointError, UnsafePickleError

Call = Callable[[tuple[object, ...]], object]
"""An imitated function: takes the arguments in the pickle, returns the value that stands for the result."""

MAX_OPCODES = 10_000_000  # a 70B model with its tokenizer has about two million
MAX_COPIED = 1 << 28  # bytes that imitated calls may copy: a call may name one large string again and again
MAX_KEY_INT = (1 << 61) - 1  # Python's hash of integers repeats from here, and takes time in their length
MAX_KEY_LENGTH = 16
MAX_NUMBER_TUPLE_KEYS = 10_000  # colliding tuples of numbers are easy to make, and cost quadratic time

# Calling a class of these makes a stub (enums are pickled so). All names in their packages stay inert too.
MODEL_LIBRARIES = {
    *("accelerate", "peft", "tokenizers", "torch", "transformers"),
    *("component", "flashsvd_component", "models", "modules"),  # where the compressors keep their classes
}
PYTHON_2_NAMES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
LATIN_1 = ("latin1", "latin-1")  # how protocols below 3 spell bytes


@dataclass(frozen=True)
class GlobalRef:
    """A name that the pickle refers to: a class, a function, a dtype. Only the name; never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        """`module.name`, printable and of bounded length: it goes into error messages."""
        text = f"{self.module}.{self.name}".encode("unicode_escape").decode()
        return text if len(text) <= 200 else text[:200] + "..."

    @property
    def is_model_class(self) -> bool:
        """Whether it looks like a class of a library that model checkpoints are made with."""
        in_library = self.module.partition(".")[0] in MODEL_LIBRARIES
        return in_library and self.name.rpartition(".")[2][:1].isupper()


@dataclass(eq=False)
class Stub:
    """An object of a class we do not have: what the pickle says about it, with no behaviour.

    state: what its `__setstate__` would get, usually its `__dict__`. items, entries: contents, for subclasses
    of list or set and of dict.
    """

    cls: GlobalRef
    args: tuple[object, ...] = ()
    kwargs: dict[str, object] = field(default_factory=dict)
    state: object = None
    items: list[object] = field(default_factory=list)
    entries: dict[object, object] = field(default_factory=dict)


class PickleMachine:
    """Evaluates pickles to plain values, `GlobalRef`s, `Stub`s and what `calls` and `persistent_load` return.

    where: name of the file, for messages. calls: imitated functions by full name, besides the usual ones.
    opaque: types that `calls` return and that may be given a state (which is dropped).
    """

    def __init__(
        self,
        where: str,
        calls: Mapping[str, Call] | None = None,
        persistent_load: Callable[[object], object] | None = None,
        opaque: tuple[type, ...] = (),
    ):
        self.where = where
        self._persistent_load = persistent_load
        self._opaque = opaque
        self._calls: dict[str, Call] = {
            "_codecs.encode": self._call_encode,
            "builtins.bytearray": self._call_bytes,
            "builtins.bytes": self._call_bytes,
            "builtins.dict": self._call_dict,
            "builtins.frozenset": lambda args: frozenset(self._call_set(args)),
            "builtins.list": lambda args: list(self._copy_of(args)),
            "builtins.set": self._call_set,
            "collections.OrderedDict": self._call_dict,
            "copyreg.__newobj__": lambda args: self._stub(args[:1], args[1:]),
            "copyreg._reconstructor": lambda args: self._stub(args[:1], args[1:]),
            **(calls or {}),
        }
        self._copied = 0
        self._number_tuples = 0
        self._reset()

    def run(self, pickle: bytes | BinaryIO) -> object:
        """The value of one pickle; a stream is left behind its end.

        Raises UnsafePickleError when it wants to call something, CheckpointError when it is damaged.
        """
        self._reset()
        for count, (opcode, argument) in enumerate(self._opcodes(pickle)):
            if count == MAX_OPCODES:
                self.refuse(f"its pickle has more than {MAX_OPCODES} opcodes")
            if opcode == "STOP":
                return self._pop()
            handler = _HANDLERS.get(opcode)
            if handler is None:
                self.refuse(f"its pickle uses opcode {opcode}, which torch.save does not write")
            handler(self, argument)
        self.damaged("the pickle has no end")

    def call(self, function: object, arguments: tuple[object, ...]) -> object:
        """What stands for the result of a call in the pickle. Nothing is ever called by its name."""
        if not isinstance(function, GlobalRef):
            self._unsafe(f"a value of type {type(function).__name__}")
        module = PYTHON_2_NAMES.get(function.module, function.module)
        known = self._calls.get(f"{module}.{function.name}")
        if known is not None:
            return known(arguments)
        if function.is_model_class:
            return Stub(function, arguments)
        self._unsafe(str(function))

    def damaged(self, why: str) -> NoReturn:
        raise CheckpointError(f"{self.where} is damaged: {why}", "copy or download it again")

    def refuse(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self.where} is not read: {what}", "save it again as safetensors")

    def _unsafe(self, what: str) -> NoReturn:
        raise UnsafePickleError(
            f"{self.where}: the pickle wants to call {what}",
            "nothing was run; other tools would run it, so ask for the model as safetensors",
        )

    def _opcodes(self, pickle: bytes | BinaryIO) -> Iterator[tuple[str, Any]]:
        try:
            for opcode, argument, _ in pickletools.genops(pickle):
                yield opcode.name, argument
        except ValueError as error:  # the only kind it raises; some quote the whole rest of the file
            self.damaged(f"the pickle cannot be decoded ({str(error)[:80]})")

    # The stack. A mark puts the whole stack aside and starts an empty one.

    def _reset(self) -> None:
        self._stack: list[object] = []
        self._marked: list[list[object]] = []
        self._memo: dict[int, object] = {}  # not a list: the pickle picks the indices

    def _push(self, value: object) -> None:
        self._stack.append(value)

    def _pop(self) -> object:
        if not self._stack:
            self.damaged("the pickle takes a value from an empty stack")
        return self._stack.pop()

    def _top(self) -> object:
        if not self._stack:
            self.damaged("the pickle looks at an empty stack")
        return self._stack[-1]

    def _mark(self) -> None:
        self._marked.append(self._stack)
        self._stack = []

    def _pop_mark(self) -> list[object]:
        if not self._marked:
            self.damaged("the pickle looks for a mark that is not there")
        items, self._stack = self._stack, self._marked.pop()
        return items

    def _pop_tuple(self) -> tuple[object, ...]:
        value = self._pop()
        if not isinstance(value, tuple):
            self.damaged("the pickle gives arguments that are not a tuple")
        return value

    def _pop_many(self, count: int) -> tuple[object, ...]:
        if count > len(self._stack):
            self.damaged("the pickle takes values from an empty stack")
        items = tuple(self._stack[-count:])
        del self._stack[-count:]
        return items

    # Opcodes

    def _protocol(self, version: int) -> None:
        if version > 5:
            self.refuse(f"its pickle protocol {version} is not known")

    def _discard(self) -> None:
        if self._stack:
            self._stack.pop()
        else:  # as in pickle: without values above it, the mark itself goes
            self._pop_mark()

    def _put(self, index: int) -> None:
        self._memo[index] = self._top()

    def _get(self, index: int) -> None:
        if index not in self._memo:
            self.damaged(f"the pickle refers to value {index}, which it does not contain")
        self._push(self._memo[index])

    def _global(self, joined: str) -> None:
        module, _, name = joined.partition(" ")
        self._push(GlobalRef(module, name))

    def _stack_global(self) -> None:
        module, name = self._pop_many(2)
        if not isinstance(module, str) or not isinstance(name, str):
            self.damaged("the pickle names something by values that are not text")
        self._push(GlobalRef(module, name))

    def _reduce(self) -> None:
        arguments = self._pop_tuple()
        self._push(self.call(self._pop(), arguments))

    def _new(self) -> None:
        arguments = self._pop_tuple()
        self._push(self._stub((self._pop(),), arguments))

    def _new_with_keywords(self) -> None:
        kwargs = self._pop()
        arguments = self._pop_tuple()
        stub = self._stub((self._pop(),), arguments)
        if not isinstance(kwargs, dict):
            self.damaged("the pickle gives keyword arguments that are not a dictionary")
        stub.kwargs = kwargs
        self._push(stub)

    def _build(self) -> None:
        state = self._pop()
        target = self._top()
        if isinstance(target, Stub):
            target.state = state
        elif not isinstance(target, (dict, set, *self._opaque)):
            self.damaged(f"the pickle gives a state to a value of type {type(target).__name__}")
        # The state of the others (`_metadata` of a state dict, attributes of a parameter) is not needed.

    def _persistent(self) -> None:
        if self._persistent_load is None:
            self.damaged("the pickle refers to data outside itself where there is none")
        self._push(self._persistent_load(self._pop()))

    def _append(self, items: list[object]) -> None:
        target = self._top()
        if isinstance(target, Stub):
            target = target.items
        if not isinstance(target, list):
            self.damaged(f"the pickle appends to a value of type {type(target).__name__}")
        target.extend(items)

    def _add(self, items: list[object]) -> None:
        target = self._top()
        if isinstance(target, Stub):
            target.items.extend(items)
        elif isinstance(target, set):
            target.update(self._keys(items))
        else:
            self.damaged(f"the pickle adds to a value of type {type(target).__name__}")

    def _set_items(self, pairs: list[object] | tuple[object, ...]) -> None:
        target = self._top()
        if isinstance(target, Stub):
            target = target.entries
        if not isinstance(target, dict):
            self.damaged(f"the pickle sets an item of a value of type {type(target).__name__}")
        self._fill(target, pairs)

    def _dict_of(self, pairs: list[object]) -> dict[object, object]:
        result: dict[object, object] = {}
        self._fill(result, pairs)
        return result

    def _fill(self, target: dict[object, object], pairs: list[object] | tuple[object, ...]) -> None:
        if len(pairs) % 2:
            self.damaged("the pickle has a key without a value")
        target.update(zip(self._keys(pairs[::2]), pairs[1::2], strict=True))

    # Dictionary keys: hashing and comparing them must be cheap and must not depend on foreign code.

    def _keys(self, keys: list[object] | tuple[object, ...]) -> list[object] | tuple[object, ...]:
        for key in keys:
            self._check_key(key, nesting=2)
        return keys

    def _check_key(self, key: object, nesting: int) -> None:
        if key is None or isinstance(key, (str, bytes, bool, float, GlobalRef, Stub)):
            return
        if isinstance(key, int):
            if abs(key) >= MAX_KEY_INT:
                self.refuse("a dictionary key is an absurdly large number")
        elif isinstance(key, tuple) and nesting and len(key) <= MAX_KEY_LENGTH:
            for part in key:
                self._check_key(part, nesting - 1)
            self._number_tuples += any(isinstance(part, (int, float, tuple)) for part in key)
            if self._number_tuples > MAX_NUMBER_TUPLE_KEYS:
                self.refuse(f"it has more than {MAX_NUMBER_TUPLE_KEYS} tuples of numbers as dictionary keys")
        else:
            self.refuse(f"a dictionary key is of type {type(key).__name__}, too large or too deep")

    # Imitated calls

    def _stub(self, cls: tuple[object, ...], arguments: tuple[object, ...]) -> Stub:
        if not cls or not isinstance(cls[0], GlobalRef):
            self.damaged("the pickle makes an object of something that is not a class")
        return Stub(cls[0], arguments)

    def _copying(self, size: int) -> None:
        self._copied += size
        if self._copied > MAX_COPIED:
            self.refuse("its pickle copies values again and again")

    def _copy_of(self, arguments: tuple[object, ...]) -> list[object] | tuple[object, ...]:
        """The one, optional argument of a container, about to be copied."""
        if not arguments:
            return ()
        (items, *rest) = arguments
        if rest or not isinstance(items, (list, tuple)):
            self.damaged("the pickle makes a container of something that is not a list")
        self._copying(32 * len(items))
        return items

    def _call_set(self, arguments: tuple[object, ...]) -> set[object]:
        return set(self._keys(self._copy_of(arguments)))

    def _call_dict(self, arguments: tuple[object, ...]) -> dict[object, object]:
        result: dict[object, object] = {}
        if len(arguments) == 1 and isinstance(arguments[0], dict):
            self._copying(64 * len(arguments[0]))
            return dict(arguments[0])
        for pair in self._copy_of(arguments):  # Python 2 wrote ordered dictionaries as lists of pairs
            if not isinstance(pair, (list, tuple)) or len(pair) != 2:
                self.damaged("the pickle makes a dictionary of something that is not pairs")
            self._fill(result, pair)
        return result

    def _call_encode(self, arguments: tuple[object, ...]) -> bytes:
        if len(arguments) != 2 or not isinstance(arguments[0], str) or arguments[1] not in LATIN_1:
            self._unsafe("_codecs.encode with an encoding other than latin1")
        return self._call_bytes(arguments)

    def _call_bytes(self, arguments: tuple[object, ...]) -> bytes:
        """bytes or bytearray: empty, of bytes, or of text as Latin-1; never of a number (a length)."""
        match arguments:
            case ():
                return b""
            case (bytes() as data,):
                return data
            case (str() as text, str() as encoding) if encoding in LATIN_1:
                self._copying(len(text))
                try:
                    return text.encode("latin-1")
                except UnicodeEncodeError:
                    self.damaged("the pickle has bytes above 255")
        self._unsafe("bytes with unusual arguments")


_M = PickleMachine

# `arg` is what the opcode carries.
_HANDLERS: dict[str, Callable[[PickleMachine, Any], object]] = {
    "PROTO": _M._protocol,
    "FRAME": lambda m, arg: None,
    # Values. `pickletools` has decoded them.
    **dict.fromkeys(
        [
            *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
            *("STRING", "BINSTRING", "SHORT_BINSTRING"),
            *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
            *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
        ],
        _M._push,
    ),
    "BYTEARRAY8": lambda m, arg: m._push(bytes(arg)),
    "NONE": lambda m, arg: m._push(None),
    "NEWTRUE": lambda m, arg: m._push(True),
    "NEWFALSE": lambda m, arg: m._push(False),
    # Containers
    "EMPTY_LIST": lambda m, arg: m._push([]),
    "EMPTY_TUPLE": lambda m, arg: m._push(()),
    "EMPTY_DICT": lambda m, arg: m._push({}),
    "EMPTY_SET": lambda m, arg: m._push(set()),
    "LIST": lambda m, arg: m._push(m._pop_mark()),
    "TUPLE": lambda m, arg: m._push(tuple(m._pop_mark())),
    "TUPLE1": lambda m, arg: m._push(m._pop_many(1)),
    "TUPLE2": lambda m, arg: m._push(m._pop_many(2)),
    "TUPLE3": lambda m, arg: m._push(m._pop_many(3)),
    "DICT": lambda m, arg: m._push(m._dict_of(m._pop_mark())),
    "FROZENSET": lambda m, arg: m._push(frozenset(m._keys(m._pop_mark()))),
    "APPEND": lambda m, arg: m._append([m._pop()]),
    "APPENDS": lambda m, arg: m._append(m._pop_mark()),
    "ADDITEMS": lambda m, arg: m._add(m._pop_mark()),
    "SETITEM": lambda m, arg: m._set_items(m._pop_many(2)),
    "SETITEMS": lambda m, arg: m._set_items(m._pop_mark()),
    # Stack and memo
    "MARK": lambda m, arg: m._mark(),
    "POP": lambda m, arg: m._discard(),
    "POP_MARK": lambda m, arg: m._pop_mark(),
    "DUP": lambda m, arg: m._push(m._top()),
    **dict.fromkeys(["PUT", "BINPUT", "LONG_BINPUT"], _M._put),
    **dict.fromkeys(["GET", "BINGET", "LONG_BINGET"], _M._get),
    "MEMOIZE": lambda m, arg: m._put(len(m._memo)),
    # Objects
    "GLOBAL": _M._global,
    "STACK_GLOBAL": lambda m, arg: m._stack_global(),
    "REDUCE": lambda m, arg: m._reduce(),
    "NEWOBJ": lambda m, arg: m._new(),
    "NEWOBJ_EX": lambda m, arg: m._new_with_keywords(),
    "BUILD": lambda m, arg: m._build(),
    "BINPERSID": lambda m, arg: m._persistent(),
}
