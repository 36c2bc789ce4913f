"""Low-rank checkpoints in transformers: once this module is imported, `AutoModelForCausalLM.from_pretrained` loads
thinrank folders and `save_pretrained` writes them.

transformers chooses a loader by `quant_method` in the config. Nothing is quantised here: before the weights are read,
each low-rank module becomes a pair of ordinary `nn.Linear`s, with the names of the format (docs/format.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checkpoint.format import QUANT_METHOD, LowRankSection, factor_in_name, factor_out_name, guard_name
from ..checkpoint.load import open_checkpoint
from ..errors import CheckpointError, OutputError, UnsupportedModelError
from ..model.layers import TensorSource
from ..model.registry import architecture_of


class LowRankLinear(nn.Module):
    """y = factor_out(factor_in(x)).

    shared: other modules have the same `factor_in.weight`. weight: the guard of the format, [0].
    """

    def __init__(self, in_features: int, out_features: int, rank: int, bias: bool, shared: bool):
        super().__init__()
        self.shared = shared
        self.factor_in = nn.Linear(in_features, rank, bias=False)
        self.factor_out = nn.Linear(rank, out_features, bias=bias)
        self.weight: Tensor
        self.register_buffer("weight", torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.factor_out(self.factor_in(x))
        return y

    def __setattr__(self, name: str, value: Any) -> None:
        """PEFT puts an adapter around a factor by assigning it. Merged into a weight that other modules share, it
        would change them too, so the module gets a weight of its own."""
        super().__setattr__(name, value)
        if name == "factor_in" and self.shared and hasattr(value, "base_layer"):
            linear = value.get_base_layer()
            linear.weight = nn.Parameter(
                linear.weight.detach().clone(), requires_grad=linear.weight.requires_grad
            )


@register_quantization_config(QUANT_METHOD)
class ThinrankConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The `quantization_config` of a folder. Raises CheckpointError naming the entry that is wrong."""

    def __init__(self, **section: Any):
        self.quant_method = QUANT_METHOD
        self.section = LowRankSection.from_json({"quant_method": QUANT_METHOD, **section})

    def to_dict(self) -> dict[str, Any]:
        return self.section.to_json()


@register_quantizer(QUANT_METHOD)
class ThinrankQuantizer(HfQuantizer):  # type: ignore[misc]
    """Builds the low-rank modules of a folder, and turns them back into the format's tensors.

    Raises what `open_checkpoint` raises: transformers itself would only warn about a missing tensor, and draw random
    numbers for it.
    """

    requires_calibration = True  # a dense model is refused; thinrank compress makes it low-rank
    is_trainable = True
    is_qat_trainable = True
    is_compileable = True

    quantization_config: ThinrankConfig

    def is_serializable(self) -> bool:
        return True

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, *, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        self._check(model)
        if not checkpoint_files:
            raise CheckpointError("a low-rank model is made from weights alone", "name the folder it lies in")
        stored = open_checkpoint(Path(checkpoint_files[0]).parent).tensors
        self._stored_dtypes = {name: tensor.dtype for name, tensor in stored.items()}
        section = self.quantization_config.section
        shared = {*section.tied_factors, *section.tied_factors.values()}
        for module, rank in section.ranks.items():
            dense = model.get_submodule(module)
            low_rank = LowRankLinear(
                dense.in_features,
                dense.out_features,
                rank,
                dense.bias is not None,
                shared=factor_in_name(module) in shared,
            )
            model.set_submodule(module, low_rank)
        model.all_tied_weights_keys.update(section.tied_factors)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        # Shared by now. An adapter around a factor changes its name, and transformers would fail to look it up.
        for name in self.quantization_config.section.tied_factors:
            model.all_tied_weights_keys.pop(name, None)
        # The factors are plain numbers: `.half()` and training without adapters need no refusal.
        model.is_quantized = False

    def get_state_dict_and_metadata(
        self, model: PreTrainedModel
    ) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        """The format's tensors; the config, which transformers writes next, gets the ties that there are now."""
        if getattr(model, "_hf_peft_config_loaded", False):
            return None, {}  # transformers writes the adapter alone
        tensors = model.state_dict()
        section = self.quantization_config.section
        for name in [name(module) for module in section.ranks for name in (factor_in_name, factor_out_name)]:
            if name not in tensors:
                raise OutputError(
                    f"the model has no {name}: it carries an adapter",
                    "merge_and_unload() it first, or save the adapter with the PeftModel's save_pretrained",
                )
        ties = equal_factors(tensors.__getitem__, section.tied_factors)
        self.quantization_config.section = section = replace(section, tied_factors=ties)
        tied = {*ties, *model.all_tied_weights_keys}  # a tied lm_head
        tensors = {
            name: self._as_stored(name, tensor) for name, tensor in tensors.items() if name not in tied
        }
        for module in section.ranks:
            # With memory of its own: transformers takes tensors at one address for tied, and empty ones have none.
            dtype = tensors[factor_out_name(module)].dtype
            tensors[guard_name(module)] = torch.empty(1, dtype=dtype)[:0]
        return tensors, {}

    def _check(self, model: PreTrainedModel) -> None:
        if getattr(model.config, "distributed_config", None) is not None:
            raise UnsupportedModelError(
                "transformers' tensor parallelism does not know low-rank modules",
                "use device_map, or one device",
            )
        expected = architecture_of(model.config.to_dict()).class_name
        if expected not in [cls.__name__ for cls in type(model).__mro__]:
            raise UnsupportedModelError(
                f"the folder holds a {expected}, not a {type(model).__name__}",
                "load it with AutoModelForCausalLM",
            )

    def _as_stored(self, name: str, tensor: Tensor) -> Tensor:
        """A folder of several dtypes is loaded in the widest; a tensor that still fits the one that it was stored in is
        stored in it again. Views of a decoder's arena (takeover.py) are copied: transformers takes them for tied."""
        if tensor.untyped_storage().nbytes() > tensor.nbytes and not tensor.is_meta:
            tensor = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
        stored = self._stored_dtypes.get(name, tensor.dtype)
        widest = max(self._stored_dtypes.values(), key=lambda dtype: dtype.itemsize)
        if tensor.is_meta or tensor.dtype != widest or stored.itemsize >= widest.itemsize:
            return tensor
        narrow = tensor.to(stored)
        return narrow if torch.equal(narrow.to(widest), tensor) else tensor


def equal_factors(get: TensorSource, tied_factors: Mapping[str, str]) -> dict[str, str]:
    """Of factors that were tied, those that are still equal: tensor name -> the first one of its value.

    They no longer are once an adapter has been merged into one of them.
    """
    groups: dict[str, list[str]] = {}
    for name, holder in tied_factors.items():
        groups.setdefault(holder, [holder]).append(name)
    ties = {}
    for names in groups.values():
        distinct: list[str] = []
        for name in names:
            equal = [first for first in distinct if same(get(first), get(name))]
            if equal:
                ties[name] = equal[0]
            else:
                distinct.append(name)
    return ties


def same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() or torch.equal(a, b)
