"""Genuine torch files are read exactly; hostile and damaged ones are refused, quickly, and nothing is run."""

import builtins
import enum
import functools
import importlib
import io
import operator
import os
import pickle
import random
import struct
import subprocess
import time
import webbrowser
import zipfile
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path

import numpy
import pytest
import torch

from thinrank.checkpoint.pickle_machine import GlobalRef, Stub
from thinrank.checkpoint.pickle_objects import module_tensors, plain_json, stub_attributes
from thinrank.checkpoint.pickle_reader import is_torch_checkpoint, read_pickle
from thinrank.checkpoint.tensors import LazyTensor
from thinrank.errors import CheckpointError, ThinrankError, UnsafePickleError

DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
]


# Tools


def saved(tmp_path: Path, value: object, **options: object) -> Path:
    path = tmp_path / "model.pt"
    torch.save(value, path, **options)
    return path


def zipped(
    tmp_path: Path,
    pickled: bytes,
    storages: dict[str, bytes] | None = None,
    extra: dict[str, bytes] | None = None,
    prefix: str = "model",
) -> Path:
    """A torch zip file around a pickle made by hand."""
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{prefix}/data.pkl", pickled)
        archive.writestr(f"{prefix}/byteorder", b"little")
        for key, data in (storages or {}).items():
            archive.writestr(f"{prefix}/data/{key}", data)
        for name, data in (extra or {}).items():
            archive.writestr(name, data)
    return path


class Call:
    """Pickles as a call of `function` with `arguments`."""

    def __init__(self, function: object, *arguments: object):
        self.reduced = (function, arguments)

    def __call__(self) -> None:
        """So that a call may be called."""

    def __reduce__(self) -> object:
        return self.reduced


class Persistent:
    """Pickles as a reference to `identifier`."""

    def __init__(self, *identifier: object):
        self.identifier = identifier


def dumps(value: object, protocol: int = 2) -> bytes:
    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: object) -> object:
            return obj.identifier if isinstance(obj, Persistent) else None

    stream = io.BytesIO()
    Pickler(stream, protocol).dump(value)
    return stream.getvalue()


def tensor_call(numel=4, offset=0, size=(2, 2), stride=(2, 1), kind=torch.FloatStorage, key="0") -> Call:
    storage = Persistent("storage", kind, key, "cpu", numel)
    return Call(torch._utils._rebuild_tensor_v2, storage, offset, size, stride, False, OrderedDict())


def assert_same(actual: object, expected: object) -> None:
    match expected:
        case torch.Tensor():
            assert isinstance(actual, LazyTensor)
            value = actual.read()
            assert actual.shape == tuple(expected.shape) == tuple(value.shape)
            assert actual.dtype == expected.dtype == value.dtype
            assert value.is_contiguous() and torch.equal(value, expected)
        case dict():
            assert type(actual) is dict and list(actual) == list(expected)
            for key in expected:
                assert_same(actual[key], expected[key])
        case list() | tuple():
            assert len(actual) == len(expected)
            for one, other in zip(actual, expected, strict=True):
                assert_same(one, other)
        case _:
            assert type(actual) is type(expected) and actual == expected


class Color(enum.Enum):
    RED = "red"


class Inner(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 5)
        self.norm = torch.nn.BatchNorm1d(5)
        self.register_buffer("kept", torch.arange(4))
        self.register_buffer("transient", torch.arange(3), persistent=False)
        self.register_parameter("absent", None)


class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(7, 3)
        self.layers = torch.nn.ModuleList([Inner(), Inner()])
        self.head = torch.nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.ratio = 0.8
        self.dtype_wanted = torch.float16
        self.device_wanted = torch.device("cpu")


# Genuine files

FORMATS = pytest.mark.parametrize("zip_format", [True, False], ids=["zip", "legacy"])


@FORMATS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(tmp_path, dtype, zip_format):
    value = {"a": torch.randint(0, 2, (3, 5)).to(dtype), "b": torch.randint(0, 2, (4,)).to(dtype)}
    path = saved(tmp_path, value, _use_new_zipfile_serialization=zip_format)
    assert is_torch_checkpoint(path)
    assert_same(read_pickle(path), torch.load(path))


@FORMATS
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_structure(tmp_path, protocol, zip_format):
    base = torch.arange(24.0).reshape(4, 6)
    value = {
        "views": [base, base[1], base[:, 2], base.T, base[1:3, ::2], base[3, 5], base.unsqueeze(0)],
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0),
        "empty columns": torch.empty(3, 0, 2),
        "parameter": torch.nn.Parameter(base.clone()),
        "ordered": OrderedDict(z=1, a=2),
        "plain": [
            None,
            True,
            False,
            0,
            255,
            70000,
            -1,
            2**31,
            2**70,
            -(2**40),
            1.5,
            "",
            "text",
            "\u00e9\u4e2d",
        ],
        "bytes": [b"", b"short", bytes(range(256)), bytearray(b"array"), b"long" * 100],
        "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
        "sets": [set(), {1}, frozenset({"x"})],
        "keys": {1: 1, ("a", "b"): 2, None: 3, 1.5: 4, b"x": 5, (1, 2): 6},
        "shape": torch.Size([2, 3]),
        "many": {f"key {i}": i for i in range(3000)},
    }
    path = saved(tmp_path, value, pickle_protocol=protocol, _use_new_zipfile_serialization=zip_format)
    expected = torch.load(path, weights_only=False)
    expected["bytes"][3] = bytes(expected["bytes"][3])
    assert_same(read_pickle(path), expected)


def test_shared_tensors_are_one_object(tmp_path):
    base = torch.arange(6.0)
    value = {"a": base, "b": base, "view": base[2:], "parameter": torch.nn.Parameter(base), "other": base + 0}
    root = read_pickle(saved(tmp_path, value))
    assert root["a"] is root["b"] is root["parameter"]
    assert len({id(root[name]) for name in ("a", "view", "other")}) == 3


def test_bool_bytes_become_zero_or_one(tmp_path):
    pickled = dumps(tensor_call(kind=torch.BoolStorage))
    value = read_pickle(zipped(tmp_path, pickled, {"0": b"\x00\x01\x02\xff"})).read()
    assert value.view(torch.uint8).tolist() == [[0, 1], [1, 1]]


def test_first_version_of_tensors_and_attributes(tmp_path):
    tensor = torch.arange(4.0).reshape(2, 2)
    storage = Persistent("storage", torch.FloatStorage, "0", "cpu", 4)
    pickled = dumps(Call(torch._utils._rebuild_tensor, storage, 0, (2, 2), (2, 1)))
    assert_same(read_pickle(zipped(tmp_path, pickled, {"0": tensor.numpy().tobytes()})), tensor)
    tensor.note = "an attribute"
    parameter = torch.nn.Parameter(tensor.clone())
    parameter.note = "another"
    root = read_pickle(saved(tmp_path, [tensor, parameter]))
    assert_same(root, [tensor, tensor])


@FORMATS
def test_module(tmp_path, zip_format):
    module = Outer()
    path = saved(tmp_path, {"model": module}, _use_new_zipfile_serialization=zip_format)
    stub = read_pickle(path)["model"]
    assert isinstance(stub, Stub) and stub.cls == GlobalRef(__name__, "Outer")
    tensors = module_tensors(stub)
    assert_same(tensors, dict(module.state_dict()))
    assert tensors["head.weight"] is tensors["embed.weight"]
    attributes = stub_attributes(stub)
    assert attributes["ratio"] == 0.8 and attributes["dtype_wanted"] == GlobalRef("torch", "float16")
    assert attributes["device_wanted"].cls == GlobalRef("torch", "device")


def test_state_dict_with_metadata(tmp_path):
    path = saved(tmp_path, Outer().state_dict())
    assert_same(read_pickle(path), dict(torch.load(path)))


def test_python_2_names(tmp_path):
    pickled = b"\x80\x02}(U\x01sc__builtin__\nset\n](K\x01K\x02e\x85R"
    pickled += b"U\x01occollections\nOrderedDict\n]]U\x01kK\x07\x86\x85\x85RU\x01LL12345678901L\nu."
    pickled = pickled.replace(b"]]U\x01kK\x07\x86\x85\x85R", b"](U\x01kK\x07\x86e\x85R")
    assert read_pickle(zipped(tmp_path, pickled)) == {"s": {1, 2}, "o": {"k": 7}, "L": 12345678901}


@pytest.mark.parametrize("protocol", [0, 1, 2, 4, 5])
def test_objects_become_stubs(tmp_path, protocol):
    stub = read_pickle(zipped(tmp_path, pickle.dumps(Namespace(a=1), protocol)))
    assert isinstance(stub, Stub) and stub.cls == GlobalRef("argparse", "Namespace")
    assert stub_attributes(stub) == {"a": 1}


def test_enums_of_model_libraries_become_stubs(tmp_path):
    pickled = b"\x80\x02cpeft.utils.peft_types\nPeftType\nX\x04\x00\x00\x00LORA\x85R."
    stub = read_pickle(zipped(tmp_path, pickled))
    assert isinstance(stub, Stub) and stub.args == ("LORA",) and plain_json(stub) == "LORA"


# Calls

CALLS = {
    "system": lambda canary: Call(os.system, f"touch {canary}"),
    "eval": lambda canary: Call(eval, f"open({str(canary)!r}, 'w')"),
    "exec": lambda canary: Call(exec, f"open({str(canary)!r}, 'w')"),
    "compile": lambda canary: Call(compile, "1", "f", "eval"),
    "__import__": lambda canary: Call(builtins.__import__, "os"),
    "open": lambda canary: Call(open, str(canary), "w"),
    "getattr": lambda canary: Call(Call(getattr, str, "upper"), "x"),
    "Popen": lambda canary: Call(subprocess.Popen, ["touch", str(canary)]),
    "check_output": lambda canary: Call(subprocess.check_output, ["touch", str(canary)]),
    "import_module": lambda canary: Call(importlib.import_module, "this"),
    "partial": lambda canary: Call(functools.partial, os.system, f"touch {canary}"),
    "attrgetter": lambda canary: Call(operator.attrgetter, "system"),
    "methodcaller": lambda canary: Call(operator.methodcaller, "touch"),
    "map": lambda canary: Call(map, os.system, [f"touch {canary}"]),
    "type": lambda canary: Call(type, "X", (), {}),
    "bytes with unusual arguments": lambda canary: Call(bytearray, 10**12),
    "torch.serialization.load": lambda canary: Call(torch.load, str(canary)),
    "torch.hub.load": lambda canary: Call(torch.hub.load, "owner/repository", "model"),
    "_load_from_bytes": lambda canary: Call(torch.storage._load_from_bytes, b"x"),
    "set_num_threads": lambda canary: Call(torch.set_num_threads, 1),
    "fromfile": lambda canary: Call(numpy.fromfile, str(canary)),
    "webbrowser.open": lambda canary: Call(webbrowser.open, "http://localhost"),
    "_codecs.encode": lambda canary: Call(pickle.codecs.encode, "x", "rot13"),
    "loads": lambda canary: Call(pickle.loads, b"N."),
}
PLACES = {
    "root": lambda call: call,
    "value": lambda call: {"model": [call]},
    "key": lambda call: {call: 1},
    "set": lambda call: {call},
    "state": lambda call: Namespace(a=call),
    "argument": lambda call: Call(torch._utils._rebuild_parameter, call, True, None),
}


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("name", CALLS)
def test_calls_are_refused_by_name(tmp_path, name, protocol):
    canary = tmp_path / "canary"
    call = CALLS[name](canary)
    for path in (
        zipped(tmp_path, dumps(call, protocol)),
        saved(tmp_path, {"model": call}, pickle_protocol=max(protocol, 2)),
        saved(tmp_path, call, pickle_protocol=max(protocol, 2), _use_new_zipfile_serialization=False),
    ):
        with pytest.raises(UnsafePickleError, match=rf"wants to call \S*{name}") as raised:
            read_pickle(path)
        assert "\n" not in str(raised.value) and "nothing was run" in raised.value.hint
        assert not canary.exists()


@pytest.mark.parametrize("place", PLACES)
def test_calls_are_refused_wherever_they_are(tmp_path, place):
    canary = tmp_path / "canary"
    value = PLACES[place](Call(os.system, f"touch {canary}"))
    with pytest.raises(UnsafePickleError, match=r"wants to call \w+\.system"):
        read_pickle(zipped(tmp_path, dumps(value)))
    assert not canary.exists()


@pytest.mark.parametrize(
    ("pickled", "expected"),
    [
        (b"cos\nsystem\n(S'id'\ntR.", "os.system"),
        (b"cposix\nsystem\n(S'id'\ntR.", "posix.system"),
        (b"cnt\nsystem\n(S'id'\ntR.", "nt.system"),
        (b"c__builtin__\neval\n(S'1'\ntR.", "__builtin__.eval"),
        (
            b"\x80\x04\x8c\x05torch\x8c\x17serialization.os.system\x93\x8c\x02id\x85R.",
            "torch.serialization.os.system",
        ),
        (b"\x80\x04\x8c\x06models\x8c\x06system\x93\x8c\x02id\x85R.", "models.system"),
        (b"\x80\x04\x8c\x07modelsX\x8c\x06System\x93\x8c\x02id\x85R.", "modelsX.System"),
        (b"crunpy\nrun_path\n(S'x'\ntR.", "runpy.run_path"),
        (b"ctorch.\x1b[31m\nx\n(tR.", r"torch.\x1b[31m.x"),
        (b"c" + b"a" * 5000 + b"\nx\n(tR.", "aaa..."),
        (b"S'text'\n(tR.", "a value of type str"),
        (b"cargparse\nNamespace\n)\x81)R.", "a value of type Stub"),
        (b"c_codecs\nencode\nS'x'\nS'utf-8'\n\x86R.", "_codecs.encode"),
        (b"c__builtin__\nbytes\nJ\x00\x00\x00\x7f\x85R.", "bytes"),
    ],
)
def test_handmade_calls(tmp_path, pickled, expected):
    with pytest.raises(UnsafePickleError) as raised:
        read_pickle(zipped(tmp_path, pickled))
    assert expected in str(raised.value) and "wants to call" in str(raised.value)
    assert str(raised.value).isprintable() and len(str(raised.value)) < 400


def test_a_state_is_never_given_to_anything(tmp_path):
    """BUILD on a class object must not set attributes of the class."""
    pickled = b"\x80\x02cargparse\nNamespace\n}X\x04\x00\x00\x00evilK\x01sb."
    with pytest.raises(CheckpointError, match="gives a state to a value of type GlobalRef"):
        read_pickle(zipped(tmp_path, pickled))


@pytest.mark.parametrize(
    ("pickled", "opcode"),
    [
        (b"(ios\nsystem\n.", "INST"),
        (b"(cos\nsystem\nS'id'\no.", "OBJ"),
        (b"\x82\x01.", "EXT1"),
        (b"\x80\x05\x97.", "NEXT_BUFFER"),
        (b"P0\n.", "PERSID"),
    ],
)
def test_other_opcodes_are_refused_by_name(tmp_path, pickled, opcode):
    with pytest.raises(CheckpointError, match=f"opcode {opcode},"):
        read_pickle(zipped(tmp_path, pickled))


# Damaged and absurd pickles


# fmt: off
NONSENSE = [
    b"", b"N", b"0.", b".", b"1.", b"e.", b"t.", b"\x85.", b"]\x87.", b"g5\n.", b"h\x05.", b"q\x05.", b"2.",
    b"R.", b"NNR.",
    b"N)\x81.", b"N)}\x92.", b"cos\nx\n))\x92.", b"Nb.", b"NNb.", b"(K\x01u.", b"]Na", b"}(K\x01u.",
    b"N(K\x01u.", b"}K\x01s.", b"N(K\x01e.", b"N(K\x01\x90.", b"NQ.", b"\x80\x09N.", b"\xffN.", b"NN\x93.",
    b"X\xff\xff\xff\xffa.", b"\x8d" + b"\xff" * 8 + b"a.", b"\x8e" + b"\x7f" * 8 + b"a.",
    b"\x8b\xff\xff\xff\x7f1.", b"\x8b\xff\xff\xff\xff1.", b"I12x\n.", b"L" + b"9" * 5000 + b"L\n.", b"Fx\n.",
    b"S'a\n.", b"S'\\xzz'\n.", b"V\\ud80\n.", b"\x8c\x01\xff.", b"X\x02\x00\x00\x00\xff\xfe.", b"cos\n",
    b"c_codecs\nencode\nX\x02\x00\x00\x00\xc4\x80X\x06\x00\x00\x00latin1\x86R.",
    b"c__builtin__\nset\nN\x85R.",
    b"ccollections\nOrderedDict\n](K\x01K\x02e\x85R.", b"ccopy_reg\n_reconstructor\n)R.",
]
# fmt: on


@pytest.mark.parametrize("pickled", NONSENSE, ids=lambda pickled: repr(pickled[:24]))
def test_nonsense_is_damage(tmp_path, pickled):
    with pytest.raises(CheckpointError):
        read_pickle(zipped(tmp_path, pickled))


def test_values_that_only_claim_to_be_large_cost_nothing(tmp_path):
    started = time.perf_counter()
    assert read_pickle(zipped(tmp_path, b"Nr\xff\xff\xff\x7f0j\xff\xff\xff\x7f.")) is None
    assert read_pickle(zipped(tmp_path, b"Np99999999999999999999\n.")) is None
    for opcode in (b"\x8d", b"\x8e", b"\x96"):
        with pytest.raises(CheckpointError, match="damaged"):
            read_pickle(zipped(tmp_path, opcode + struct.pack("<Q", 2**62) + b"x."))
    assert time.perf_counter() - started < 2


@pytest.mark.parametrize(
    "pickled", [b"]" * 100_000 + b"a" * 99_999, b")" + b"\x85" * 100_000], ids=["list", "tuple"]
)
def test_deep_nesting(tmp_path, pickled):
    root = read_pickle(zipped(tmp_path, pickled + b"."))
    with pytest.raises(CheckpointError, match="too deep"):
        plain_json(root)


def test_hash_bombs(tmp_path):
    started = time.perf_counter()
    doubling = b"K\x01" + b"2\x86" * 60  # a tuple with 2**60 leaves
    huge = b"\x8b" + struct.pack("<i", 200_000) + b"\x7f" * 200_000
    modulus = (1 << 61) - 1
    colliding = b"".join(b"\x8a\x09" + (modulus * i).to_bytes(9, "little") + b"N" for i in range(1, 30))
    pairs = b"".join(b"J" + struct.pack("<i", i) + b"K\x01\x86N" for i in range(20_000))
    for pickled in (
        b"}" + doubling + b"Ns.",
        b"(" + doubling + b"\x91.",
        b"c__builtin__\nset\n](" + doubling + b"e\x85R.",
        b"}" + huge + b"Ns.",
        b"}(" + colliding + b"u.",
        b"}(" + pairs + b"u.",
        b"}(((ttNu.",
        b"}((" + b"N" * 1000 + b"tNu.",
        b"}]Ns.",
        b"}" + dumps(frozenset({1}), 4)[2:-1] + b"Ns.",
    ):
        if pickled == b"}(((ttNu.":
            assert read_pickle(zipped(tmp_path, pickled)) == {((),): None}
            continue
        with pytest.raises(CheckpointError, match="key"):
            read_pickle(zipped(tmp_path, pickled))
    assert time.perf_counter() - started < 5


def test_copies_are_bounded(tmp_path):
    text = b"X" + struct.pack("<I", 1 << 20) + b"x" * (1 << 20) + b"q\x010"
    again = b"c_codecs\nencode\nh\x01X\x06\x00\x00\x00latin1\x86R0"
    with pytest.raises(CheckpointError, match="again and again"):
        read_pickle(zipped(tmp_path, text + again * 1000 + b"N."))


# Tensors that lie


@pytest.mark.parametrize(
    "changes",
    [
        {"size": (2**60,), "stride": (0,)},
        {"size": (2**60,), "stride": (1,)},
        {"size": (0, 2**47, 2**47), "stride": (1, 1, 1)},
        {"size": (5,), "stride": (0,)},
        {"size": (-1, 2)},
        {"size": (2.0, 2)},
        {"size": (True, 2)},
        {"size": ("2", 2)},
        {"size": [2, 2]},
        {"size": (2, 2, 1)},
        {"size": (1,) * 9, "stride": (1,) * 9},
        {"stride": (-2, 1)},
        {"stride": (3, 1)},
        {"stride": (2, 2**70)},
        {"stride": (True, 1)},
        {"offset": -1},
        {"offset": 1},
        {"offset": 2**70},
        {"offset": 0.0},
        {"offset": True},
        {"numel": 5},
        {"numel": 2**40},
        {"numel": 2**70},
        {"numel": -4},
        {"numel": 4.0},
        {"numel": True},
        {"numel": 3},
        {"key": "1"},
        {"key": "../data.pkl"},
        {"key": 0},
        {"kind": torch.DoubleStorage},
        {"kind": torch.ComplexFloatStorage},
        {"kind": torch.QInt8Storage},
        {"kind": os.system},
        {"kind": "FloatStorage"},
    ],
    ids=str,
)
def test_absurd_tensors(tmp_path, changes):
    path = zipped(tmp_path, dumps(tensor_call(**changes)), {"0": bytes(16)})
    with pytest.raises(CheckpointError):
        read_pickle(path)


def test_unknown_tensors_are_named(tmp_path):
    for value, name in [
        (torch.zeros(2, dtype=torch.complex64), "ComplexFloatStorage"),
        (torch.zeros(2, dtype=torch.float8_e4m3fn), "torch.float8_e4m3fn"),
        (torch.zeros(2).to_sparse(), "torch.serialization._get_layout"),
    ]:
        with pytest.raises(CheckpointError, match=name):
            read_pickle(saved(tmp_path, value))


def test_the_file_changes_after_opening(tmp_path):
    path = saved(tmp_path, torch.arange(1000.0))
    tensor = read_pickle(path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match="shorter"):
        tensor.read()
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        tensor.read()


# Damaged and hostile files


def two_tensors(zip_format: bool = True) -> bytes:
    stream = io.BytesIO()
    value = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.arange(5), "module": Inner()}
    torch.save(value, stream, _use_new_zipfile_serialization=zip_format)
    return stream.getvalue()


@FORMATS
def test_truncated_anywhere(tmp_path, zip_format):
    whole = two_tensors(zip_format)
    path = tmp_path / "model.pt"
    for cut in sorted({*range(0, len(whole), len(whole) // 60), 1, 4, 30, len(whole) - 1, len(whole) - 22}):
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError):
            read_pickle(path)


@pytest.mark.parametrize("target", ["pickle", "legacy", "file"])
def test_flipped_bytes_never_raise_anything_else(tmp_path, target):
    rng = random.Random(0)
    whole = two_tensors(target != "legacy")
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(io.BytesIO(two_tensors())) as archive:
        parts = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    storages = {name.removeprefix("data/"): data for name, data in parts.items() if name.startswith("data/")}
    for _ in range(300):
        data = bytearray(parts["data.pkl"] if target == "pickle" else whole)
        for _ in range(rng.choice([1, 1, 2, 5, 20])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if target == "pickle":
            path = zipped(tmp_path, bytes(data), storages)
        else:
            path.write_bytes(data)
        try:
            root = read_pickle(path)
            for value in root.values() if isinstance(root, dict) else ():
                if isinstance(value, LazyTensor):
                    value.read()
                elif isinstance(value, Stub):
                    module_tensors(value)
            plain_json(root)
        except ThinrankError as error:
            assert "\n" not in str(error)


def test_random_programs_never_raise_anything_else(tmp_path):
    """Every opcode in any order, so that the machine meets every combination of types."""
    rng = random.Random(1)
    snippets = [
        *(
            b"N",
            b"K\x01",
            b"]",
            b")",
            b"}",
            b"(",
            b"0",
            b"1",
            b"2",
            b"\x85",
            b"\x86",
            b"\x87",
            b"t",
            b"l",
            b"d",
        ),
        *(
            b"e",
            b"a",
            b"s",
            b"u",
            b"\x8f",
            b"\x90",
            b"\x91",
            b"R",
            b"\x81",
            b"\x92",
            b"b",
            b"Q",
            b"\x93",
            b"\x94",
        ),
        *(b"h\x00", b"h\x01", b"q\x00", b"X\x01\x00\x00\x00x", b"cargparse\nNamespace\n", b"ctorch\nSize\n"),
        *(b"c__builtin__\nset\n", b"ccollections\nOrderedDict\n", b"ctorch._utils\n_rebuild_tensor_v2\n"),
        *(
            b"ctorch._utils\n_rebuild_parameter\n",
            b"ctorch._tensor\n_rebuild_from_type_v2\n",
            b"G" + bytes(8),
        ),
        *(b"ccopy_reg\n_reconstructor\n", b"ctorch\nFloatStorage\n", b"ctorch\ndevice\n", b"\x88", b"\x89"),
        dumps(Persistent("storage", torch.FloatStorage, "0", "cpu", 4))[2:-1],
        dumps(tensor_call())[2:-1],
    ]
    path = zipped(tmp_path, b"", {"0": bytes(16)})
    survived = 0
    for _ in range(400):
        pickled = b"".join(rng.choice(snippets) for _ in range(rng.randrange(2, 12))) + b"."
        path = zipped(tmp_path, pickled, {"0": bytes(16)})
        try:
            read_pickle(path)
            survived += 1
        except ThinrankError:
            pass
    assert survived > 20


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"../x": b""}, "suspicious"),
        ({"model/../../x": b""}, "suspicious"),
        ({"/etc/x": b""}, "suspicious"),
        ({"model\\..\\x": b""}, "suspicious"),
        ({"other/data.pkl": b"N."}, "not one that torch.save writes"),
        ({"x": b""}, "not one that torch.save writes"),
        ({"model/data.pkl": b"N."}, "twice"),
        ({"model/constants.pkl": b"N."}, "TorchScript"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_odd_names_in_the_zip(tmp_path, extra, reason):
    with pytest.raises(CheckpointError, match=reason):
        read_pickle(zipped(tmp_path, b"N.", extra=extra))


def test_null_byte_in_a_name(tmp_path):
    path = zipped(tmp_path, b"N.", extra={"model/version": b"3"})
    path.write_bytes(path.read_bytes().replace(b"model/version", b"model/v\0rsion"))
    with pytest.raises(CheckpointError, match="suspicious"):
        read_pickle(path)


def test_compressed_zip(tmp_path):
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/data.pkl", b"N" * 10_000_000 + b".")
    with pytest.raises(CheckpointError, match="without compression"):
        read_pickle(path)


def test_big_endian(tmp_path):
    path = zipped(tmp_path, b"N.")
    path.write_bytes(path.read_bytes().replace(b"little", b"biggie"))
    with pytest.raises(CheckpointError, match="big-endian"):
        read_pickle(path)


def patched(path: Path, entry: bytes, field: int, value: bytes) -> Path:
    """Overwrite a field of an entry in the zip's directory."""
    data = bytearray(path.read_bytes())
    at = data.rindex(entry) - 46 + field
    data[at : at + len(value)] = value
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        (8, b"\x01\x00", "encrypted"),
        (42, struct.pack("<I", 0), "damaged"),  # lies on another entry
        (42, struct.pack("<I", 3), "no header"),
        (42, struct.pack("<I", 2**31), "no header"),
        (42, struct.pack("<I", 2**32 - 1), "damaged"),  # announces a zip64 field that is not there
        (20, struct.pack("<II", 2**30, 2**30), "not within it"),
        (20, struct.pack("<II", 16, 2**30), "compressed"),
        (20, struct.pack("<II", 200, 200), "not within it"),  # reaches into the directory
        (6, b"\xff\xff", "damaged"),
    ],
)
def test_a_zip_directory_that_lies(tmp_path, field, value, reason):
    path = patched(zipped(tmp_path, b"N.", {"0": bytes(16)}), b"model/data/0", field, value)
    with pytest.raises(CheckpointError, match=reason):
        read_pickle(path)


def test_other_files(tmp_path):
    path = tmp_path / "file"
    for content, reason in [
        (b"", "not a torch.save file"),
        (b"hello", "not a torch.save file"),
        (pickle.dumps({"a": 1}), "bare pickle"),
        (bytes(257) + b"ustar" + bytes(250), "tar file"),
    ]:
        path.write_bytes(content)
        assert not is_torch_checkpoint(path)
        with pytest.raises(CheckpointError, match=reason):
            read_pickle(path)
    assert not is_torch_checkpoint(tmp_path / "absent")
    for unreadable in (tmp_path / "absent", tmp_path):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_pickle(unreadable)


def test_legacy_with_lies(tmp_path):
    path = tmp_path / "model.pt"
    torch.save(torch.arange(4.0), path, _use_new_zipfile_serialization=False)
    whole = path.read_bytes()
    at = len(whole) - 24
    assert whole[at : at + 8] == struct.pack("<q", 4)
    for numel in (-1, 3, 5, 2**62, -(2**63)):
        path.write_bytes(whole[:at] + struct.pack("<q", numel) + whole[at + 8 :])
        with pytest.raises(CheckpointError):
            read_pickle(path)
    at = whole.index(b"little_endian") + len(b"little_endianq\x02")
    assert whole[at : at + 1] == b"\x88"
    path.write_bytes(whole[:at] + b"\x89" + whole[at + 1 :])
    with pytest.raises(CheckpointError, match="little-endian"):
        read_pickle(path)


# Stubs


def module(**state: object) -> Stub:
    members = {"_parameters": {}, "_buffers": {}, "_modules": {}, **state}
    return Stub(GlobalRef("m", "Module"), state=members)


def test_module_trees_that_are_none():
    loop = module()
    loop.state["_modules"]["child"] = loop
    deep = module()
    for _ in range(200):
        deep = module(_modules={"x": deep})
    wide = module()
    for _ in range(30):  # 2**30 names
        wide = module(_modules={"a": wide, "b": wide})
    for stub, reason in [
        (loop, "contains itself"),
        (deep, "too deeply"),
        (wide, "more than"),
        (module(_modules={"x": 1}), "no module"),
        (module(_modules={1: module()}), "not text"),
        (module(_parameters={"x": 1}), "x in the pickled module is no tensor"),
        (module(_buffers=None), "no _buffers"),
        (module(_non_persistent_buffers_set=1), "unusual"),
        (Stub(GlobalRef("m", "Module"), state=b"bytes"), "no attributes"),
        (Stub(GlobalRef("m", "Module")), "no _parameters"),
    ]:
        with pytest.raises(CheckpointError, match=reason):
            module_tensors(stub)


def test_stub_attributes():
    def attributes(state: object) -> dict[str, object]:
        return stub_attributes(Stub(GlobalRef("m", "C"), state=state))

    assert attributes(None) == {}
    assert attributes({"a": 1}) == {"a": 1}
    assert attributes((None, {"b": 2})) == {"b": 2}
    assert attributes(({"a": 1}, {"b": 2})) == {"a": 1, "b": 2}
    for state in (b"x", (1, 2), {1: 2}, ({}, {}, {})):
        with pytest.raises(CheckpointError):
            attributes(state)


def test_plain_json():
    dtype = GlobalRef("torch", "float16")
    value = {
        **{"n": None, "b": True, "i": 3, "f": 1.5, "s": "x", "l": [1, (2,)], "d": {0: "zero"}, "t": dtype},
        **{"enum": Stub(GlobalRef("peft", "T"), ("LORA",)), "function": GlobalRef("torch", "nn"), "set": {1}},
        **{"list of sets": [{1}], "nan": float("nan"), "huge": 2**70, "bytes": b"x"},
        **{("a",): 1, "stub": Stub(GlobalRef("m", "C"), ("x",), state={})},
    }
    assert plain_json(value) == {
        **{"n": None, "b": True, "i": 3, "f": 1.5, "s": "x", "l": [1, [2]], "d": {"0": "zero"}},
        **{"t": "float16", "enum": "LORA"},
    }
    loop: list[object] = []
    loop.append(loop)
    laughs: list[object] = []
    for _ in range(30):
        laughs = [laughs] * 10
    for bad in (loop, laughs, {"a": loop}, b"x", GlobalRef("os", "float16"), float("inf")):
        with pytest.raises(CheckpointError):
            plain_json(bad)
