"""What must hold of an engine's blocks between any two steps."""

from collections import Counter

from thinrank.engine.engine import Engine
from thinrank.engine.kv_cache import blocks_for
from thinrank.engine.sequence import Sequence


def check_invariants(engine: Engine, arrival: dict[Sequence, int] | None = None) -> None:
    """arrival: the number of each sequence in order of arrival, if that is to be checked as well."""
    pool, scheduler, cache = engine.pool, engine.scheduler, engine.prefix_cache
    held = Counter(block for sequence in scheduler.running for block in sequence.block_table)
    assert [held[block] for block in range(pool.num_blocks)] == pool._holders
    free, kept = set(pool._free), set(pool._free_kept)
    assert len(free) == len(pool._free) and not free & kept and not (free | kept) & set(held)
    assert free | kept | set(held) == set(range(pool.num_blocks)), "a block is lost"
    findable = {} if cache is None else cache._hash_of
    assert {block for block in range(pool.num_blocks) if pool._kept[block]} == set(findable)
    assert kept <= set(findable) and not free & set(findable)
    if cache is not None:
        assert {block: key for key, block in cache._block_of.items()} == findable
    for sequence in scheduler.running:
        assert len(set(sequence.block_table)) == len(sequence.block_table)
        assert blocks_for(sequence.num_computed) <= len(sequence.block_table)
        assert len(sequence.block_table) <= blocks_for(len(sequence.token_ids) + 1)
        assert 0 <= sequence.num_computed < len(sequence.token_ids)
    for sequence in scheduler.waiting:
        assert not sequence.block_table and sequence.num_computed == 0
    assert len(scheduler.running) <= scheduler.config.max_num_seqs
    if arrival is not None:
        numbers = [arrival[sequence] for sequence in scheduler.sequences]
        assert numbers == sorted(numbers), "somebody was overtaken"


def check_empty(engine: Engine) -> None:
    """Nothing is left of any request but what the prefix cache may find again."""
    check_invariants(engine)
    assert not engine.has_unfinished
    assert engine.pool.num_free == engine.pool.num_blocks, "blocks were lost"
