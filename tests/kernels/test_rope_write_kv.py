"""rope_write_kv against its reference."""

import pytest
import torch

pytest.importorskip("triton")

from thinrank.kernels import reference as ops
from thinrank.kernels.rope_write_kv import rope_write_kv

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-5
TOKENS = 5

#: Both compute in float32; the result is rounded once, to half an ulp of values up to 8.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
EXTRAS = {"plain": (False, False), "bias": (True, False), "q/k norm": (False, True), "both": (True, True)}


def arguments(heads, kv_heads, head_dim, dtype, extras, cached=True, packed=False):
    """Random ones; `packed`: q, k and v are columns of one matrix. What nobody may write is NaN."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE)

    has_bias, has_norm = EXTRAS[extras]
    sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    outputs = randn(TOKENS, sum(sizes)).to(dtype)
    q, k, v = outputs.split(sizes, dim=1)
    if not packed:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    angles = randn(300, head_dim // 2)
    keys, values = (
        torch.full((4, kv_heads, 64, head_dim), float("nan"), dtype=dtype, device=DEVICE) for _ in range(2)
    )
    slots = torch.tensor([200, 63, 64, 0, 255], device=DEVICE)  # ends of blocks, in no order
    return {
        "q": q,
        "k": k,
        "v": v,
        "bias": randn(sum(sizes)) if has_bias else None,
        "qk_norm": randn(2, head_dim) if has_norm else None,
        "eps": EPS,
        "rotation": torch.stack([angles.cos(), angles.sin()], dim=1),
        "positions": torch.tensor([299, 0, 1, 130, 64], device=DEVICE),
        "key_cache": keys if cached else None,
        "value_cache": values if cached else None,
        "slots": slots if cached else None,
    }


def check(heads, kv_heads, head_dim, dtype, extras, **options):
    mine = arguments(heads, kv_heads, head_dim, dtype, extras, **options)
    wide = arguments(heads, kv_heads, head_dim, dtype, extras, **options)
    written = ("q", "k", "v", "key_cache", "value_cache")
    wide |= {name: wide[name].float() for name in written if wide[name] is not None}
    ops.rope_write_kv(**wide)
    rope_write_kv(**mine)
    tolerance = TOLERANCES[dtype]
    for name in written:
        if mine[name] is not None:
            torch.testing.assert_close(
                mine[name].float(), wide[name], atol=tolerance, rtol=tolerance, equal_nan=True
            )


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (7, 1)])
def test_shapes(heads, kv_heads, head_dim, extras):
    check(heads, kv_heads, head_dim, torch.float32, extras)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("extras", EXTRAS)
def test_dtypes(extras, dtype):
    check(6, 3, 64, dtype, extras, packed=True)


@pytest.mark.parametrize("extras", EXTRAS)
def test_without_a_cache(extras):
    check(3, 1, 64, torch.float32, extras, cached=False, packed=True)


def test_positions_of_32_bits():
    """As a decode step has them."""
    wide, narrow = (arguments(4, 2, 64, torch.float16, "both") for _ in range(2))
    narrow["positions"] = narrow["positions"].int()
    rope_write_kv(**wide)
    rope_write_kv(**narrow)
    assert torch.equal(wide["q"], narrow["q"]) and torch.equal(wide["k"], narrow["k"])


def test_attention_reads_what_the_cache_holds():
    """Keys and values beside the cache and in it are the same bits."""
    given = arguments(4, 2, 64, torch.float16, "both")
    rope_write_kv(**given)
    block, row = given["slots"] // 64, given["slots"] % 64
    for name, cache in (("k", "key_cache"), ("v", "value_cache")):
        assert torch.equal(given[cache][block, :, row].flatten(1), given[name])
