"""The decode graphs: the same tokens as step by step without them, greedy and sampled, in any company."""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from mixed_decoders import mixed_decoders
from thinrank.bench.timing import count_launches
from thinrank.config import EngineConfig, SamplingParams
from thinrank.engine.chunks import Chunks
from thinrank.engine.decode_graphs import DecodeGraphs
from thinrank.engine.engine import Engine
from thinrank.engine.graph import DecodeGraph
from thinrank.engine.kv_cache import allocate_kv_cache, blocks_for
from thinrank.engine.sampler import sample
from thinrank.engine.scheduler import Scheduled
from thinrank.engine.sequence import Sequence
from thinrank.errors import ThinrankError
from thinrank.kernels.decode_attention import num_splits
from thinrank.model.batch import ForwardBatch
from thinrank.model.decoder import Decoder
from thinrank.model.packed_decoder import PackedDecoder
from tiny_models import tiny_config

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB, POSITIONS = 512, 2304
#: Rows of every kind that the device chooses for.
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.9, "top_k": 100, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 0},
    {"temperature": 2.0},
]
#: And of every kind that it does not.
HOST_SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0, "repetition_penalty": 1.5},
    {"temperature": 0, "frequency_penalty": 0.5},
    {"temperature": 0.8, "logprobs": 2},
    {"temperature": 1.0, "min_tokens": 6},
]


@cache
def models(heads: int = 4, kv_heads: int = 2) -> tuple[Decoder, PackedDecoder]:
    """The same random float32 weights in both decoders; every third module is dense."""
    raw = tiny_config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=192,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        max_position_embeddings=POSITIONS,
    )
    return mixed_decoders(raw, DEVICE)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    ids: list[int] = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
    return ids


@dataclass
class Rows:
    """Sequences whose prompts, but for the last token, lie in a cache of their own."""

    decoder: PackedDecoder
    sequences: list[Sequence]

    def __post_init__(self) -> None:
        self.width = max(blocks_for(sequence.max_len) for sequence in self.sequences)
        self.idle = len(self.sequences) * self.width
        self.cache = allocate_kv_cache(self.decoder.config, self.idle + 1, self.decoder.dtype, DEVICE)
        for row, sequence in enumerate(self.sequences):
            # in no order: a row's blocks lie a batch apart, the last one first
            sequence.block_table = list(range(row, self.idle, len(self.sequences)))[::-1]
            batch = Chunks.of([Scheduled(sequence, len(sequence.token_ids) - 1)]).batch(DEVICE)
            self.decoder.hidden(batch, self.cache)
            sequence.num_computed = len(sequence.token_ids) - 1

    def graphs(self, size: int) -> DecodeGraphs:
        """One graph; `state` is what it works on."""
        self.state = self.decoder.decode_state(size, self.width, self.idle)
        return DecodeGraphs([DecodeGraph(self.decoder, self.cache, self.state, self.idle)])

    def append(self, token_ids: list[int]) -> None:
        for sequence, token_id in zip(self.sequences, token_ids, strict=True):
            sequence.token_ids.append(token_id)
            sequence.num_computed += 1


def rows(decoder: PackedDecoder, prompts: list[list[int]], settings: list[dict[str, Any]]) -> Rows:
    params = [SamplingParams(max_tokens=64, **setting) for setting in settings]
    return Rows(
        decoder,
        [
            Sequence("r", row, list(ids), param, frozenset(), 64, 2**64 - 1 - row)
            for row, (ids, param) in enumerate(zip(prompts, params, strict=True))
        ],
    )


def run(
    decoder: Decoder | PackedDecoder, *requests: tuple[list[int], SamplingParams], max_num_seqs: int = 8
) -> list[list[int]]:
    """What an engine answers to all requests together."""
    engine = Engine(decoder, EngineConfig(max_num_seqs=max_num_seqs))
    assert (engine.graphs is None) == isinstance(decoder, Decoder)
    ids = [engine.add(*request) for request in requests]
    answers = drain(engine)
    return [answers[request_id] for request_id in ids]


def drain(engine: Engine) -> dict[str, list[int]]:
    answers: dict[str, list[int]] = defaultdict(list)
    while engine.has_unfinished:
        for output in engine.step():
            answers[output.request_id].append(output.token_id)
    return answers


def requests(settings: list[dict[str, Any]], max_tokens: int = 24) -> list[tuple[list[int], SamplingParams]]:
    """Prompts around the end of a block."""
    return [
        (prompt(56 + 3 * i, i), SamplingParams(**{"max_tokens": max_tokens, "seed": 10 + i, **setting}))
        for i, setting in enumerate(settings)
    ]


@torch.inference_mode()
def test_sampled_tokens_are_those_of_the_torch_sampler() -> None:
    """On the same logits, for rows of every kind in one batch; positions and seeds of 64 bits included."""
    _, packed = models()
    prompts = [prompt(58 + row, row) for row in range(len(SETTINGS))]
    made = rows(packed, prompts, SETTINGS)
    graphs = made.graphs(8)
    for _ in range(12):
        token_ids = graphs.step(made.sequences)
        assert token_ids == sample(made.state.logits.clone(), made.sequences)[0]
        made.append(token_ids)


@torch.inference_mode()
@pytest.mark.parametrize("count", [1, 3, 8])
def test_running_ahead_changes_nothing(count: int) -> None:
    _, packed = models()
    prompts = [prompt(60, row) for row in range(count)]
    answers = []
    for ahead in (False, True):
        made = rows(packed, prompts, SETTINGS[:count])
        graphs = made.graphs(next(size for size in (1, 4, 8) if size >= count))
        for _ in range(12):
            made.append(graphs.step(made.sequences, made.sequences if ahead else ()))
        answers.append([sequence.token_ids for sequence in made.sequences])
    assert answers[0] == answers[1]


@torch.inference_mode()
@pytest.mark.parametrize("told", [False, True], ids=["forgotten", "told"])
def test_a_row_that_leaves_and_one_that_comes(told: bool) -> None:
    """Settings are those of the row that is there. What was launched ahead for other rows is forgotten; if the step
    ahead was told who comes, no step is launched twice, and a row that stays keeps its token on the device."""
    _, packed = models()
    prompts = [prompt(50 + row, row) for row in range(3)]
    settings = [SETTINGS[2], SETTINGS[1], SETTINGS[3]]
    apart = []
    for index in range(3):
        made = rows(packed, prompts, settings)
        graphs, made.sequences = made.graphs(2), made.sequences[index : index + 1]
        for _ in range(8):
            made.append(graphs.step(made.sequences))
        apart.append(made.sequences[0].token_ids)
    made = rows(packed, prompts, settings)
    graphs, everyone = made.graphs(2), made.sequences
    plan = [[0, 1]] * 4 + [[1, 2]] * 4 + [[2, 0]] * 4
    for present, after in zip(plan, [*plan[1:], []], strict=True):
        made.sequences = [everyone[row] for row in present]
        following = [everyone[row] for row in after]
        made.append(graphs.step(made.sequences, following if told else made.sequences))
    assert [sequence.token_ids for sequence in everyone] == apart


@torch.inference_mode()
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 4)])
@pytest.mark.parametrize("size", [1, 8])
def test_graph_eager_and_plain_agree_around_every_boundary(heads: int, kv_heads: int, size: int) -> None:
    """Contexts that cross the end of every block, and the one from which on a split holds two blocks.

    Graph and eager: bit for bit, as they launch the same kernels. The plain decoder sums in another order: float32
    logits of order one within 1e-3, and a greedy choice that is one of its best by that.
    """
    plain, packed = models(heads, kv_heads)
    last_block = num_splits(heads, kv_heads) + 2
    assert last_block * 64 + 8 <= POSITIONS, "the split boundary must be among the contexts"
    lengths = [64 * block - 2 for block in range(1, last_block + 1)]
    for start in range(0, len(lengths), size):
        prompts = [prompt(length) for length in lengths[start : start + size]]
        made, alike = (rows(packed, prompts, [{"temperature": 0}] * len(prompts)) for _ in range(2))
        graphs, state = made.graphs(size), packed.decode_state(size, alike.width, alike.idle)
        state.token_ids[: len(prompts)].copy_(torch.tensor([ids[-1] for ids in prompts]))
        state.positions[: len(prompts)].copy_(torch.tensor([len(ids) - 1 for ids in prompts]))
        state.context_lens.copy_(state.positions + 1)
        for row, sequence in enumerate(alike.sequences):
            table = torch.tensor(sequence.block_table, dtype=torch.int32)
            state.block_tables[row, : len(table)].copy_(table)
        logits = []
        for _ in range(5):
            token_ids = graphs.step(made.sequences)
            packed.decode_step(state, alike.cache)
            assert torch.equal(made.state.logits[: len(prompts)], state.logits[: len(prompts)])
            assert state.token_ids[: len(prompts)].tolist() == token_ids
            logits.append(state.logits[: len(prompts)].clone())
            made.append(token_ids)
        for row, sequence in enumerate(made.sequences):
            whole = torch.tensor(sequence.token_ids[:-1])
            expected = plain(ForwardBatch.whole_sequences([whole], DEVICE))[-5:]
            torch.testing.assert_close(
                torch.stack([step[row] for step in logits]), expected, atol=1e-3, rtol=1e-3
            )
            chosen = torch.tensor(sequence.token_ids[-5:], device=DEVICE)
            missed = expected.amax(-1) - expected.gather(-1, chosen[:, None])[:, 0]
            assert float(missed.max()) < 1e-3


def test_a_seed_gives_the_same_text_alone_and_in_a_batch() -> None:
    _, packed = models()
    asked = requests(
        [{"temperature": 1.0}, {"top_p": 0.9}, {"top_k": 30}, {"min_p": 0.1}, {"temperature": 0.5}]
    )
    assert run(packed, *asked) == [run(packed, request)[0] for request in asked]


def test_greedy_and_sampled_rows_together() -> None:
    """The plain decoder, without graphs, answers the same; more requests than the largest graph has rows."""
    plain, packed = models()
    asked = requests(SETTINGS + SETTINGS[2:5])
    answers = run(packed, *asked, max_num_seqs=11)
    assert answers == run(plain, *asked)
    assert answers[1] == run(packed, asked[1])[0]


def test_rows_that_the_device_cannot_choose_for() -> None:
    """Penalties, log-probabilities and min_tokens go through the torch sampler, neighbours included.

    min_tokens is over in the middle, and the batch goes on without the host.
    """
    plain, packed = models()
    asked = requests([*HOST_SETTINGS, SETTINGS[0], SETTINGS[1]])
    assert run(packed, *asked) == run(plain, *asked)
    for request in asked:
        assert run(packed, request) == run(plain, request)


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 1.0, "seed": 4}])
def test_five_identical_prompts_give_five_identical_answers(settings: dict[str, Any]) -> None:
    _, packed = models()
    answers = run(packed, *[(prompt(60), SamplingParams(max_tokens=40, **settings))] * 5)
    assert answers == [answers[0]] * 5
    assert len(set(answers[0])) > 5, "an answer of one repeated token would show little"


def test_two_engines_in_one_process() -> None:
    """Their steps alternate; each answers as if it were alone."""
    _, packed = models()
    asked = [requests(SETTINGS[:3]), requests([SETTINGS[3], SETTINGS[1]])]
    expected = [run(packed, *own) for own in asked]
    engines = [Engine(packed, EngineConfig(max_num_seqs=4)) for _ in asked]
    ids = [[engine.add(*request) for request in own] for engine, own in zip(engines, asked, strict=True)]
    answers: list[dict[str, list[int]]] = [defaultdict(list), defaultdict(list)]
    while any(engine.has_unfinished for engine in engines):
        for engine, own in zip(engines, answers, strict=True):
            for output in engine.step():
                own[output.request_id].append(output.token_id)
    assert [[own[i] for i in names] for own, names in zip(answers, ids, strict=True)] == expected


@pytest.mark.parametrize(
    ("settings", "graphs"), [({"temperature": 0}, 1), ({"temperature": 0.8, "top_p": 0.9, "top_k": 50}, 2)]
)
@pytest.mark.parametrize("count", [1, 5])
def test_launches_per_token(settings: dict[str, Any], graphs: int, count: int) -> None:
    """Graphs only, and no kernel beside them."""
    _, packed = models()
    engine = Engine(packed, EngineConfig(max_num_seqs=8))
    for i in range(count):
        engine.add(prompt(20, i), SamplingParams(max_tokens=64, seed=i, **settings))
    for _ in range(4):  # prefill, and the step that loads the rows
        engine.step()
    launches = count_launches(lambda: [engine.step() for _ in range(6)], DEVICE)
    assert (launches.kernels, launches.graphs) == (0, 6 * graphs)


@pytest.mark.parametrize("lengths", [(100,), (500,), (20, 30, 40)])
def test_short_prompts_are_one_launch(lengths: tuple[int, ...]) -> None:
    """And what brings them there and chooses the tokens, some twenty kernels: no launch a layer."""
    plain, packed = models()
    engine = Engine(packed, EngineConfig(max_num_seqs=4))
    asked = [(prompt(length), SamplingParams(max_tokens=3, temperature=0)) for length in lengths]
    ids = [engine.add(*request) for request in asked]
    answers: dict[str, list[int]] = defaultdict(list)

    def first() -> None:
        for output in engine.step():
            answers[output.request_id].append(output.token_id)

    launches = count_launches(first, DEVICE)
    assert launches.graphs == 1 and launches.kernels < 40
    for request_id, rest in drain(engine).items():
        answers[request_id] += rest
    assert [answers[request_id] for request_id in ids] == [run(plain, request)[0] for request in asked]


class CountedLoads:
    """How often rows were loaded into a graph."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.count, load = 0, DecodeGraph.load

        def counted(graph: DecodeGraph, *args: Any) -> None:
            self.count += 1
            load(graph, *args)

        monkeypatch.setattr(DecodeGraph, "load", counted)


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.95}])
def test_rows_grow_without_being_loaded_again(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over two ends of a block, each row at another step; from the second token on every step runs ahead."""
    plain, packed = models()
    asked = [(prompt(50 + 3 * i, i), SamplingParams(max_tokens=140, seed=i, **settings)) for i in range(3)]
    loads = CountedLoads(monkeypatch)
    assert run(packed, *asked) == run(plain, *asked)
    assert loads.count == 1


def test_requests_join_and_leave_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of one to eight rows and back; the tokens are those of each request alone."""
    _, packed = models()
    asked = [
        (ids, replace(params, max_tokens=8 + 9 * i))
        for i, (ids, params) in enumerate(requests(SETTINGS, max_tokens=60))
    ]
    expected = [run(packed, request)[0] for request in asked]
    loads = CountedLoads(monkeypatch)
    engine = Engine(packed, EngineConfig(max_num_seqs=8))
    answers: dict[str, list[int]] = defaultdict(list)
    ids = []
    for request in reversed(asked):
        ids.append(engine.add(*request))
        for _ in range(3):
            for output in engine.step():
                answers[output.request_id].append(output.token_id)
    for request_id, tokens in drain(engine).items():
        answers[request_id] += tokens
    assert [answers[request_id] for request_id in ids] == expected[::-1]
    assert loads.count <= 2 * len(asked), "only who joins or leaves costs a load"


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_preempted_rows_come_back(enable_prefix_caching: bool) -> None:
    """Five rows of up to four blocks over nine; float32, so that a prefill and steps agree to within a tie."""
    plain, packed = models()
    block_bytes = 64 * 2 * 2 * 2 * 64 * 4  # tokens, layers, keys and values, kv heads, head_dim, bytes
    config = EngineConfig(9 * block_bytes, max_num_seqs=8, enable_prefix_caching=enable_prefix_caching)
    asked = requests(SETTINGS[:5], max_tokens=150)
    engine = Engine(packed, config)
    assert engine.pool.num_blocks == 9
    ids = [engine.add(*request) for request in asked]
    answers = drain(engine)
    assert engine.stats().num_preemptions > 0
    assert engine.pool.num_free == 9
    assert [answers[request_id] for request_id in ids] == [run(plain, request)[0] for request in asked]


def test_a_prefix_hit_gives_the_tokens_of_a_cold_start() -> None:
    plain, packed = models()
    asked = (prompt(200), SamplingParams(max_tokens=30, temperature=0))
    engine = Engine(packed, EngineConfig(max_num_seqs=2))
    answers = []
    for _ in range(2):
        engine.add(*asked)
        answers += drain(engine).values()
    assert answers == run(plain, asked) * 2
    assert engine.stats().prefix_cache_hits == 192


def test_decode_never_waits_for_more_than_its_tokens() -> None:
    """Neither growing rows nor one that leaves make the host wait for the device in a copy or an item."""
    _, packed = models()
    engine = Engine(packed, EngineConfig(max_num_seqs=4))
    for i, max_tokens in enumerate((20, 60, 60)):
        engine.add(prompt(55 + i, i), SamplingParams(temperature=0.5 * i, seed=i, max_tokens=max_tokens))
    for _ in range(4):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(40):
            assert engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    drain(engine)


def test_a_stream_goes_on_while_a_long_prompt_is_processed() -> None:
    plain, packed = models()
    short = (prompt(20), SamplingParams(max_tokens=60, temperature=0))
    long = (prompt(1500, 1), SamplingParams(max_tokens=5, temperature=0))
    config = EngineConfig(max_num_seqs=2, max_num_prefill_tokens_while_decoding=100)
    engine = Engine(packed, config)
    first = engine.add(*short)
    outputs = [*engine.step(), *engine.step()]
    second = engine.add(*long)
    while not any(output.request_id == second for output in outputs):
        before = len(outputs)
        outputs += engine.step()
        assert outputs[before].request_id == first, "a step without a token of the stream"
    assert len(outputs) == 2 + 15 + 1
    tokens = {first: [o.token_id for o in outputs[:-1]], second: [outputs[-1].token_id]}
    for request_id, rest in drain(engine).items():
        tokens[request_id] += rest
    assert [tokens[first], tokens[second]] == [run(plain, short)[0], run(plain, long)[0]]


def test_batch_invariance_is_bit_for_bit() -> None:
    """Log-probabilities of twenty rows together and of each alone, their prompts processed one by one."""
    _, packed = models()
    config = EngineConfig(max_num_seqs=64, max_num_batched_tokens=50, batch_invariant=True)
    asked = [(prompt(50, i), SamplingParams(max_tokens=30, temperature=0, logprobs=0)) for i in range(20)]

    def answers(*requests: tuple[list[int], SamplingParams]) -> list[list[tuple[int, float]]]:
        engine = Engine(packed, config)
        assert engine.graphs is not None and engine.graphs.max_rows == 8
        found: dict[str, list[tuple[int, float]]] = {engine.add(*request): [] for request in requests}
        while engine.has_unfinished:
            for output in engine.step():
                assert output.logprobs is not None
                found[output.request_id].append((output.token_id, output.logprobs[0].logprob))
        return list(found.values())

    assert answers(*asked) == [answers(request)[0] for request in asked]


def test_forty_rows_in_one_graph() -> None:
    plain, packed = models()
    asked = requests([{"temperature": 0}] * 40, max_tokens=12)
    assert run(packed, *asked, max_num_seqs=64) == run(plain, *asked, max_num_seqs=64)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_undefined_logits_are_an_error(temperature: float) -> None:
    """Seen by the device in the middle of an answer, when the embedding goes bad under the running graphs."""
    _, packed = models()
    broken = replace(packed, embed_tokens=packed.embed_tokens.clone())
    engine = Engine(broken, EngineConfig(max_num_seqs=1))
    engine.add(prompt(20), SamplingParams(max_tokens=30, temperature=temperature, seed=1))
    engine.step()
    broken.embed_tokens.fill_(float("nan"))
    with pytest.raises(ThinrankError, match="undefined logits"):
        drain(engine)
