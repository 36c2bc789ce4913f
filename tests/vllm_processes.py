"""What vLLM's processes keep, and what they exchange. vLLM imports this into each of them, by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def parameter_bytes(model: nn.Module) -> int:
    """A parameter that layers share counts once. On a CPU vLLM hides the weights of its own dense layers inside a
    prepared product; these count by the sizes that the layer says it has."""
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

    hidden = [
        module.input_size_per_partition * module.output_size_per_partition * module.weight.itemsize
        for module in model.modules()
        if isinstance(module, LinearBase)
        and isinstance(module.quant_method, UnquantizedLinearMethod)
        and not module.weight.numel()
    ]
    return sum(parameter.nbytes for parameter in model.parameters()) + sum(hidden)


class Observer:
    """Methods of a vLLM worker, for `collective_rpc`."""

    def parameter_bytes(self) -> int:
        return parameter_bytes(self.model_runner.model)  # type: ignore[attr-defined]

    def record_exchanges(self) -> None:
        from vllm.distributed import get_tp_group

        group = get_tp_group()
        self.exchanges: dict[str, list[tuple[tuple[int, ...], int]]] = {}
        for name in ("all_reduce", "all_gather"):
            self._record(group, name)

    def _record(self, group: Any, name: str) -> None:
        exchange: Callable[..., Any] = getattr(group, name)
        seen = self.exchanges[name] = []

        def recording(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append((tuple(tensor.shape), tensor.nbytes))
            return exchange(tensor, *args, **kwargs)

        setattr(group, name, recording)

    def recorded_exchanges(self) -> dict[str, list[tuple[tuple[int, ...], int]]]:
        """Shape and bytes of the tensors that this process put in, by the kind of exchange."""
        return self.exchanges
