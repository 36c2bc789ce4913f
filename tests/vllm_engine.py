"""vLLM in this process, on a CPU, small. `ENVIRONMENT` must be set before vLLM is imported."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # other programs have the cores too
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # an engine in this process starts in seconds, and its errors arrive here
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def engine(folder: Path, **settings: Any) -> Any:
    """vLLM's LLM. The process can have one at a time."""
    import vllm

    gc.collect()  # the one before
    settings = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True} | settings
    return vllm.LLM(str(folder), max_model_len=256, max_num_seqs=8, seed=0, **settings)


def generate(llm: Any, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    """Greedy tokens of each prompt, beyond the end of a text if need be."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
