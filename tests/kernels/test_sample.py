"""The sampler op against the reference: the same token from the same random number, whatever the neighbours.

Weights are integers, so the order of summation does not matter. What can differ is exp in float64, by its last bit,
which moves a weight of 2^42 by 1 once in some hundred tokens: no seed below comes that close to a boundary.
"""

import pytest
import torch

from sampling_distribution import assert_drawn_from

pytest.importorskip("triton")

from thinrank.kernels import reference as ops
from thinrank.kernels import sample as module
from thinrank.kernels.greedy import greedy, greedy_workspace
from thinrank.kernels.sample import RowSampling, SampleWorkspace, sample

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NONE = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "seed": 0, "stream": 0}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several programs and several turns of every loop at a small vocabulary."""
    for name, size in {"CUTOFF_BLOCK": 128, "DRAW_BLOCK": 64, "TILE": 256, "LIST_TILE": 32}.items():
        monkeypatch.setattr(module, name, size)


class State:
    """The end of a decode step whose rows draw the tokens at `positions`, and then the next ones."""

    def __init__(self, logits, settings, positions=None):
        self.logits = logits.to(DEVICE)
        batch, vocab_size = logits.shape
        self.settings = [NONE | row for row in settings]
        self.positions = torch.tensor(positions or range(9, 9 + batch), dtype=torch.int32, device=DEVICE) - 1
        self.token_ids = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
        self.history = torch.zeros(8, batch, dtype=torch.int64, device=DEVICE)
        self.greedy_workspace = greedy_workspace(batch, vocab_size, DEVICE)
        self.rows = RowSampling.allocate(batch, DEVICE)
        self.rows.load(**{name: [row[name] for row in self.settings] for name in NONE})
        self.workspace = SampleWorkspace.allocate(batch, vocab_size, DEVICE)

    def step(self):
        """What the history then has of the new tokens."""
        self.history.fill_(-7)
        lengths = self.positions.clone()
        greedy(
            self.logits, self.token_ids, self.positions, lengths, self.history, self.greedy_workspace,
            pdl=False,
        )  # fmt: skip
        sample(
            self.logits, self.token_ids, self.positions, self.history, self.rows, self.workspace, pdl=False
        )
        for scratch in (self.workspace.counts, self.workspace.masses, self.workspace.arrived):
            assert not scratch.any(), "the next launch needs it at zero"
        slots = self.positions.long() % 8
        assert (self.history == -7).sum() == 7 * len(slots), "another slot was written"
        return self.history[slots, torch.arange(len(slots), device=DEVICE)].tolist()

    def drawn(self):
        tokens = self.step()
        assert self.token_ids.tolist() == tokens
        return tokens

    def expected(self):
        def column(name, dtype):
            return torch.tensor([row[name] for row in self.settings], dtype=dtype, device=DEVICE)

        scaled = ops.apply_temperature(self.logits, column("temperature", torch.float32))
        kept = ops.filter_logits(
            scaled,
            column("top_k", torch.int64),
            column("top_p", torch.float32),
            column("min_p", torch.float32),
        )
        uniform = ops.philox_uniform(
            column("seed", torch.int64), column("stream", torch.int64), self.positions.long()
        )
        tokens = ops.sample(kept, uniform).tolist()
        best = self.logits.argmax(-1).tolist()
        return [best[i] if row["temperature"] == 0 else tokens[i] for i, row in enumerate(self.settings)]


def random_logits(rows, vocab_size, seed=0, scale=3.0):
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


SETTINGS = [
    {},
    {"temperature": 0.6},
    {"temperature": 0.0},
    {"top_k": 1},
    {"top_k": 7, "temperature": 1.5},
    {"top_k": 10**6},
    {"top_k": -1},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"top_p": 0.5, "temperature": 3.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.01, "temperature": 0.8},
    {"temperature": 1e-12},
    {"temperature": 1e6, "top_k": 5},
    {"temperature": 1e6, "top_p": 0.3},
]


@pytest.mark.parametrize("vocab_size", [5, 128, 199, 500])
def test_the_token_of_the_reference(vocab_size):
    """Every kind of row in one batch, at two positions."""
    settings = [row | {"seed": 100 + i, "stream": i} for i, row in enumerate(SETTINGS)]
    state = State(random_logits(len(settings), vocab_size), settings)
    for _ in range(2):
        assert state.drawn() == state.expected()


def test_neighbours_do_not_matter():
    settings = [SETTINGS[i] | {"seed": 2**40 + i} for i in (0, 2, 4, 9, 12)]
    logits = random_logits(len(settings), 150)
    together = State(logits, settings, [20] * len(settings)).drawn()
    assert together == [State(logits[i : i + 1], [row], [20]).drawn()[0] for i, row in enumerate(settings)]
    backwards = State(logits.flip(0), settings[::-1], [20] * len(settings)).drawn()
    assert together == backwards[::-1]


@pytest.mark.parametrize(
    "settings", [{"top_k": 3}, {"top_k": 9}, {"top_p": 0.29}, {"top_p": 0.5}, {"min_p": 0.999}]
)
def test_ties_stay_by_the_lower_id(settings):
    """Within a chunk of tokens and across chunks. Two groups of equals, so that limits fall into either."""
    logits = random_logits(1, 200, scale=0.1)
    logits[0, [3, 60, 70, 130, 131, 199]] = 5.0
    logits[0, [1, 2, 69, 128, 190]] = 4.0
    rows = [settings | {"seed": seed} for seed in range(6)]
    state = State(logits.expand(6, -1).contiguous(), rows, [5] * 6)
    assert state.drawn() == state.expected()


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 1}, 1),
        ({"top_k": 70}, 70),
        ({"top_k": 200}, 200),
        ({"top_p": 0.25}, 50),  # 50 equals reach a quarter exactly: the next one goes
        ({"top_p": 0.251}, 51),
        ({"top_k": 100, "top_p": 0.5}, 50),  # of those that top_k kept
    ],
)
def test_how_many_equals_stay(settings, kept):
    """The cutoff is the id of the last one; the reference agrees."""
    state = State(torch.full((1, 200), -1.5), [settings])
    assert state.drawn() == state.expected()
    assert state.workspace.cutoffs.tolist() == [kept - 1]


@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.1}])
def test_a_single_token_that_is_possible(settings):
    logits = torch.full((1, 150), float("-inf"))
    logits[0, 77] = -3.0
    assert State(logits, [settings]).drawn() == [77]


def test_masked_tokens_are_never_drawn():
    logits = random_logits(20, 90, scale=0.5)
    logits[:, ::2] = float("-inf")
    rows = [{"seed": seed, "top_k": 60, "top_p": 0.99} for seed in range(20)]
    assert all(token % 2 for token in State(logits, rows).drawn())


def test_undefined_logits_are_marked_and_left_alone():
    """The torch sampler refuses them; here a mark tells the host, and the row goes on with a token that exists."""
    logits = random_logits(5, 90)
    logits[0, 5] = float("nan")
    logits[1, 80] = float("inf")
    logits[2] = float("-inf")
    logits[3] = float("nan")
    state = State(logits, [{"top_k": 5}, {}, {"top_p": 0.5}, {}, {}])
    written = state.step()
    assert written[:4] == [-1] * 4
    assert written[4] == state.token_ids[4].item() >= 0
    assert all(0 <= token < 90 for token in state.token_ids.tolist())


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.1}])
def test_frequencies_follow_the_distribution(settings):
    count, vocab_size = 5000 if DEVICE.type == "cuda" else 100, 23
    logits = random_logits(1, vocab_size, scale=2.0)
    rows = [settings | {"seed": seed} for seed in range(count)]
    tokens = State(logits.expand(count, -1).contiguous(), rows).drawn()
    assert_drawn_from(tokens, logits[0], settings)


def test_seed_stream_and_position_determine_the_number():
    """Seeds of 64 bits, and nothing else than the three: equal ones give equal tokens."""
    logits = random_logits(1, 60, scale=0.3).expand(8, -1).contiguous()

    def draws(settings, positions):
        state = State(logits, [settings] * 8, positions)
        tokens = state.drawn()
        assert tokens == state.expected()
        return tokens

    positions = list(range(1, 9))
    first = draws({"seed": -1}, positions)
    assert first == draws({"seed": -1}, positions)
    for other in ({"seed": 2**32 - 1}, {"seed": 2**63 - 1}, {"seed": -1, "stream": 1}):
        assert draws(other, positions) != first
    assert len(set(draws({"seed": 3}, [7] * 8))) == 1


def test_a_vocabulary_beyond_the_order_is_refused():
    with pytest.raises(AssertionError):
        SampleWorkspace.allocate(1, 2**20 + 1, DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [32000, 128256, 262144])
@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0])
def test_large_vocabularies(vocab_size, scale, monkeypatch):
    """With the tiles of real use. A scale of 0 puts all tokens into one bin."""
    monkeypatch.undo()
    settings = [
        {},
        {"top_k": 50},
        {"top_p": 0.9},
        {"top_k": 2000, "top_p": 0.8, "temperature": 0.7},
        {"min_p": 0.05},
        {"temperature": 0.0},
        {"temperature": 0.2, "top_k": 20},
        {"temperature": 5.0, "top_p": 0.95},
    ]
    for seed in range(5):
        rows = [row | {"seed": seed * 8 + i} for i, row in enumerate(settings)]
        state = State(random_logits(8, vocab_size, seed, scale), rows)
        assert state.drawn() == state.expected()
