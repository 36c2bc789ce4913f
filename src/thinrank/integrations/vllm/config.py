"""vLLM's view of a folder's `quantization_config`: which of its layers are low-rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from ...checkpoint.format import QUANT_METHOD, LowRankSection
from ...checkpoint.load import open_checkpoint
from .linear import LowRankLinearMethod
from .packing import Factors


class ThinrankConfig(QuantizationConfig):  # type: ignore[misc]
    """Raises CheckpointError naming the entry of the section that is wrong."""

    def __init__(self, section: LowRankSection):
        super().__init__()
        self.section = section
        self.factors = Factors()

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ThinrankConfig:
        return cls(LowRankSection.from_json(config))

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Before anything is built, compare all names and shapes in a folder with its config: a missing norm or dense
        matrix would be as silent as a missing factor. Raises what `open_checkpoint` raises.

        Of a model that vLLM downloads, only the factors are checked, while they are loaded.
        """
        if Path(model_name).is_dir():
            open_checkpoint(model_name)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """None where vLLM does what it would do without a config: in embeddings and in attention."""
        if not isinstance(layer, LinearBase | ParallelLMHead):
            return None
        parent, dot, name = prefix.rpartition(".")
        modules = [f"{parent}{dot}{each}" for each in self.packed_modules_mapping.get(name, [name])]
        if any(module in self.section.ranks for module in modules):
            return LowRankLinearMethod(self.section, self.factors, modules)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None

    def get_name(self) -> str:
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # plain matrix products run anywhere

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []
