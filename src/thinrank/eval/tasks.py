"""`tasks`: a model's scores on tasks of lm-evaluation-harness."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from ..bench.report import Report, ReportFile, at_least, header
from ..bench.shapes import checkpoint_model
from ..bench.timing import Nvml
from ..checkpoint.load import DTYPES
from ..device import resolve_device
from ..errors import OptionError, unknown_name
from ..text import Tokenizer


@dataclass(frozen=True)
class TaskRow:
    """One metric of one task, or of a group of tasks.

    filter: how answers were extracted, "none" for as they are. value, stderr: None where the harness has no finite
    number. samples: documents that were scored. higher_is_better: None where that is not said. version: the task's.
    """

    task: str
    filter: str
    metric: str
    value: float | None
    stderr: float | None
    higher_is_better: bool | None
    num_fewshot: int | None
    samples: int | None
    version: str


TasksReport = Report[TaskRow]


def tasks(
    model: str | Path,
    *,
    tasks: Sequence[str],
    include_path: str | Path | None = None,
    num_fewshot: int | None = None,
    limit: float | None = None,
    batch_size: int | str = "auto",
    gen_kwargs: Mapping[str, Any] | str | None = None,
    apply_chat_template: bool = False,
    system_instruction: str | None = None,
    seed: int | None = None,
    max_model_len: int | None = None,
    kv_cache_memory: int | None = None,
    dtype: str = "auto",
    device: str = "auto",
    output_json: str | Path | None = None,
    command: str | None = None,
    progress: bool = True,
    on_progress: Callable[[str], None] = lambda text: None,
) -> TasksReport:
    """Run tasks of lm-evaluation-harness on a thinrank model.

    model: a checkpoint folder. tasks: names of tasks, groups or tags of the harness, globs of them, or YAML
    files. include_path: a folder of further task files, whose names go before the harness's own. num_fewshot:
    examples in each prompt; None: as the task says. limit: documents of each task, or a share of them below 1.
    batch_size: sequences of a forward pass, or "auto". gen_kwargs: added to the tasks' own, as
    "temperature=0.8,do_sample=true" or a mapping. apply_chat_template: write prompts as chat. seed: of the
    choice of examples and of tasks that shuffle; None: the harness's own. max_model_len, kv_cache_memory,
    dtype, device: as `LLM` has them. output_json: the file to write, after every task or group. command: for the
    header. progress: show bars. on_progress: told what is being done.

    Raises OptionError when the package lm-eval is missing, for a task that is unknown, whose data cannot be had
    or that runs code that models write, and for an option that is unknown or out of range; what
    `open_checkpoint` and `ThinrankLM` raise; OutputError when the file cannot be written.
    """
    if not tasks:
        raise OptionError("there is no task", "name at least one")
    at_least(0, num_fewshot=num_fewshot or 0, seed=seed or 0)
    if limit is not None and limit <= 0:
        raise OptionError(f"limit is {limit:g}", "give a number of documents, or a share of them below 1")
    if dtype != "auto" and dtype not in DTYPES:
        raise unknown_name("dtype", dtype, ["auto", *DTYPES])
    target = resolve_device(device)
    if include_path is not None and not Path(include_path).is_dir():
        raise OptionError(f"include_path {include_path} is no folder", "name a folder of task files")
    opened = checkpoint_model(model, dtype, target, seed=0)
    Tokenizer(opened.name)  # one that is missing is noticed before the tasks are looked for
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager

        from .harness import ThinrankLM, sequences_per_pass
    except ImportError as error:
        raise OptionError(
            f"lm-evaluation-harness cannot be imported: {error}", "run: pip install 'thinrank[lm-eval]'"
        ) from error
    sequences_per_pass(batch_size)
    settings = {
        "tasks": list(tasks),
        "include_path": None if include_path is None else str(include_path),
        "num_fewshot": num_fewshot,
        "limit": limit,
        "batch_size": batch_size,
        "gen_kwargs": gen_kwargs,
        "chat_template": apply_chat_template,
        "system_instruction": system_instruction,
        "seed": seed,
        "checkpoint": opened.name,
        "keep_ratio": opened.keep_ratio,
        "lm_eval": version("lm_eval"),
    }
    file = ReportFile[TaskRow](output_json, header("tasks", opened, Nvml(target), command, **settings))
    on_progress("looking for the tasks")
    _seed(seed)
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    # All data is there before the model is loaded.
    loaded = [found for name in tasks for found in _load(manager, name)]
    for found in loaded:
        for task in found["tasks"].values():
            _configure(task, num_fewshot, gen_kwargs, seed)
    on_progress(f"loading {opened.name}")
    lm = ThinrankLM(
        opened.name,
        batch_size=batch_size,
        device=str(target),
        dtype=dtype,
        max_length=max_model_len,
        kv_cache_memory=kv_cache_memory,
        progress=progress,
    )
    for found in loaded:
        on_progress(f"running {', '.join(found['tasks'])}")
        results = lm_eval.evaluate(
            lm,
            found,
            limit=limit,
            apply_chat_template=apply_chat_template,
            fewshot_as_multiturn=apply_chat_template,
            system_instruction=system_instruction,
            log_samples=False,
        )
        file.add(rows=list(_rows(results)))
    return file.report


def _load(manager: Any, name: str) -> Iterator[Any]:
    """The harness's tasks and groups that a name stands for, with their data."""
    names = [name] if name.endswith(".yaml") else manager.match_tasks([name])
    if not names:
        near = get_close_matches(name, manager.all_tasks, 3)
        hint = f"did you mean {' or '.join(near)}?" if near else "lm-eval ls tasks lists those of the harness"
        raise OptionError(f"unknown task {name!r}", f"{hint}; --include-path adds a folder of task files")
    for each in names:
        try:
            found = manager.load(each)
        except (OSError, ValueError, KeyError, RuntimeError) as error:  # offline, not cached, not well-formed
            raise OptionError(
                f"cannot load the task {each}: {error}", "check the connection, and the task's file"
            ) from error
        for task_name, task in found["tasks"].items():
            if getattr(task, "UNSAFE_CODE", False):
                raise OptionError(
                    f"{task_name} runs code that the model writes", "run it with lm-eval itself"
                )
        yield found


def _configure(
    task: Any, num_fewshot: int | None, gen_kwargs: Mapping[str, Any] | str | None, seed: int | None
) -> None:
    """As `lm_eval.simple_evaluate` does it, which also runs git and pip to describe the machine."""
    from lm_eval.defaults import DEFAULT_OTHER_SEED
    from lm_eval.utils import simple_parse_args_string

    own = task.get_config("num_fewshot")
    if own is None or (num_fewshot is not None and own != 0):  # a task that says 0 has no examples
        task.set_config("num_fewshot", num_fewshot or 0)
    task.set_fewshot_seed(DEFAULT_OTHER_SEED if seed is None else seed)
    if gen_kwargs and task.get_config("output_type") == "generate_until":
        given = simple_parse_args_string(gen_kwargs) if isinstance(gen_kwargs, str) else dict(gen_kwargs)
        task.set_config("generation_kwargs", given, update=True)


def _seed(seed: int | None) -> None:
    """Some tasks shuffle their answers by the global generators. None: the harness's own seeds."""
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED

    random.seed(DEFAULT_RANDOM_SEED if seed is None else seed)
    np.random.seed(DEFAULT_OTHER_SEED if seed is None else seed)


def _rows(results: Mapping[str, Any]) -> Iterator[TaskRow]:
    """A group comes after its tasks, as the harness has them."""
    for task, metrics in results["results"].items():
        for key, value in metrics.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            yield TaskRow(
                task=task,
                filter=filter_name,
                metric=metric,
                value=_finite(value),
                stderr=_finite(metrics.get(f"{metric}_stderr,{filter_name}")),
                higher_is_better=results["higher_is_better"].get(task, {}).get(metric),
                num_fewshot=results["n-shot"].get(task),
                samples=results["n-samples"].get(task, {}).get("effective"),
                version=str(results["versions"].get(task)),
            )


def _finite(value: Any) -> float | None:
    """The harness writes "N/A", and infinities that JSON does not have."""
    return float(value) if isinstance(value, int | float) and isfinite(value) else None
