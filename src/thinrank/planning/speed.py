"""How long a decode step takes: the bytes that it must read, and what each layer costs beside them.

A step reads its weights and the cache at a share of the card's bandwidth, and pays for every launch that has to
wait for the one before it. The second part does not shrink with the model: that is why half the bytes do not
halve the time, and why few bits help most on a slow card. Both numbers were fitted to measurements, so that every
one of them is predicted within `TOLERANCE`; tests/planning/test_measured.py repeats that for all of
benchmarks/results.

On other cards than the H200 low-rank and dense 16-bit steps were never measured: the predictions assume that they
reach the same share of the bandwidth and take the same time between launches.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Largest relative error of a prediction for what was measured.
TOLERANCE = 0.15

#: A step's growth with each further row beside its keys and values: a batch of 8 takes 1.1 times as long.
ROW_COST = 0.012
#: Rows that a decode step was measured with.
MAX_BATCH_SIZE = 8


@dataclass(frozen=True)
class Speed:
    """share: of the datasheet bandwidth, while bytes are read. layer_s: seconds that a layer costs beside that."""

    share: float
    layer_s: float

    def step_s(self, step_bytes: int, layers: int, bandwidth: float, batch_size: int = 1) -> float:
        """Seconds of one decode step. bandwidth: bytes/s of the datasheet."""
        one_row = step_bytes / (self.share * bandwidth) + layers * self.layer_s
        return one_row * (1 + ROW_COST * (batch_size - 1))


#: thinrank on an H200, benchmarks/results/h200_l*: nine launches a layer, 1.6 us each beside their bytes.
LOW_RANK = Speed(share=0.70, layer_s=14e-6)
#: The same files' `thinrank-dense`: fewer launches and longer ones.
DENSE = Speed(share=0.75, layer_s=4e-6)
#: gpt-fast, one number for int8 and int4. LLaMA-7B with 512 tokens on an H200: 5.19 and 3.51 ms/token (group 128).
#: Its README, on A100 80GB: 155.58 and 196.80 tok/s for Llama-2-7B, 19.13 and 25.25 for 70B (group 32).
#: Runtimes with better kernels for few bits exist: the truth is between this and the floor.
QUANTIZED = Speed(share=0.72, layer_s=78e-6)


def floor_s(step_bytes: int, bandwidth: float) -> float:
    """Seconds that no step can beat: its bytes at the datasheet's bandwidth."""
    return step_bytes / bandwidth
