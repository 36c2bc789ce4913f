"""The systems of a latency benchmark by name, and how each is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ..errors import unknown_name
from .engine_system import EngineSystem
from .huggingface import HuggingFaceSystem
from .int4 import Int4System
from .shapes import BenchModel
from .static_decoder import StaticDecoderSystem
from .system import System


@dataclass(frozen=True)
class SystemKind:
    """dense: it runs the dense model. build: loads the weights; what follows is warm-up."""

    dense: bool
    build: Callable[[BenchModel], System]


#: `thinrank` is what is measured; the others are its baselines.
SYSTEMS: Mapping[str, SystemKind] = MappingProxyType(
    {
        "thinrank": SystemKind(False, EngineSystem),
        "thinrank-dense": SystemKind(True, EngineSystem),
        "hf-static": SystemKind(False, HuggingFaceSystem),
        "hf-static-dense": SystemKind(True, HuggingFaceSystem),
        "hf-compile": SystemKind(False, lambda model: HuggingFaceSystem(model, compiled=True)),
        "compiled": SystemKind(False, StaticDecoderSystem),
        "compiled-dense": SystemKind(True, StaticDecoderSystem),
        "int4-dense": SystemKind(True, Int4System),
        "densekv": SystemKind(False, lambda model: StaticDecoderSystem(model, compiled=False)),
    }
)
OURS = ("thinrank", "thinrank-dense")
BASELINES = tuple(name for name in SYSTEMS if name != "thinrank")


def selected_systems(baselines: Sequence[str], model: BenchModel) -> list[str]:
    """`thinrank` and the named baselines, in the order of `SYSTEMS`; "all" is every one.

    A dense model is its own dense baseline, so each kind is listed once. Raises OptionError for an unknown
    name.
    """
    for name in baselines:
        if name not in (*BASELINES, "all"):
            raise unknown_name("baseline", name, [*BASELINES, "all"])
    wanted = {"thinrank", *(BASELINES if "all" in baselines else baselines)}
    if model.structure == "dense":
        wanted -= {"thinrank-dense", "hf-static-dense", "compiled-dense"}
    return [name for name in SYSTEMS if name in wanted]


def build_system(name: str, model: BenchModel, temperature: float) -> System:
    """A system, ready to `prepare`. Ours sample at the temperature, or are greedy at 0; baselines are greedy."""
    return EngineSystem(model, temperature) if name in OURS else SYSTEMS[name].build(model)


def model_for(name: str, model: BenchModel) -> BenchModel:
    """The model that a system runs: as given, or its dense shape."""
    return model.dense() if SYSTEMS[name].dense and model.structure != "dense" else model
