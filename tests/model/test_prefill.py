"""Prefill of the packed decoder against the plain decoder in float32 arithmetic: every structure, uneven batches."""

import pytest
import torch

pytest.importorskip("triton")

from thinrank.bench.shapes import STRUCTURES, plain_decoder, random_model, reference_decoder
from thinrank.config import BLOCK_SIZE
from thinrank.engine.kv_cache import allocate_kv_cache
from thinrank.model.batch import ForwardBatch, PagedContext
from thinrank.model.packed_decoder import PackedDecoder

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def packed_decoder(model):
    return PackedDecoder.build(model.config, model.get, model.dtype, DEVICE, 1024)


def random_sequences(lengths, vocab_size):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (length,), generator=generator).to(DEVICE) for length in lengths]


def chunk(sequences, spans):
    """Tokens start to end of each sequence, packed; sequence s owns the blocks s, s + count, s + 2 count, ..."""
    count, width = len(sequences), -(-max(end for _, end in spans) // BLOCK_SIZE)
    tables = torch.arange(count, device=DEVICE).unsqueeze(1) + count * torch.arange(width, device=DEVICE)
    positions = [torch.arange(*span, device=DEVICE) for span in spans]
    slots = [
        table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for table, position in zip(tables, positions, strict=True)
    ]
    return ForwardBatch(
        torch.cat([sequence[start:end] for sequence, (start, end) in zip(sequences, spans, strict=True)]),
        torch.cat(positions),
        tuple(end - start for start, end in spans),
        PagedContext(tuple(end for _, end in spans), tables, torch.cat(slots)),
    )


def errors(decoder, expected, sequences, ends):
    """Relative L2 errors of the logits: without a cache, of a first chunk, and of the rest after it."""
    lengths = [len(sequence) for sequence in sequences]
    cache = allocate_kv_cache(decoder.config, 2 * len(sequences) * 16, decoder.dtype, DEVICE)
    whole = decoder(ForwardBatch.whole_sequences(sequences, DEVICE))
    spans = [[(0, end) for end in ends], list(zip(ends, lengths, strict=True))]
    first, rest = (decoder(chunk(sequences, span), cache) for span in spans)
    parts = expected.split(lengths)
    references = [
        expected,
        *(torch.cat([part[slice(*s)] for part, s in zip(parts, span, strict=True)]) for span in spans),
    ]
    return [
        float((logits - reference).norm() / reference.norm())
        for logits, reference in zip((whole, first, rest), references, strict=True)
    ]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_uneven_batches(structure):
    """In float32 to 1e-5: sums in another order."""
    model = random_model("tiny", structure, 0.5, torch.float32, DEVICE, seed=0)
    sequences = random_sequences((70, 33), model.config.vocab_size)
    expected = reference_decoder(model)(ForwardBatch.whole_sequences(sequences, DEVICE))
    assert max(errors(packed_decoder(model), expected, sequences, (50, 20))) < 1e-5


@torch.inference_mode()
def check_rounding(shape, structure, dtype, lengths, ends):
    """No further from float32 than the plain decoder in the same dtype, which rounds at the same places.

    A factor of 1.5 on its error leaves room for GEMMs and attention that sum in another order.
    """
    model = random_model(shape, structure, 0.5, dtype, DEVICE, seed=0)
    sequences = random_sequences(lengths, model.config.vocab_size)
    whole = ForwardBatch.whole_sequences(sequences, DEVICE)
    expected = reference_decoder(model)(whole)
    plain = plain_decoder(model)(whole)
    bound = 1.5 * float((plain - expected).norm() / expected.norm())
    assert max(errors(packed_decoder(model), expected, sequences, ends)) < bound


def test_float16():
    check_rounding("tiny", "mixed", torch.float16, (70, 33), (50, 20))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_sixteen_bits(structure, dtype):
    check_rounding("smollm2-135m", structure, dtype, (600, 77), (512, 64))
