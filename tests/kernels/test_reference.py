"""The reference ops against formulas written out, at odd sizes, with everything unused poisoned."""

import math

import pytest
import torch
from torch import Tensor

from thinrank.kernels import reference as ops

NAN = float("nan")


def test_rms_norm() -> None:
    x, weight = torch.randn(5, 37).to(torch.bfloat16), torch.rand(37).to(torch.bfloat16)
    out = ops.rms_norm(x, weight, 1e-5)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_linears(dtype: torch.dtype) -> None:
    x = torch.randn(3, 41)
    factor_in, factor_out = torch.randn(5, 41).to(dtype), torch.randn(23, 5).to(dtype)
    bias = torch.randn(23).to(dtype)
    tolerance = {"atol": 1e-4, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.3, "rtol": 2e-2}
    latent = x.double() @ factor_in.double().T
    out = ops.low_rank_linear(x, factor_in, factor_out, bias)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), latent @ factor_out.double().T + bias.double(), **tolerance)
    torch.testing.assert_close(ops.linear(x, factor_in).double(), latent, **tolerance)


def test_silu_mul() -> None:
    gate, up = torch.randn(3, 7), torch.randn(3, 7)
    torch.testing.assert_close(ops.silu_mul(gate, up), gate / (1 + torch.exp(-gate)) * up)


def test_rope_is_a_rotation_by_the_angle() -> None:
    x = torch.randn(2, 3, 10)
    angles = torch.rand(2, 5) * 6
    out = ops.apply_rope(x, angles.cos(), angles.sin())
    complex_x = torch.complex(x[..., :5], x[..., 5:])
    rotated = complex_x * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    torch.testing.assert_close(out, torch.cat((rotated.real, rotated.imag), -1))


def naive_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """One sequence, one query and head at a time, in float64; the queries are the last tokens."""
    out = torch.empty(q.shape, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for i in range(len(q)):
        end = len(k) - len(q) + i + 1
        start = 0 if window is None else max(0, end - window)
        for head in range(q.shape[1]):
            keys, values = (x[start:end, head // group].double() for x in (k, v))
            out[i, head] = (keys @ q[i, head].double() * scale).softmax(0) @ values
    return out.float()


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("lengths", [(9,), (7, 7), (3, 1, 12)])
def test_attention(lengths: tuple[int, ...], window: int | None) -> None:
    q, k, v = (
        torch.randn(sum(lengths), 6, 8),
        torch.randn(sum(lengths), 2, 8),
        torch.randn(sum(lengths), 2, 8),
    )
    expected = torch.cat(
        [
            naive_attention(*qkv, 0.3, window)
            for qkv in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        ]
    )
    torch.testing.assert_close(ops.attention(q, k, v, lengths, 0.3, window), expected)


@pytest.mark.parametrize("window", [None, 1, 5, 70])
@pytest.mark.parametrize("queries", [(1, 1, 1), (3, 1, 9)])
def test_paged_attention_reads_the_context_and_nothing_else(
    queries: tuple[int, ...], window: int | None
) -> None:
    block_size, contexts = 16, (33, 1, 48)
    tables = torch.tensor([[5, 0, 9, 3], [7, 3, 3, 3], [2, 8, 1, 3]])  # block 3 is padding
    keys, values = torch.full((10, 2, block_size, 8), NAN), torch.full((10, 2, block_size, 8), NAN)
    outputs = []
    q = torch.randn(sum(queries), 6, 8)
    queries = tuple(min(n, context) for n, context in zip(queries, contexts, strict=True))
    q = q[: sum(queries)]
    for table, context, query in zip(tables, contexts, q.split(queries), strict=True):
        k, v = torch.randn(context, 2, 8), torch.randn(context, 2, 8)
        slots = torch.stack([table[i // block_size] * block_size + i % block_size for i in range(context)])
        ops.write_kv(k, v, keys, values, slots)
        outputs.append(naive_attention(query, k, v, 0.3, window))
    out = ops.paged_attention(q, keys, values, tables, queries, contexts, 0.3, window)
    torch.testing.assert_close(out, torch.cat(outputs))
    assert keys[3].isnan().all(), "a block that belongs to nobody was written"


def test_write_kv_rounds_and_touches_only_its_slots() -> None:
    keys, values = (torch.full((3, 2, 4, 6), NAN, dtype=torch.bfloat16) for _ in range(2))
    k, v = torch.randn(2, 2, 6), torch.randn(2, 2, 6)
    ops.write_kv(k, v, keys, values, torch.tensor([10, 3]))
    assert torch.equal(keys[2, :, 2], k[0].to(torch.bfloat16))
    assert torch.equal(values[0, :, 3], v[1].to(torch.bfloat16))
    assert int(keys.isnan().sum()) == keys.numel() - k.numel()


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known answers that Random123, the authors' library, is tested with
        (
            (0, 0, 0, 0),
            (0, 0),
            (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert tuple(ops.philox(torch.tensor(counter), torch.tensor(key)).tolist()) == expected


def test_philox_uniform() -> None:
    n = 20000
    zeros, positions = torch.zeros(n, dtype=torch.int64), torch.arange(n)
    uniform = ops.philox_uniform(zeros - 1, zeros, positions)
    assert uniform.dtype == torch.float32 and uniform.min() >= 0 and uniform.max() < 1
    assert uniform.mean().item() == pytest.approx(0.5, abs=0.01)
    assert uniform.var().item() == pytest.approx(1 / 12, abs=0.003)
    for other in (
        ops.philox_uniform(zeros, zeros, positions),
        ops.philox_uniform(zeros - 1, zeros + 1, positions),
        ops.philox_uniform(zeros + 2**32 - 1, zeros, positions),  # the high half of the seed counts
    ):
        assert not torch.equal(uniform, other)


def test_weights_are_probabilities_as_integers() -> None:
    logits = torch.tensor([[5.0, 4.0, float("-inf"), 5.0, -24.0, -25.0]])
    weights = ops.token_weights(logits)
    assert weights.dtype == torch.int64
    expected = [2**42, int(2**42 * math.exp(-1)), 0, 2**42, 1, 0]  # exp(-29) * 2^42 = 1.1
    assert weights.tolist() == [expected]
    assert torch.equal(ops.token_weights(logits - 7), weights)


@pytest.mark.parametrize("count", [3, 7, 10, 49, 1000])
def test_top_p_of_equals_is_exact(count: int) -> None:
    """k of n equals reach k/n, without one more for the rounding of a sum. p is what float32 makes of k/n."""
    kept = count // 2
    p = torch.tensor([kept / count])
    p = p if float(p) <= kept / count else p.nextafter(torch.zeros(1))
    out = ops.filter_logits(torch.zeros(1, count), torch.tensor([0]), p, torch.zeros(1))
    assert out.isfinite().sum() == kept and out[0, :kept].isfinite().all()


def naive_filter(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    order = order[:top_k] if top_k > 0 else order
    weights = [math.exp(logits[i]) for i in order]
    probs = [weight / sum(weights) for weight in weights]
    kept, total = set(), 0.0
    for i, prob in zip(order, probs, strict=True):
        if total < top_p and prob >= min_p * probs[0]:
            kept.add(i)
        total += prob
    return kept


@pytest.mark.parametrize("top_k", [-1, 0, 1, 4, 50])
@pytest.mark.parametrize("top_p", [1e-6, 0.4, 0.95, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.2, 1.0])
def test_filter_logits(top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(2, 31) * 3
    other = torch.tensor([7])  # a second row with its own settings
    kept = ops.filter_logits(
        logits,
        torch.cat((torch.tensor([top_k]), other)),
        torch.tensor([top_p, 0.5]),
        torch.tensor([min_p, 0.1]),
    )
    for row, expected in enumerate(
        (
            naive_filter(logits[0].tolist(), top_k, top_p, min_p),
            naive_filter(logits[1].tolist(), 7, 0.5, 0.1),
        )
    ):
        assert set(kept[row].isfinite().nonzero().flatten().tolist()) == expected
        assert torch.equal(kept[row][kept[row].isfinite()], logits[row][kept[row].isfinite()])


def test_top_k_breaks_ties_by_the_lower_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0]])
    kept = ops.filter_logits(logits, torch.tensor([2]), torch.ones(1), torch.zeros(1))
    assert kept.isfinite().tolist() == [[False, True, True, False]]


def test_penalties() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, -1.0, 0.5]])
    prompt, output = torch.tensor([[1, 1, 0, 0, 0]]), torch.tensor([[0, 0, 3, 1, 0]])
    out = ops.apply_penalties(
        logits, prompt, output, torch.tensor([2.0]), torch.tensor([0.5]), torch.tensor([0.1])
    )
    expected = [2 / 2, -2 * 2, 1 / 2 - 0.5 - 0.3, -1 * 2 - 0.5 - 0.1, 0.5]
    torch.testing.assert_close(out, torch.tensor([expected]))


@pytest.mark.parametrize("temperature", [1e-30, 1e-7, 0.5, 1.0, 1e6])
def test_temperature_gives_no_nan(temperature: float) -> None:
    logits = torch.tensor([[3.0, 90.0, float("-inf"), -90.0]])
    probs = ops.apply_temperature(logits, torch.tensor([temperature])).softmax(-1)
    expected = (logits.double() / max(temperature, 1e-10)).softmax(-1).float()
    torch.testing.assert_close(probs, expected, atol=1e-6, rtol=1e-4)


def test_sample_inverts_the_cumulative_distribution() -> None:
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    uniform = torch.tensor([0.0, 0.2499, 0.2501, 0.7499, 0.7501, 1 - 2**-24])
    tokens = ops.sample(probs.log().expand(6, -1), uniform)
    assert tokens.tolist() == [1, 1, 3, 3, 4, 4]
