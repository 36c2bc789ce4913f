"""`thinrank eval tasks`: which tasks, what is reported, mistakes."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

import lm_eval.tasks

from thinrank import ThinrankError
from thinrank.cli.main import main
from thinrank.errors import OptionError
from thinrank.eval.tasks import tasks
from tiny_models import random_tensors, tiny_config, write_folder
from tiny_tokenizers import CHAT_TEMPLATE, save_byte_level

CHOICES = """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
"""
ANSWERS = """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 4}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
GROUP = """
group: tiny
task: [tiny_choices, tiny_other]
aggregate_metric_list: [{metric: acc, weight_by_size: true}]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = tiny_config(vocab_size=300)
    folder = tmp_path_factory.mktemp("model") / "model"
    return str(save_byte_level(write_folder(folder, config, random_tensors(config)), CHAT_TEMPLATE))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"question": f"Is it {n}?", "choices": ["7", "no"], "answer": n % 2} for n in range(6)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in {"tiny_choices": CHOICES, "tiny_other": CHOICES, "tiny_answers": ANSWERS}.items():
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ntest_split: test\nfewshot_split: test\n"
            f"dataset_kwargs: {{data_files: {{test: {folder / 'rows.jsonl'}}}, cache_dir: {folder / 'cache'}}}\n"
            f"metadata: {{version: 3}}\n{task}"
        )
    (folder / "tiny.yaml").write_text(GROUP)
    (folder / "lost.yaml").write_text(
        f"task: lost\ndataset_path: json\ntest_split: test\ndataset_kwargs: {{data_files: no/such/file}}\n{CHOICES}"
    )
    (folder / "unsafe.yaml").write_text(
        (folder / "tiny_answers.yaml")
        .read_text()
        .replace("task: tiny_answers", "task: unsafe\nunsafe_code: true")
    )
    return folder


@pytest.fixture(autouse=True)
def small_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness's own 14 000 tasks take seconds to list."""
    manager = partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", manager)


def run(model: str, folder: Path, *names: str, **options: Any) -> Any:
    return tasks(model, tasks=names, include_path=folder, device="cpu", progress=False, **options)


def test_rows_and_header(model: str, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    names = ["tiny_choices", "tiny_answers"]
    report = run(model, folder, *names, num_fewshot=2, limit=4, output_json=file, command="x")
    assert [(row.task, row.metric) for row in report.rows] == [
        ("tiny_choices", "acc"), ("tiny_choices", "acc_norm"), ("tiny_answers", "exact_match")
    ]  # fmt: skip
    row = report.rows[0]
    assert (row.filter, row.higher_is_better, row.num_fewshot, row.samples, row.version) == (
        "none", True, 2, 4, "3"
    )  # fmt: skip
    assert row.value in (0, 0.25, 0.5, 0.75, 1) and row.stderr is not None
    header = report.header
    assert (header["benchmark"], header["command"], header["tasks"]) == ("tasks", "x", names)
    assert header["lm_eval"] and header["thinrank"] and header["dtype"] == "float32"
    assert json.loads(file.read_text()) == report.to_json()


def test_groups_globs_files_and_shares(model: str, folder: Path) -> None:
    report = run(model, folder, "tiny", "tiny_ch*", str(folder / "tiny_other.yaml"), limit=0.5)
    assert [row.task for row in report.rows if row.metric == "acc"] == [
        "tiny_choices", "tiny_other", "tiny", "tiny_choices", "tiny_other"
    ]  # fmt: skip
    values = {row.task: row.value for row in report.rows if row.metric == "acc"}
    assert values["tiny"] == pytest.approx((values["tiny_choices"] + values["tiny_other"]) / 2)
    assert {row.samples for row in report.rows if row.task != "tiny"} == {3}


def test_generation_and_chat(model: str, folder: Path) -> None:
    options: dict[str, Any] = {
        "apply_chat_template": True,
        "system_instruction": "Be brief.",
        "num_fewshot": 1,
    }
    for gen_kwargs in ("max_gen_toks=2", {"max_gen_toks": 2}):
        [row] = run(model, folder, "tiny_answers", gen_kwargs=gen_kwargs, **options).rows
        assert row.value is not None and row.num_fewshot == 1
    with pytest.raises(ThinrankError, match="max_gen_toks is 1000, a sequence may have 128 tokens"):
        run(model, folder, "tiny_answers", gen_kwargs="max_gen_toks=1000", max_model_len=128)


def test_the_command(model: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "eval",
        "tasks",
        model,
        "--tasks",
        "tiny_choices,tiny_answers",
        "--include-path",
        str(folder),
    ]
    arguments += ["--device", "cpu", "--batch-size", "2", "--kv-cache-memory", "4M"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "harness    lm-evaluation-harness 0." in text
    assert "acc_norm" in text and "exact_match" in text and "higher" in text
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["header"]["batch_size"] == "2" and len(report["rows"]) == 3


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["tiny_choise"], {}, "unknown task 'tiny_choise': did you mean tiny_choices"),
        (["%"], {}, "unknown task '%': lm-eval ls tasks lists"),
        ([], {}, "there is no task"),
        (["lost"], {}, "cannot load the task lost: .*no/such/file"),
        (["nothing.yaml"], {}, "cannot load the task nothing.yaml"),
        (["unsafe"], {}, "unsafe runs code that the model writes"),
        (["tiny"], {"limit": 0}, "limit is 0"),
        (["tiny"], {"num_fewshot": -1}, "num_fewshot is -1"),
        (["tiny"], {"batch_size": "auto:4"}, "batch_size is auto:4"),
        (["tiny"], {"dtype": "int8"}, "unknown dtype 'int8'"),
    ],
)
def test_mistakes(model: str, folder: Path, names: list[str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ThinrankError, match=message):
        run(model, folder, *names, **options)


def test_a_folder_that_is_none(model: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="is no folder"):
        run(model, tmp_path / "nothing", "tiny")


def test_without_the_extra(model: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(OptionError, match=r"run: pip install 'thinrank\[lm-eval\]'"):
        run(model, folder, "tiny")
