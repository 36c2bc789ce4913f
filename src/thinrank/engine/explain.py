"""What an engine runs, and why: decoder, cache, graphs, and the launches of a decode step.

Nothing chooses anew after this: what runs is what is explained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..config import BLOCK_SIZE
from ..model.decoder import Decoder
from .engine import Engine

if TYPE_CHECKING:
    from ..model.explain import LaunchGroup


@dataclass(frozen=True)
class Explanation:
    """decoder: "packed" or "reference"; reason: why that one. kv_blocks: of `BLOCK_SIZE` tokens. graphs: batch sizes
    whose decode step is captured. prompt_graphs: up to how many new tokens prompts are. pdl: whether kernels start
    before the one before them has ended. prefill: how prompts attend. table: the file of launch settings, or "none".
    groups: the launches of a decode step; none for the reference decoder, which runs PyTorch's operations one by one.
    """

    decoder: str
    reason: str
    device: str
    dtype: str
    kv_blocks: int
    max_model_len: int
    graphs: tuple[int, ...]
    prompt_graphs: tuple[int, ...]
    pdl: bool
    prefill: str
    table: str
    groups: tuple[LaunchGroup, ...]

    def lines(self) -> list[str]:
        """For a person."""
        graphs = "none"
        if self.graphs:
            graphs = f"a decode step at batch {', '.join(map(str, self.graphs))}; prompts of up to "
            graphs += f"{', '.join(map(str, self.prompt_graphs))} tokens"
        lines = [
            f"decoder    {self.decoder}: {self.reason}",
            f"device     {self.device}, {self.dtype}",
            f"KV cache   {self.kv_blocks} blocks of {BLOCK_SIZE} tokens; up to {self.max_model_len} tokens a sequence",
            f"graphs     {graphs}",
            f"prefill    {self.prefill}",
        ]
        if self.groups:
            lines += [
                f"launch     programmatic dependent launch {'on' if self.pdl else 'off'}",
                f"table      {self.table}",
            ]
        rows = [launch for group in self.groups for launch in group.launches]
        op, shape, settings = (
            max((len(getattr(row, name)) for row in rows), default=0) for name in ("op", "shape", "settings")
        )
        for group in self.groups:
            lines.append(group.name)
            lines += [
                f"  {row.op:{op}}  {row.shape:{shape}}  {row.settings:{settings}}  {row.source}".rstrip()
                for row in group.launches
            ]
        return lines


def explain(engine: Engine) -> Explanation:
    """What `engine.step` will run."""
    decoder = engine.decoder
    on_gpu = decoder.device.type == "cuda"
    groups: tuple[LaunchGroup, ...] = ()
    pdl, table = False, "none"
    if isinstance(decoder, Decoder):
        reason = "it was asked for" if on_gpu else "the kernels of the packed decoder need an NVIDIA GPU"
        prefill = "PyTorch's operations, as decode"
    else:
        from ..model.explain import describe_prefill, describe_step

        reason = f"the device is {decoder.device.type}"
        prefill, groups = describe_prefill(decoder), describe_step(decoder)
        if engine.prompt_graphs is not None:
            prefill = f"in graphs by prefill_attention; beyond them {prefill}"
        pdl, table = decoder.pdl, decoder.launch_settings.source
    return Explanation(
        decoder="reference" if isinstance(decoder, Decoder) else "packed",
        reason=reason,
        device=torch.cuda.get_device_name(decoder.device) if on_gpu else "cpu",
        dtype=str(decoder.dtype).removeprefix("torch."),
        kv_blocks=engine.pool.num_blocks,
        max_model_len=engine.max_model_len,
        graphs=() if engine.graphs is None else engine.graphs.batch_sizes,
        prompt_graphs=() if engine.prompt_graphs is None else engine.prompt_graphs.tokens,
        pdl=pdl,
        prefill=prefill,
        table=table,
        groups=groups,
    )
