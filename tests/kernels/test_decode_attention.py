"""The decode attention kernel against the reference in float32, on the GPU or in Triton's interpreter."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton")

from thinrank.kernels import reference
from thinrank.kernels.decode_attention import (
    DecodeWorkspace,
    decode_attention,
    decode_attention_workspace,
    num_splits,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")

#: Around every boundary of a block, in one batch.
CONTEXTS = (1, 63, 64, 65, 511, 640)

#: The reference gets the same rounded q, k and v and computes in float32.
#: float32: only the order of summation differs. 16 bit: the output is rounded once (half an ulp of values of
#: about 1: 2^-9 in bfloat16, 2^-12 in float16), and grouped heads round the weights of the values too, which
#: are at most 1; a sum of weights that is 1 keeps that below one more half ulp of the largest |v| (about 4).
TOLERANCES = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


#: Triton 3.6's interpreter keeps bfloat16 as integers and multiplies those.
NO_BFLOAT16_DOT = pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has no bfloat16 tl.dot")


class Problem:
    """Random q and a cache in which everything that no context covers is NaN; tables in random order."""

    def __init__(
        self,
        contexts: tuple[int, ...],
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        q_dtype: torch.dtype | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(heads * 1000 + head_dim)
        needed = [-(-context // 64) for context in contexts]
        spare = 3
        order = torch.randperm(sum(needed) + spare, generator=generator, dtype=torch.int32)
        blocks = iter(order[spare:].split(needed))
        poisoned = int(order[0])
        # One column more than needed, and a row stride that is wider still.
        wide = torch.full((len(contexts), max(needed) + 4), poisoned, dtype=torch.int32)
        for table, count in zip(wide, needed, strict=True):
            table[:count] = next(blocks)
        caches = []
        for _ in range(2):
            cache = torch.full((len(order), kv_heads, 64, head_dim), NAN)
            for table, context in zip(wide.tolist(), contexts, strict=True):
                for start in range(0, context, 64):
                    rows = min(64, context - start)
                    values = torch.randn(kv_heads, rows, head_dim, generator=generator)
                    cache[table[start // 64], :, :rows] = values
            caches.append(cache.to(DEVICE, dtype))
        self.keys, self.values = caches
        self.tables = wide.to(DEVICE)[:, : max(needed) + 1]
        # A slice of a wider buffer, as the packed q, k, v are.
        packed = torch.randn(len(contexts), heads + 2 * kv_heads, head_dim, generator=generator)
        self.q = packed.to(DEVICE, q_dtype or dtype)[:, :heads]
        self.contexts = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
        self.scale = head_dim**-0.5

    def workspace(self, batch: int | None = None) -> DecodeWorkspace:
        """batch: rows that it is for; None: as many as there are."""
        heads, kv_heads, head_dim = self.q.shape[1], self.keys.shape[1], self.q.shape[2]
        workspace = decode_attention_workspace(batch or len(self.q), heads, kv_heads, head_dim, DEVICE)
        workspace.partials.fill_(NAN)
        workspace.stats.fill_(NAN)
        return workspace

    def run(
        self,
        window: int | None = None,
        rows: slice = slice(None),
        workspace: DecodeWorkspace | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        q = self.q[rows]
        if out is None:
            out = torch.empty(len(q), q.shape[1] * q.shape[2], dtype=q.dtype, device=DEVICE)
        out.fill_(NAN)
        workspace = workspace or self.workspace()
        result = decode_attention(
            q,
            self.keys,
            self.values,
            self.tables[rows],
            self.contexts[rows],
            scale=self.scale,
            window=window,
            out=out,
            workspace=workspace,
        )
        assert result is out
        assert not workspace.counters.any(), "the last program resets the counters"
        return out

    def expected(self, window: int | None = None) -> Tensor:
        out = reference.paged_attention(
            self.q.float(),
            self.keys.float(),
            self.values.float(),
            self.tables.long(),
            [1] * len(self.q),
            self.contexts.tolist(),
            self.scale,
            window,
        )
        return out.flatten(1)


def assert_matches(out: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(out.float(), expected, atol=TOLERANCES[out.dtype], rtol=TOLERANCES[out.dtype])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [
        *((1, 1, 96), (1, 1, 128), (1, 1, 256), (2, 2, 64)),
        *((7, 1, 64), (4, 1, 96), (8, 1, 128), (8, 1, 256), (17, 1, 64)),
    ],
)
def test_every_context_in_one_batch(heads: int, kv_heads: int, head_dim: int) -> None:
    problem = Problem(CONTEXTS, heads, kv_heads, head_dim, torch.float32)
    assert_matches(problem.run(), problem.expected())


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    [
        (2, 2, 64, torch.bfloat16),
        (2, 2, 64, torch.float16),
        (7, 1, 96, torch.float16),
        (8, 2, 128, torch.float16),
        pytest.param(7, 1, 96, torch.bfloat16, marks=NO_BFLOAT16_DOT),
        pytest.param(8, 2, 128, torch.bfloat16, marks=NO_BFLOAT16_DOT),
    ],
)
def test_dtypes(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    problem = Problem((1, 65, 640), heads, kv_heads, head_dim, dtype)
    assert_matches(problem.run(), problem.expected())


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 1), (8, 1)])
@pytest.mark.parametrize("parts", [False, True])
def test_float32_queries_over_a_16_bit_cache(heads: int, kv_heads: int, parts: bool) -> None:
    """Neither the query nor the probabilities are rounded to the cache's dtype: 1e-4, float16 would give 1e-3.

    parts: the output as the next GEMV reads it, two float16 numbers each.
    """
    problem = Problem((1, 130), heads, kv_heads, 64, torch.float16, q_dtype=torch.float32)
    out = torch.empty(2, 2, heads * 64, dtype=torch.float16, device=DEVICE) if parts else None
    result = problem.run(out=out)
    result = result.float().sum(1) if parts else result
    torch.testing.assert_close(result, problem.expected(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("window", [1, 64, 65, 200, 10_000])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 1)])
def test_window(heads: int, kv_heads: int, window: int) -> None:
    problem = Problem((1, 65, 300), heads, kv_heads, 64, torch.float32)
    expected = problem.expected(window)
    # Blocks before the window are not touched.
    for table, context in zip(problem.tables.tolist(), problem.contexts.tolist(), strict=True):
        for block in table[: max(0, context - window) // 64]:
            problem.keys[block], problem.values[block] = NAN, NAN
    assert_matches(problem.run(window), expected)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1)])
def test_more_blocks_than_splits(heads: int, kv_heads: int) -> None:
    """Every split takes two blocks, the last one what is left."""
    contexts = (64 * num_splits(heads, kv_heads) + 1, 64 * num_splits(heads, kv_heads))
    problem = Problem(contexts, heads, kv_heads, 64, torch.float32)
    assert_matches(problem.run(), problem.expected())


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 1)])
def test_one_workspace_serves_every_length(heads: int, kv_heads: int) -> None:
    workspace = Problem((1, 1, 1), heads, kv_heads, 64, torch.float32).workspace()
    for contexts in ((1, 65, 300), (300, 1, 64), (200,), (1, 65, 300)):
        problem = Problem(contexts, heads, kv_heads, 64, torch.float32)
        assert_matches(problem.run(workspace=workspace), problem.expected())


@pytest.mark.parametrize(("heads", "kv_heads", "dtype"), [(1, 1, torch.bfloat16), (4, 1, torch.float16)])
def test_a_row_does_not_depend_on_its_batch(heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    problem = Problem((200, 65, 1, 129), heads, kv_heads, 64, dtype)
    batch = problem.run()
    for row in range(4):
        assert torch.equal(problem.run(rows=slice(row, row + 1))[0], batch[row])


@pytest.mark.parametrize(("heads", "kv_heads", "batch"), [(16, 16, 64), (16, 4, 16)])
def test_a_workspace_for_many_rows(heads: int, kv_heads: int, batch: int) -> None:
    """It has fewer splits, and a row is the same bit for bit in any batch that uses it."""
    problem = Problem((300, 1), heads, kv_heads, 64, torch.float32)
    workspace = problem.workspace(batch)
    assert workspace.partials.shape[2] < problem.workspace().partials.shape[2]
    out = problem.run(workspace=workspace)
    assert_matches(out, problem.expected())
    for row in range(2):
        assert torch.equal(problem.run(rows=slice(row, row + 1), workspace=workspace)[0], out[row])


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2)])
def test_an_empty_row_reads_nothing(heads: int, kv_heads: int) -> None:
    """A captured graph's batch may be wider than what runs: length 0, any block table."""
    problem = Problem((64, 70), heads, kv_heads, 64, torch.float32)
    problem.contexts[0] = 0
    problem.tables[0] = 2**30
    out = problem.run()
    assert not out[0].any()
    assert_matches(out[1:], problem_row(problem, 1))


def problem_row(problem: Problem, row: int) -> Tensor:
    problem.q, problem.tables = problem.q[row : row + 1], problem.tables[row : row + 1]
    problem.contexts = problem.contexts[row : row + 1]
    return problem.expected()


def test_large_scores_do_not_overflow() -> None:
    problem = Problem((200,), 2, 2, 64, torch.float32)
    problem.scale = 100.0
    assert_matches(problem.run(), problem.expected())


def test_wrong_arguments() -> None:
    problem = Problem((5, 70), 4, 2, 64, torch.float32)
    workspace = problem.workspace()
    arguments = {
        "q": problem.q,
        "key_cache": problem.keys,
        "value_cache": problem.values,
        "block_tables": problem.tables,
        "context_lens": problem.contexts,
        "scale": 0.1,
        "out": torch.empty(2, 256, device=DEVICE),
        "workspace": workspace,
    }
    for change, message in (
        ({"q": problem.q[:, :3]}, "3 query heads are not a multiple of 2"),
        ({"q": problem.q[..., :32]}, "head_dim is 32"),
        ({"q": problem.q[0]}, "q has 2 dimensions"),
        ({"q": problem.q.transpose(0, 2).contiguous().transpose(0, 2)}, "last stride of q"),
        ({"q": problem.q.double()}, "float64"),
        ({"key_cache": problem.keys[:, :, :32]}, "blocks are 32 x 64"),
        ({"value_cache": problem.values.half()}, "same shape, strides and dtype"),
        ({"block_tables": problem.tables.long()}, "block_tables must be int32"),
        ({"context_lens": problem.contexts[:1]}, "context_lens 1"),
        ({"out": torch.empty(2, 4, 64, device=DEVICE)}, "out is"),
        ({"window": 0}, "window is 0"),
        ({"scale": 0.0}, "scale is 0"),
        ({"workspace": decode_attention_workspace(1, 4, 2, 64, DEVICE)}, "the workspace is for"),
        ({"workspace": decode_attention_workspace(2, 2, 2, 64, DEVICE)}, "the workspace is for"),
    ):
        with pytest.raises(ValueError, match=message):
            decode_attention(**(arguments | change))


def test_num_splits_depends_on_the_shape() -> None:
    assert num_splits(32, 32) == 32  # LLaMA-7B: 1024 programs
    assert num_splits(40, 40) == 26  # LLaMA-13B: 1040
    assert num_splits(32, 8) == 32  # Llama-3-8B: 256
    assert num_splits(9, 3) == 32  # SmolLM2-135M
    assert num_splits(71, 1) == 64
    assert num_splits(4096, 4096) == 1
    assert [num_splits(32, 32, batch) for batch in (1, 2, 4, 8)] == [32] * 4


def test_num_splits_of_many_rows() -> None:
    """About 4 * 8 * 132 programs of one warp, or 4 * 2 * 132 of four; never more splits than a single row has."""
    assert [num_splits(32, 32, batch) for batch in (16, 32, 64)] == [8, 4, 2]
    assert [num_splits(32, 8, batch) for batch in (16, 32, 64)] == [8, 4, 2]
    assert [num_splits(40, 40, batch) for batch in (16, 32, 64)] == [6, 3, 1]
    assert [num_splits(9, 3, batch) for batch in (16, 32, 64)] == [22, 11, 5]
    assert num_splits(71, 1, 16) == 64


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [
        (32, 32, 128),
        (40, 40, 128),
        (32, 8, 128),
        (28, 4, 128),
        (9, 3, 64),
        (32, 32, 96),
        (8, 4, 256),
        (16, 16, 256),
    ],
)
def test_full_size(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    contexts = (1, 512, 513, 2047, 8192, 16_384, 100, 4097)
    problem = Problem(contexts, heads, kv_heads, head_dim, dtype)
    for window in (None, 4096):
        out = problem.run(window)
        assert_matches(out, problem.expected(window))
        for row in (0, 3, 5):
            assert torch.equal(problem.run(window, slice(row, row + 1))[0], out[row])


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [16, 32, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 32, 128), (32, 8, 128), (9, 3, 64)])
def test_full_size_of_many_rows(heads: int, kv_heads: int, head_dim: int, batch: int) -> None:
    contexts = (8192, *(1 + 97 * row % 1500 for row in range(1, batch)))
    problem = Problem(contexts, heads, kv_heads, head_dim, torch.bfloat16)
    for window in (None, 256):
        assert_matches(problem.run(window), problem.expected(window))


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 32), (32, 8)])
def test_one_graph_serves_every_length(heads: int, kv_heads: int) -> None:
    """Captured once, with programmatic dependent launch where the card has it; replayed as contexts grow."""
    problem = Problem((2048, 2048), heads, kv_heads, 128, torch.bfloat16)
    workspace = problem.workspace()
    out = torch.empty(2, heads * 128, dtype=torch.bfloat16, device=DEVICE)
    pdl = torch.cuda.get_device_capability() >= (9, 0)

    def step() -> None:
        for _ in range(3):  # as layers do: the workspace is used again at once
            decode_attention(
                problem.q, problem.keys, problem.values, problem.tables, problem.contexts,
                scale=problem.scale, out=out, workspace=workspace, pdl=pdl,
            )  # fmt: skip

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in ((1, 64), (65, 2048), (1000, 1), (2047, 129)):
        problem.contexts.copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(NAN)
        graph.replay()
        assert_matches(out, problem.expected())
        assert not workspace.counters.any()
