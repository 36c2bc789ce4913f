"""Every operation of the decoder and the sampler in plain PyTorch.

This is the specification of the ops, the path that runs on a CPU, and the oracle of the kernel tests.
It knows nothing about models, requests or which kernel runs where.

Numbers: activations enter and leave in float32. A GEMM rounds its input to the dtype of its weight,
attention rounds queries to the dtype of its keys; everything else computes in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    x: [..., features], any float dtype. weight: [features]. Returns float32 of x's shape.
    """
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps)


def add_rms_norm(
    residual: Tensor, projection: Tensor | None, bias: Tensor | None, weight: Tensor, eps: float
) -> Tensor:
    """residual += projection + bias, in place, then `rms_norm` of the sum.

    residual: float32 [..., features]. projection: the same shape in any float dtype, or None for nothing to add.
    bias: [features] or None. Returns float32 of residual's shape.
    """
    if projection is not None:
        residual += projection.float() if bias is None else projection.float() + bias
    return rms_norm(residual, weight, eps)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """weight @ x + bias. x: [..., in]; weight: [out, in]; bias: [out]. Returns float32 [..., out]."""
    return F.linear(x.to(weight.dtype), weight, bias).float()


def low_rank_linear(x: Tensor, factor_in: Tensor, factor_out: Tensor, bias: Tensor | None = None) -> Tensor:
    """factor_out @ (factor_in @ x) + bias; the latent between is in the factors' dtype.

    x: [..., in]; factor_in: [rank, in]; factor_out: [out, rank]; bias: [out]. Returns float32 [..., out].
    """
    latent = F.linear(x.to(factor_in.dtype), factor_in)  # [..., rank]
    return F.linear(latent.to(factor_out.dtype), factor_out, bias).float()


def in_two_parts(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 [batch, width] -> [batch, 2, width]: rounded to `dtype`, and what the rounding left; what GEMVs read."""
    rounded = x.to(dtype)
    return torch.stack([rounded, (x - rounded.float()).to(dtype)], dim=1)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise, with silu(x) = x * sigmoid(x)."""
    return F.silu(gate) * up


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + head_dim/2]) by an angle per token and i (the "half" layout).

    out[i] = x[i] cos[i] - x[i + head_dim/2] sin[i]
    out[i + head_dim/2] = x[i + head_dim/2] cos[i] + x[i] sin[i]
    x: float32 [tokens, heads, head_dim]. cos, sin: float32 [tokens, head_dim/2]. Returns x's shape.
    """
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def slots(positions: Tensor, block_tables: Tensor, block_size: int) -> Tensor:
    """Where the token at positions[b] of sequence b goes: int64 [batch], block * block_size + row.

    positions: int [batch]. block_tables: int [batch, blocks].
    """
    block = block_tables.long().gather(1, positions.long().unsqueeze(1) // block_size).squeeze(1)
    return block * block_size + positions % block_size


def write_kv(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Store the keys and values of new tokens in their blocks, in place, rounded to the cache's dtype.

    k, v: [tokens, kv_heads, head_dim]. caches: [blocks, kv_heads, block_size, head_dim].
    slots: int64 [tokens]; slot s is row s % block_size of block s // block_size.
    """
    block_size = key_cache.shape[2]
    block, row = slots // block_size, slots % block_size
    key_cache[block, :, row] = k.to(key_cache.dtype)
    value_cache[block, :, row] = v.to(value_cache.dtype)


def rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    qk_norm: Tensor | None,
    eps: float,
    rotation: Tensor,
    positions: Tensor,
    key_cache: Tensor | None,
    value_cache: Tensor | None,
    slots: Tensor | None,
) -> None:
    """From the outputs of the projections to what attention reads, in place.

    q, k and v plus their biases, q and k through `rms_norm` (if there is a qk_norm) and `apply_rope`, k and v
    through `write_kv` (if there is a cache). q: [tokens, heads * head_dim]; k, v: [tokens, kv_heads * head_dim];
    rounded to their dtype once, at the end. bias: [columns of q, k and v together] or None. qk_norm: [2,
    head_dim] or None. rotation: float32 [positions, 2, head_dim/2], cos and sin of every position. positions:
    int64 [tokens].
    """
    head_dim = 2 * rotation.shape[2]
    biases = (0, 0, 0) if bias is None else bias.split([part.shape[1] for part in (q, k, v)])
    wide = [
        (part.float() + add).unflatten(1, (-1, head_dim)) for part, add in zip((q, k, v), biases, strict=True)
    ]
    cos, sin = rotation[positions].unbind(1)
    for index in (0, 1):
        normed = wide[index] if qk_norm is None else rms_norm(wide[index], qk_norm[index], eps)
        wide[index] = apply_rope(normed, cos, sin)
    for part, value in zip((q, k, v), wide, strict=True):
        part.copy_(value.flatten(1))
    if key_cache is not None and value_cache is not None and slots is not None:
        write_kv(wide[1], wide[2], key_cache, value_cache, slots)


def attention(
    q: Tensor, k: Tensor, v: Tensor, query_lens: Sequence[int], scale: float, window: int | None = None
) -> Tensor:
    """Causal attention within each of several whole sequences that lie one after the other.

    q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim], heads a multiple of kv_heads, query
    head h reads kv head h // (heads / kv_heads). query_lens: tokens of each sequence, summing to `tokens`.
    window: a token sees this many tokens, itself included; None: all before it.
    Returns float32 [tokens, heads, head_dim]. Sequences of equal length share one call.
    """
    if len(set(query_lens)) > 1:
        parts = zip(*(tensor.split(list(query_lens)) for tensor in (q, k, v)), strict=True)
        return torch.cat([attention(q, k, v, (len(q),), scale, window) for q, k, v in parts])
    q, k, v = (x.unflatten(0, (len(query_lens), -1)).transpose(1, 2) for x in (q, k, v))
    return _attend(q, k, v, scale, window).transpose(1, 2).flatten(0, 1)


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Causal attention of the last tokens of several sequences over keys and values kept in blocks.

    q: [tokens, heads, head_dim], the sequences one after the other. caches: [blocks, kv_heads, block_size,
    head_dim], already holding the new tokens. block_tables: int64 [sequences, at least ceil(context_len /
    block_size)]. query_lens: new tokens of a sequence; context_lens: all its tokens, the new ones included.
    window: as in `attention`. Returns float32 [tokens, heads, head_dim].

    Rows of a block beyond the context are never read into the sum: they may hold anything, NaN included.
    """
    block_size = key_cache.shape[2]
    outputs = []
    for query, table, query_len, context_len in zip(
        q.split(list(query_lens)), block_tables.tolist(), query_lens, context_lens, strict=True
    ):
        # The first token that the first query still sees; blocks before it are not touched.
        start = 0 if window is None else max(0, context_len - query_len + 1 - window)
        skipped = start // block_size
        blocks = table[skipped : -(-context_len // block_size)]
        rows = slice(start - skipped * block_size, context_len - skipped * block_size)
        k, v = (
            # Several times faster than indexing with a tensor of blocks.
            torch.cat([cache[block] for block in blocks], dim=1)[:, rows].unsqueeze(0)
            for cache in (key_cache, value_cache)
        )  # [1, kv_heads, context, head_dim]
        out = _attend(query.transpose(0, 1).unsqueeze(0), k, v, scale, window)
        outputs.append(out.squeeze(0).transpose(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """q: [sequences, heads, queries, head_dim], the last `queries` of the [.., kv_heads, keys, ..] tokens."""
    heads, queries, kv_heads, keys = q.shape[1], q.shape[2], k.shape[1], k.shape[2]
    q, v = q.to(k.dtype), v.to(k.dtype)
    if queries == 1:
        # One query sees every key that was passed: no mask, and the heads of a group become the queries of
        # one head, so that keys are read once.
        grouped = q.reshape(q.shape[0], kv_heads, heads // kv_heads, -1)
        return F.scaled_dot_product_attention(grouped, k, v, scale=scale).reshape(q.shape).float()
    causal = queries == keys and (window is None or window >= keys)
    mask = None if causal else _causal_mask(queries, keys, window, q.device)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=heads != kv_heads
    ).float()


def _causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """bool [queries, keys]: True where the query may see the key."""
    query = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    distance = query - torch.arange(keys, device=device)
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


_MASK32 = 0xFFFFFFFF


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Philox4x32-10, a counter-based random generator: ten rounds of multiply, xor and swap.

    counter: int64 [..., 4] and key: int64 [..., 2] hold 32-bit words. Returns int64 [..., 4], 32-bit words.
    Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011).
    """
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key.unbind(-1)
    for _ in range(10):
        # int64 wraps around; the shifted high half is right after the mask.
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        high0, high1 = (product0 >> 32) & _MASK32, (product1 >> 32) & _MASK32
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & _MASK32, high0 ^ c3 ^ k1, product0 & _MASK32
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return torch.stack((c0, c1, c2, c3), dim=-1)


def philox_uniform(seed: Tensor, stream: Tensor, position: Tensor) -> Tensor:
    """A number in [0, 1) that depends on nothing but its three arguments.

    seed, stream, position: int64 [rows]; a seed is read as 64 bits, the others as 32.
    Returns float32 [rows], a multiple of 2^-24: the upper bits of the first word of
    philox(counter = (position, stream, 0, 0), key = seed).
    """
    zero = torch.zeros_like(position)
    counter = torch.stack((position & _MASK32, stream & _MASK32, zero, zero), dim=-1)
    key = torch.stack((seed & _MASK32, (seed >> 32) & _MASK32), dim=-1)
    return (philox(counter, key)[..., 0] >> 8).float() * 2.0**-24


def apply_penalties(
    logits: Tensor,
    prompt_counts: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Make tokens that occurred less likely.

    A logit l of a token that is in the prompt or the output becomes l / repetition if l > 0, else
    l * repetition (Keskar et al. 2019); then presence is subtracted once if it is in the output, and
    frequency as often as it is there. logits: float32 [rows, vocab]; counts: int64 [rows, vocab];
    penalties: float32 [rows]. Returns a new tensor.
    """
    seen = (prompt_counts + output_counts) > 0
    factor = torch.where(seen, repetition.unsqueeze(1), 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    logits = logits - presence.unsqueeze(1) * (output_counts > 0)
    return logits - frequency.unsqueeze(1) * output_counts


#: Weight of the most likely token. 2^20 tokens of this weight still sum up within int64.
WEIGHT_ONE = 2**42


def token_weights(logits: Tensor) -> Tensor:
    """floor(2^42 exp(logit - max)): probabilities as integers, so that a sum is exact in any order.

    A token that is 2^42 times less likely than the most likely one has weight 0 and is never drawn.
    logits: float32 [rows, vocab], at most 2^20 columns. Returns int64 [rows, vocab].
    """
    below = logits.double() - logits.amax(-1, keepdim=True).double()
    return (below.exp() * WEIGHT_ONE).long()


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Set the logits of unlikely tokens to -inf; the most likely token always stays.

    top_k: int64 [rows], keep the k largest (0 or less: all; ties are broken by the lower token id); then
    top_p: float32 [rows], of those the fewest whose probabilities sum to at least p (again lower ids first); then
    min_p: float32 [rows], of those the ones at least min_p times as likely as the most likely.
    Probabilities are `token_weights`.
    logits: float32 [rows, vocab], already divided by the temperature. Returns a new tensor.
    """
    vocab = logits.shape[-1]
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=logits.device)
    keep = rank < torch.where(top_k > 0, top_k, vocab).unsqueeze(1)
    weights = token_weights(ordered) * keep
    before = weights.cumsum(-1) - weights  # weight of all tokens that are more likely
    limit = (top_p.double() * weights.sum(-1).double()).ceil().long()
    keep &= (before < limit.unsqueeze(1)) | (top_p >= 1).unsqueeze(1)
    keep &= weights >= min_p.double().unsqueeze(1) * WEIGHT_ONE
    keep[:, 0] = True
    return logits.masked_fill(~torch.zeros_like(keep).scatter(-1, index, keep), float("-inf"))


def apply_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """(logits - max) / temperature. temperature: float32 [rows], above 0. Returns float32 [rows, vocab].

    The maximum goes first and the temperature is at least 1e-10, so that no temperature gives inf - inf.
    """
    return (logits - logits.amax(-1, keepdim=True)) / temperature.clamp(min=1e-10).unsqueeze(1)


def sample(logits: Tensor, uniform: Tensor) -> Tensor:
    """Invert the cumulative distribution: the first token whose cumulative weight exceeds `uniform` of the total.

    logits: float32 [rows, vocab]; uniform: float32 [rows] in [0, 1). Returns int64 [rows]. The sum runs over
    `token_weights` in the order of the vocabulary; a token of weight 0 is never chosen.
    """
    cumulative = token_weights(logits).cumsum(-1)
    target = (uniform.double() * cumulative[:, -1].double()).long()
    return torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1)
