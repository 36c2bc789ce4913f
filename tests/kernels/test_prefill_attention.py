"""The prefill attention kernel against the reference in float32, on the GPU or in Triton's interpreter."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton")

from thinrank.kernels import reference
from thinrank.kernels.prefill_attention import prefill_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")

#: The reference gets the same rounded q, k and v and computes in float32.
#: float32: only the order of summation differs. 16 bit: the weights of the values (at most 1) and the output
#: are rounded once each: about an ulp of the largest |v| (about 4).
TOLERANCES = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


def check(
    chunks: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
) -> None:
    """chunks: (history, new tokens) of each sequence. Everything that no query may see is NaN."""
    generator = torch.Generator().manual_seed(7)
    query_lens = [new for _, new in chunks]
    contexts = [history + new for history, new in chunks]
    needed = [-(-context // 64) for context in contexts]
    order = torch.randperm(sum(needed) + 2, generator=generator, dtype=torch.int32)
    wide = torch.full((len(chunks), max(needed) + 3), int(order[0]), dtype=torch.int32)
    for row, blocks in enumerate(order[2:].split(needed)):
        wide[row, : needed[row]] = blocks
    caches = []
    for _ in range(2):
        cache = torch.full((len(order), kv_heads, 64, head_dim), NAN)
        for row, (history, new) in enumerate(chunks):
            first = 0 if window is None else max(0, history + 1 - window)
            for block in range(first // 64, needed[row]):
                rows = min(64, history + new - block * 64)
                values = torch.randn(kv_heads, rows, head_dim, generator=generator)
                cache[wide[row, block], :, :rows] = values
        caches.append(cache.to(DEVICE, dtype))
    packed = torch.randn(sum(query_lens), heads + 2 * kv_heads, head_dim, generator=generator)
    q = packed.to(DEVICE, dtype)[:, :heads]
    tables = wide.to(DEVICE)[:, : max(needed) + 1]
    start = torch.tensor([0, *query_lens]).cumsum(0).to(DEVICE, torch.int32)
    out = torch.full((len(q), heads * head_dim), NAN, dtype=dtype, device=DEVICE)
    result = prefill_attention(
        q,
        *caches,
        tables,
        start,
        torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
        max_query_len=max(query_lens),
        scale=head_dim**-0.5,
        window=window,
        out=out,
    )
    assert result is out
    expected = reference.paged_attention(
        q.float(),
        *(cache.float() for cache in caches),
        tables.long(),
        query_lens,
        contexts,
        head_dim**-0.5,
        window,
    )
    assert_matches(out, expected.flatten(1))


def assert_matches(out: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(out.float(), expected, atol=TOLERANCES[out.dtype], rtol=TOLERANCES[out.dtype])


#: Triton 3.6's interpreter keeps bfloat16 as integers and multiplies those.
BFLOAT16 = pytest.param(
    torch.bfloat16,
    marks=pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has no bfloat16 tl.dot"),
)

#: History 0, 1, 64 and 100 (a chunk that starts at, beside and within a block), and lengths around a tile's.
CHUNKS = [(0, 1), (0, 65), (1, 63), (64, 64), (100, 33), (64, 1)]


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 1)])
def test_several_sequences_with_history(heads: int, kv_heads: int, head_dim: int) -> None:
    check(CHUNKS, heads, kv_heads, head_dim)


@pytest.mark.parametrize(("heads", "kv_heads"), [(7, 1), (8, 1)])
def test_groups(heads: int, kv_heads: int) -> None:
    check([(100, 65), (0, 3)], heads, kv_heads, 64)


@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_dtypes(dtype: torch.dtype, head_dim: int) -> None:
    """With 16 bits a tile is 128 queries: the second chunk has a whole one and a rest."""
    check([(1, 70), (100, 130)], 4, 2, head_dim, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16])
@pytest.mark.parametrize("window", [1, 5, 64, 65, 150, 10_000])
def test_window(window: int, dtype: torch.dtype) -> None:
    check([(0, 3), (100, 33), (300, 150)], 2, 1, 64, dtype, window)


def test_large_scores_do_not_overflow() -> None:
    keys = torch.randn(1, 1, 64, 64, device=DEVICE) * 100
    q = torch.randn(64, 1, 64, device=DEVICE) * 100
    out = torch.empty(64, 64, device=DEVICE)
    one = torch.tensor([64], dtype=torch.int32, device=DEVICE)
    tables = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    start = torch.tensor([0, 64], dtype=torch.int32, device=DEVICE)
    prefill_attention(q, keys, keys, tables, start, one, max_query_len=64, scale=1.0, out=out)
    expected = reference.paged_attention(q, keys, keys, tables.long(), [64], [64], 1.0)
    torch.testing.assert_close(out, expected.flatten(1), atol=1e-3, rtol=1e-4)  # values of about 100


def test_wrong_arguments() -> None:
    cache = torch.zeros(2, 2, 64, 64, device=DEVICE)
    arguments = {
        "q": torch.zeros(5, 4, 64, device=DEVICE),
        "key_cache": cache,
        "value_cache": cache,
        "block_tables": torch.zeros(2, 1, dtype=torch.int32, device=DEVICE),
        "query_start": torch.tensor([0, 2, 5], dtype=torch.int32, device=DEVICE),
        "context_lens": torch.tensor([2, 3], dtype=torch.int32, device=DEVICE),
        "max_query_len": 3,
        "scale": 0.1,
        "out": torch.zeros(5, 256, device=DEVICE),
    }
    for change, message in (
        ({"query_start": arguments["query_start"][:2]}, "one more query_start"),
        ({"query_start": arguments["query_start"].long()}, "query_start must be contiguous int32"),
        ({"block_tables": arguments["block_tables"][:1]}, "as many block_tables"),
        ({"max_query_len": 0}, "max_query_len is 0"),
        ({"window": 0}, "window is 0"),
        ({"scale": -1.0}, "scale is -1"),
        ({"out": torch.zeros(5, 4, 64, device=DEVICE)}, "out is"),
    ):
        with pytest.raises(ValueError, match=message):
            prefill_attention(**(arguments | change))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(32, 32, 128), (32, 8, 128), (28, 4, 128), (9, 3, 64), (32, 32, 96), (8, 4, 256)],
)
@pytest.mark.parametrize("window", [None, 1000])
def test_full_size(heads: int, kv_heads: int, head_dim: int, window: int | None, dtype: torch.dtype) -> None:
    check([(0, 2048), (2048, 1024), (100, 513), (777, 1)], heads, kv_heads, head_dim, dtype, window)
