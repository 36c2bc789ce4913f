"""Forced tokens through the cache, chunk by chunk and step by step, against one pass without a cache."""

from functools import cache

import pytest
import torch

from thinrank.bench.shapes import fast_decoder, random_model
from thinrank.config import EngineConfig
from thinrank.engine.engine import Engine
from thinrank.engine.sequence import Sequence
from thinrank.eval.forcing import decode_logits, max_rows, prefill_logits
from thinrank.model.batch import ForwardBatch
from thinrank.model.decoder import Decoder

CPU = torch.device("cpu")
IDS = torch.randint(192, (3, 80), generator=torch.Generator().manual_seed(0))
#: float32 throughout: only the order of summation differs.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@cache
def decoder() -> Decoder:
    model = fast_decoder(random_model("tiny", "mixed", 0.5, torch.float32, CPU, 0))
    assert isinstance(model, Decoder)
    return model


def engine() -> Engine:
    return Engine(decoder(), EngineConfig(max_model_len=128, max_num_seqs=4))


def whole(ids: torch.Tensor) -> torch.Tensor:
    return decoder()(ForwardBatch.whole_sequences([ids], CPU))


@pytest.mark.parametrize("chunk", [None, 24, 64, 1])
def test_prefill(chunk: int | None) -> None:
    used = engine()
    passes = list(prefill_logits(used, IDS[0].tolist(), chunk))
    assert [len(each) for each in passes][:-1] == [chunk] * (len(passes) - 1)
    torch.testing.assert_close(torch.cat(passes), whole(IDS[0]), **CLOSE)
    assert used.pool.num_free == used.pool.num_blocks


@pytest.mark.parametrize("prompt_lens", [(60, 60, 60), (1, 50, 64)])
def test_decode(prompt_lens: tuple[int, ...]) -> None:
    used = engine()
    prompts = [row[:length].tolist() for row, length in zip(IDS, prompt_lens, strict=True)]
    forced = [row[length : length + 16].tolist() for row, length in zip(IDS, prompt_lens, strict=True)]
    logits = torch.stack([step.clone() for step in decode_logits(used, prompts, forced)], dim=1)
    for row, length, ours in zip(IDS, prompt_lens, logits, strict=True):
        torch.testing.assert_close(ours, whole(row)[length - 1 : length + 15], **CLOSE)
    assert used.pool.num_free == used.pool.num_blocks


def test_blocks_come_back_when_nobody_listens_on() -> None:
    used = engine()
    steps = decode_logits(used, [[1, 2]], [[3, 4, 5]])
    next(steps)
    assert used.pool.num_free < used.pool.num_blocks
    steps.close()
    assert used.pool.num_free == used.pool.num_blocks


class Graphs:
    """Steps as captured graphs do them: they go on with the tokens that they were told, or their own."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def forward(self, sequences: list[Sequence]) -> torch.Tensor:
        if [len(row) for row in self.rows] != [len(sequence.token_ids) for sequence in sequences]:
            self.rows = [list(sequence.token_ids) for sequence in sequences]
        logits = torch.stack([whole(torch.tensor(row))[-1] for row in self.rows])
        for row, token_id in zip(self.rows, logits.argmax(-1).tolist(), strict=True):
            row.append(token_id)
        return logits

    def replace_tokens(self, token_ids: list[int]) -> None:
        for row, token_id in zip(self.rows, token_ids, strict=True):
            row[-1] = token_id


def test_graphs_are_told_the_forced_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    used = engine()
    monkeypatch.setattr(used, "graphs", Graphs())
    prompts, forced = IDS[:, :60].tolist(), IDS[:, 60:].tolist()
    logits = torch.stack([step.clone() for step in decode_logits(used, prompts, forced)], dim=1)
    expected = torch.stack([whole(row)[59:79] for row in IDS])
    torch.testing.assert_close(logits, expected, **CLOSE)


def test_max_rows() -> None:
    used = engine()
    assert used.pool.num_blocks == 8
    assert [max_rows(used, length) for length in (64, 65, 128, 600)] == [8, 4, 4, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3])
def test_the_real_graph(rows: int) -> None:
    """16-bit kernels against plain PyTorch in float32: the tolerance is that of the benchmarks' gate."""
    from thinrank.bench.gate import BOUNDS
    from thinrank.bench.shapes import reference_decoder

    model = random_model("tiny", "mixed", 0.5, torch.bfloat16, torch.device("cuda", 0), 0)
    used = Engine(fast_decoder(model), EngineConfig(max_model_len=128, max_num_seqs=4))
    assert used.graphs is not None
    ids = IDS[:rows].cuda()
    steps = decode_logits(used, ids[:, :60].tolist(), ids[:, 60:].tolist())
    logits = torch.stack([step.clone() for step in steps], dim=1)
    expected = reference_decoder(model)(ForwardBatch.whole_sequences(list(ids), model.device))
    expected = expected.unflatten(0, (rows, 80))[:, 59:79]
    assert (logits - expected).norm() / expected.norm() < BOUNDS[torch.bfloat16]
