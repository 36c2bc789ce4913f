"""Scores of lm-evaluation-harness: a low-rank folder on thinrank against its dense export on transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from thinrank import LLM, ThinrankError, compress
from thinrank.checkpoint.export import export
from thinrank.eval import harness
from thinrank.eval.harness import ThinrankLM
from tiny_models import random_tensors, tiny_config, write_folder
from tiny_tokenizers import CHAT_TEMPLATE, CORPUS, save_byte_level, save_sentence_piece_like

#: The tokenizers have merged nothing across a "?", so that a question is a prefix in tokens, too.
QUESTIONS = [
    {"question": "The quick brown fox jumps over what?", "choices": ["7", "7 lazy dogs", "QQ"], "answer": 1},
    {"question": "Hello world?", "choices": ["Q", "ZZ there", "é"], "answer": 0},
    {"question": "Naïve?", "choices": ["99 cafés", "PS"], "answer": 0},
    {"question": "Which lazy dog?", "choices": ["A", "B", "C"], "answer": 2},
] * 2
#: More tokens than the models have positions, so that a text takes several windows.
TEXTS = [{"text": " ".join(CORPUS * 4)}, {"text": "hello"}, {"text": "Ünïcödé, there! " * 3}]

TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
""",
    "texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "answers": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["a", "."], max_gen_toks: 24}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Task files with local data, and nothing in the user's cache."""
    folder = tmp_path_factory.mktemp("tasks")
    for name, rows in (("questions", QUESTIONS), ("text", TEXTS)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in TASKS.items():
        data = folder / ("text.jsonl" if name == "texts" else "questions.jsonl")
        (folder / f"{name}.yaml").write_text(
            f"task: tiny_{name}\ndataset_path: json\ntest_split: test\nfewshot_split: test\n"
            f"dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {folder / 'cache'}}}\n{task}"
        )
    return folder


@pytest.fixture(scope="module", params=["byte level", "sentence piece"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A low-rank folder and its dense export. Only the second tokenizer adds BOS."""
    save = save_byte_level if request.param == "byte level" else save_sentence_piece_like
    root = tmp_path_factory.mktemp("models")
    config = tiny_config(vocab_size=400)
    save(write_folder(root / "source", config, random_tensors(config)), CHAT_TEMPLATE)
    compress(root / "source", root / "low-rank", method="svd", keep_ratio=0.6, device="cpu", progress=False)
    export(root / "low-rank", root / "dense", progress=False)
    return root / "low-rank", root / "dense"


@pytest.fixture(scope="module")
def ours(folders: tuple[Path, Path]) -> ThinrankLM:
    return ThinrankLM(folders[0], device="cpu", kv_cache_memory=2**22, progress=False)


@pytest.fixture(scope="module")
def theirs(folders: tuple[Path, Path]) -> HFLM:
    return HFLM(str(folders[1]), device="cpu", dtype="float32", batch_size=3)


def evaluate(lm: Any, folder: Path, **options: Any) -> dict[str, Any]:
    """`simple_evaluate` on all three tasks, without describing the machine, which takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        names = [f"tiny_{name}" for name in TASKS]
        results: dict[str, Any] = lm_eval.simple_evaluate(
            lm, tasks=names, task_manager=manager, bootstrap_iters=0, **options
        )
    return results


@pytest.mark.parametrize("options", [{}, {"num_fewshot": 2}, {"num_fewshot": 1, "apply_chat_template": True}])
def test_scores_equal_those_of_the_export(
    ours: ThinrankLM, theirs: HFLM, task_folder: Path, options: dict[str, Any]
) -> None:
    found, expected = (evaluate(lm, task_folder, **options) for lm in (ours, theirs))
    assert found["results"].keys() == expected["results"].keys()
    for task, metrics in expected["results"].items():
        for name, value in metrics.items():
            # float32 on both sides, through other kernels.
            assert found["results"][task][name] == (
                pytest.approx(value, rel=1e-4) if isinstance(value, float) else value
            )
    answers = 0
    for task, samples in expected["samples"].items():
        for sample, other in zip(found["samples"][task], samples, strict=True):
            assert sample["arguments"] == other["arguments"]
            for [mine], [reference] in zip(sample["resps"], other["resps"], strict=True):
                if isinstance(reference, str):
                    answers += len(reference) > 0
                    assert mine == reference
                elif isinstance(reference, tuple):
                    assert mine == (pytest.approx(reference[0], abs=1e-3), reference[1])
                else:
                    assert mine == pytest.approx(reference, rel=1e-5)
    assert answers >= 4


def loglikelihoods(lm: Any, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    results: list[tuple[float, bool]] = lm.loglikelihood(requests, disable_tqdm=True)
    return results


def test_odd_pairs_equal_those_of_the_export(ours: ThinrankLM, theirs: HFLM) -> None:
    pairs = [("", "Hello"), ("Fox? ", "7 dogs"), ("Fox?" * 200, " 7"), ("a?", "7" * 200), ("<s>Hello?", " 7")]
    greedy = ours.llm.generate("Hello?", harness.SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    pairs.append(("Hello?", greedy[0].outputs[0].text))
    found, expected = loglikelihoods(ours, pairs), loglikelihoods(theirs, pairs)
    for (mine, is_greedy), (reference, was_greedy) in zip(found, expected, strict=True):
        assert mine == pytest.approx(reference, rel=1e-4) and is_greedy == was_greedy


def test_the_registry_knows_it(folders: tuple[Path, Path], task_folder: Path) -> None:
    assert get_model("thinrank") is ThinrankLM
    arguments = f"pretrained={folders[0]},kv_cache_memory={2**22},max_length=64,progress=False"
    results = evaluate("thinrank", task_folder, model_args=arguments, device="cpu", batch_size=2, limit=2)
    assert results["n-samples"]["tiny_choices"]["effective"] == 2


def test_batches_do_not_change_a_score(ours: ThinrankLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a head that takes three rows at a time; equal inputs share a pass."""
    pairs = [
        (" ".join(CORPUS[: 1 + index % 4]), word)
        for index, word in enumerate(["A", "B", "C", "dog", "world"] * 2)
    ]
    expected = loglikelihoods(ours, pairs)
    alone = ThinrankLM(ours.llm, batch_size=1, progress=False)
    passes = []
    monkeypatch.setattr(
        alone, "_score", lambda batch: passes.append(batch) or ThinrankLM._score(alone, batch)
    )
    monkeypatch.setattr(harness, "HEAD_LOGITS", 3 * 400)
    for (mine, _), (reference, _) in zip(loglikelihoods(alone, pairs), expected, strict=True):
        assert mine == pytest.approx(reference, abs=1e-4)
    assert all(len(batch) == 1 for batch in passes)
    inputs = {tuple((a + b)[:-1]) for a, b in (alone._encode_pair(*pair) for pair in pairs)}
    assert len(passes) == len(inputs)
    lengths = [len(batch[0][0]) for batch in passes]
    assert lengths == sorted(lengths, reverse=True)


def generate(lm: Any, context: str, **arguments: Any) -> str:
    [text] = lm.generate_until([Instance("generate_until", {}, (context, arguments), 0)], disable_tqdm=True)
    return str(text)


def test_sampling_is_seeded_and_stops_are_left_out(ours: ThinrankLM) -> None:
    sampled = {"do_sample": True, "temperature": 2.0, "max_gen_toks": 30, "until": []}
    text = generate(ours, "Hello", **sampled)
    assert text == generate(ours, "Hello", **sampled) != generate(ours, "Hello", max_gen_toks=30)
    stop = text[len(text) // 2 :][:2]
    assert generate(ours, "Hello", **sampled | {"until": [stop]}) == text.partition(stop)[0]
    # Nothing that sampling needs is taken over where it is off.
    assert generate(ours, "Hello", temperature=0.0, max_gen_toks=8) == generate(ours, "Hello", max_gen_toks=8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 4}, "unknown generation argument 'num_beams': known: do_sample, max_gen_toks"),
        ({"max_gen_toks": 256}, "max_gen_toks is 256, a sequence may have 256 tokens"),
        ({"temperature": 1.0, "top_p": 3}, "top_p is 3"),
    ],
)
def test_mistakes_of_a_task(ours: ThinrankLM, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ThinrankError, match=message):
        generate(ours, "Hello", **arguments)


def test_a_continuation_beyond_the_window_and_undefined_logits(folders: tuple[Path, Path]) -> None:
    llm = LLM(folders[0], device="cpu", max_model_len=16, kv_cache_memory=2**22)
    lm = ThinrankLM(llm, progress=False)
    with pytest.raises(ThinrankError, match="a sequence may have 16"):
        loglikelihoods(lm, [("a", "Ü" * 40)])
    llm.engine.decoder.norm.fill_(float("nan"))
    with pytest.raises(ThinrankError, match="infinite or undefined"):
        loglikelihoods(lm, [("a", "b")])


def test_a_tokenizer_of_another_model_is_noticed(tmp_path: Path) -> None:
    config = tiny_config()
    folder = save_byte_level(write_folder(tmp_path / "model", config, random_tensors(config)))
    lm = ThinrankLM(folder, device="cpu", progress=False)
    with pytest.raises(ThinrankError, match="outside the vocabulary of 101"):
        loglikelihoods(lm, [("What is", " this?")])


@pytest.mark.parametrize("batch_size", [0, -1, "auto:4", "many", 1.5])
def test_batch_sizes(batch_size: Any) -> None:
    with pytest.raises(ThinrankError, match="batch_size is"):
        ThinrankLM("no/such/folder", batch_size=batch_size)


@pytest.mark.gpu
def test_the_packed_decoder_gives_the_same_scores(tmp_path: Path) -> None:
    """bfloat16 moves a log-likelihood of about -6 a token by about 1e-2, and padding by no more."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 64}
    config = tiny_config(vocab_size=400, **sizes)
    folder = save_byte_level(write_folder(tmp_path / "model", config, random_tensors(config)))
    pairs = [("Hello?", " 7 dogs over there" * (1 + index)) for index in range(5)]
    on_gpu = loglikelihoods(ThinrankLM(folder, device="cuda", dtype="bfloat16", progress=False), pairs)
    on_cpu = loglikelihoods(ThinrankLM(folder, device="cpu", progress=False), pairs)
    for (mine, _), (reference, _) in zip(on_gpu, on_cpu, strict=True):
        assert mine == pytest.approx(reference, rel=1e-2)
