"""What an engine has done and is doing, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """num_running, num_waiting: sequences. kv_cache_usage: share of the blocks that somebody holds, 0 to 1.

    The rest counts from the engine's start. prefix_cache_queries, prefix_cache_hits: prompt tokens looked up in the
    prefix cache, and those of them that were there. num_preemptions: how often a sequence lost its blocks.
    prompt_tokens: of the requests that have their first token, each prompt once. generation_tokens: of all sequences.
    """

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_preemptions: int
    prompt_tokens: int
    generation_tokens: int
