"""What vLLM's processes add up among them. vLLM imports this into each of them, by its name."""

from __future__ import annotations

from typing import Any


class ReductionCounter:
    """Methods of a vLLM worker, for `collective_rpc`."""

    def record_reductions(self) -> None:
        from vllm.distributed import get_tp_group

        group = get_tp_group()
        all_reduce = group.all_reduce
        self.reduced: list[tuple[tuple[int, ...], int]] = []

        def recording(tensor: Any) -> Any:
            self.reduced.append((tuple(tensor.shape), tensor.nbytes))
            return all_reduce(tensor)

        group.all_reduce = recording

    def recorded_reductions(self) -> list[tuple[tuple[int, ...], int]]:
        return self.reduced
