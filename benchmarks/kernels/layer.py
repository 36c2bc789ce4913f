"""One layer of a decode step with random numbers, for the benchmarks of its launches: packed weights and vectors.

Launch settings are the rule's, `tuning.gemv_rule`, whatever a card's table says.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from harness import DEVICE, DTYPE
from torch import Tensor

from thinrank.bench.shapes import SHAPES, STRUCTURES, random_source
from thinrank.config import ModelConfig
from thinrank.kernels.gemv import SQUARES_GROUP
from thinrank.kernels.reference import in_two_parts
from thinrank.kernels.tuning import MAX_SPLITS, GemvConfig, Launch, gemv_rule
from thinrank.kernels.workspace import SplitWorkspace
from thinrank.model.packing import ArenaBuilder, PackedProjections
from thinrank.model.registry import parse_config

KEEP_RATIO = 0.5
MODELS = (("llama-7b", "uniform"), ("llama3-8b", "uniform"), ("llama-7b", "mixed"), ("llama-7b", "dense"))

#: Shape, structure and batch size: what every benchmark of a decode launch is measured at, and what it is tested at.
SIZES = [(*model, batch) for model in MODELS for batch in (1, 2, 4, 8)]
SMALL = [("tiny", "uniform", 1), ("tiny", "dense", 3)]

#: Modules that read the same vector.
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUTPUT = ("self_attn.o_proj",)
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
DOWN = ("mlp.down_proj",)


class Weights:
    """The projections of a layer in an arena of their own, by their modules' names."""

    def __init__(self, shape: str, structure: str):
        config = parse_config({**SHAPES[shape], "num_hidden_layers": 1, "tie_word_embeddings": False})
        self.config = replace(config, ranks=STRUCTURES[structure](config, KEEP_RATIO, 0)[0])
        builder = ArenaBuilder(self.config, random_source(self.config, DTYPE, DEVICE, 0), DTYPE, DEVICE)
        groups = (QKV, OUTPUT, GATE_UP, DOWN)
        self.packed: dict[tuple[str, ...], PackedProjections] = {
            modules: builder.projections([f"model.layers.0.{module}" for module in modules])
            for modules in groups
        }
        self.lm_head = builder.projections(["lm_head"]).outputs[0]
        self.arena = builder.arena

    def head_bytes(self) -> int:
        return self.lm_head.rows * self.lm_head.width * DTYPE.itemsize

    def factor_bytes(self, modules: tuple[str, ...], factor: str) -> int:
        """The modules' `factor_in` or `factor_out`, true ranks; a dense module has no `factor_in`."""
        linears, total = self.config.linears(), 0
        for name in (f"model.layers.0.{module}" for module in modules):
            shape, rank = linears[name], self.config.ranks.get(name)
            if factor == "factor_in":
                total += 0 if rank is None else rank * shape.in_features
            else:
                total += shape.out_features * (shape.in_features if rank is None else rank)
        return total * DTYPE.itemsize


#: Drawn once for all batch sizes.
weights = cache(Weights)


class Vectors:
    """What lies between the launches of a step: random, as after a launch that wrote it."""

    def __init__(self, config: ModelConfig, batch: int):
        self.batch = batch
        self.hidden = torch.randn(batch, config.hidden_size, device=DEVICE)
        self.norm = torch.randn(config.hidden_size, device=DEVICE)
        self.scaled = in_two_parts(self.hidden * self.norm, DTYPE)
        self.squares = self.hidden.square().unflatten(1, (-1, SQUARES_GROUP)).sum(-1)
        rows = max(config.vocab_size, config.hidden_size, config.intermediate_size)
        self.splits = SplitWorkspace.allocate(rows, MAX_SPLITS, DEVICE)

    def parts(self, width: int) -> Tensor:
        """Random numbers, [batch, 2, width]."""
        return in_two_parts(torch.randn(self.batch, width, device=DEVICE), DTYPE)


def settings(op: str, rows: int, *widths: int) -> GemvConfig:
    return gemv_rule(Launch.of(op, rows, *widths))


def label(launch: str, shape: str, structure: str, batch: int) -> str:
    """ "project o: llama-7b uniform 0.5 x 8"."""
    return f"{launch}: {shape} {structure}{'' if structure == 'dense' else f' {KEEP_RATIO:g}'} x {batch}"
