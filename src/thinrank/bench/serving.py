"""`serving`: load on an OpenAI-compatible server, and what its clients see of it, in the words of `vllm bench serve`.

Runs in one process that knows the server by HTTP only; imports no torch.
"""

from __future__ import annotations

import asyncio
import json
import platform
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from time import process_time
from typing import Any

from tqdm import tqdm

from ..builtin_text import held_out_text
from ..errors import OptionError, OutputError, ThinrankError, unknown_name
from ..version import __version__
from ..whole_file import write_whole
from .endpoint import Endpoint, Outcome, Sample
from .load import RandomLoad, send
from .serving_result import METRICS, ServingResult, parse_goodput, summarize

#: Characters of English whose tokens prompts are drawn from: some thousand different ones, none of them special.
VOCABULARY_CHARACTERS = 50_000


def serving(
    base_url: str = "http://127.0.0.1:8000",
    *,
    backend: str = "openai",
    model: str | None = None,
    tokenizer: str | Path | None = None,
    api_key: str | None = None,
    dataset_name: str = "random",
    random_input_len: int = RandomLoad.random_input_len,
    random_output_len: int = RandomLoad.random_output_len,
    random_prefix_len: int = RandomLoad.random_prefix_len,
    random_range_ratio: float = RandomLoad.random_range_ratio,
    num_prompts: int = RandomLoad.num_prompts,
    request_rate: float = RandomLoad.request_rate,
    max_concurrency: int | None = RandomLoad.max_concurrency,
    num_warmups: int = RandomLoad.num_warmups,
    temperature: float = RandomLoad.temperature,
    ignore_eos: bool = RandomLoad.ignore_eos,
    seed: int = RandomLoad.seed,
    percentile_metrics: Sequence[str] = METRICS,
    metric_percentiles: Sequence[float] = (99.0,),
    goodput: Sequence[str] = (),
    output_json: str | Path | None = None,
    save_result: bool = False,
    save_detailed: bool = False,
    progress: bool = False,
) -> ServingResult:
    """Send random prompts to a server and measure what comes back.

    base_url: with or without a final /v1. backend: "openai" sends token ids to /v1/completions, "openai-chat" their
    text to /v1/chat/completions. model: a served name; None takes the server's first. tokenizer: a folder, for servers
    without vLLM's /tokenize. api_key: sent, and written nowhere. dataset_name: "random"; what follows it is
    `RandomLoad`. percentile_metrics, metric_percentiles: which statistics. goodput: limits, as "ttft:200".
    output_json: the file to write; save_result: writes one named after the run into the current folder.
    save_detailed: with lists that have an entry a request. progress: a bar on stderr.

    Raises OptionError for an option out of range; ThinrankError when the server cannot be reached or no request
    succeeds; OutputError when the file cannot be written.
    """
    started = datetime.now(UTC)
    if dataset_name != "random":
        raise unknown_name("dataset", dataset_name, ["random"])
    load = RandomLoad(
        random_input_len=random_input_len,
        random_output_len=random_output_len,
        random_prefix_len=random_prefix_len,
        random_range_ratio=random_range_ratio,
        num_prompts=num_prompts,
        request_rate=request_rate,
        max_concurrency=max_concurrency,
        num_warmups=num_warmups,
        temperature=temperature,
        ignore_eos=ignore_eos,
        seed=seed,
    )
    _check_statistics(percentile_metrics, metric_percentiles)
    limits = parse_goodput(goodput)
    endpoint = Endpoint(base_url, backend, api_key)
    name = _served_model(endpoint, model, load)
    settings = {
        "date": started.strftime("%Y%m%d-%H%M%S"),
        "backend": backend,
        "base_url": endpoint.base_url,
        "model_id": name,
        "dataset_name": dataset_name,
        **load.to_json(),
        "goodput": limits,
        "client": f"thinrank {__version__}, python {platform.python_version()}",
    }
    if output_json is None and save_result:
        output_json = _file_name(settings)
    if output_json is not None and (Path(output_json).is_dir() or not Path(output_json).parent.is_dir()):
        raise OutputError(f"cannot write {output_json}", "name a file in a folder that exists")
    samples = _samples(endpoint, name, tokenizer, load)
    outcomes, client_cpu = asyncio.run(_run(endpoint, name, samples, load, progress))
    if all(outcome.error is not None for outcome in outcomes):
        raise ThinrankError(f"all {num_prompts} requests failed, the first with {outcomes[0].error}")
    result = summarize(
        outcomes,
        settings=settings,
        client_cpu=client_cpu,
        metrics=percentile_metrics,
        percentiles=metric_percentiles,
        goodput=limits,
    )
    if output_json is not None:
        _write(Path(output_json), result.to_json(save_detailed))
    return result


def _check_statistics(metrics: Sequence[str], percentiles: Sequence[float]) -> None:
    for metric in metrics:
        if metric not in METRICS:
            raise unknown_name("metric", metric, list(METRICS))
    for number in percentiles:
        if not 0 <= number <= 100:
            raise OptionError(f"metric_percentiles has {number:g}", "they must be 0 to 100")


def _served_model(endpoint: Endpoint, model: str | None, load: RandomLoad) -> str:
    """The name to ask for. Raises OptionError when it is unknown, or the requests are longer than it allows."""
    served = endpoint.models()
    name = next(iter(served), None) if model is None else model
    if name is None:
        raise ThinrankError(f"{endpoint.base_url} serves no model", "load one there first")
    if name not in served:
        raise unknown_name("model", name, list(served))
    max_model_len = served[name]
    if max_model_len is not None and load.max_len > max_model_len:
        raise OptionError(
            f"requests have up to {load.max_len} tokens, {name} has a max_model_len of {max_model_len}",
            "lower random_input_len, random_output_len or random_prefix_len",
        )
    return name


def _samples(
    endpoint: Endpoint, model: str, tokenizer: str | Path | None, load: RandomLoad
) -> tuple[list[Sample], list[Sample]]:
    """The requests that warm up, and those that are measured."""
    encode, decode = _tokenizer(endpoint, model, tokenizer)
    prompts = load.prompts(encode(held_out_text()[:VOCABULARY_CHARACTERS]))
    samples = [
        Sample(token_ids if endpoint.backend == "openai" else decode(token_ids), len(token_ids), output_len)
        for token_ids, output_len in islice(prompts, load.num_warmups + load.num_prompts)
    ]
    return samples[: load.num_warmups], samples[load.num_warmups :]


def _tokenizer(
    endpoint: Endpoint, model: str, folder: str | Path | None
) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
    """Text to token ids and back: the server's own way, or that of a folder."""
    if folder is None:
        return (
            lambda text: endpoint.tokenize(model, text),
            lambda token_ids: endpoint.detokenize(model, token_ids),
        )
    from ..text import Tokenizer

    tokenizer = Tokenizer(folder)
    return lambda text: tokenizer.encode(text, add_special_tokens=False), tokenizer.decode


async def _run(
    endpoint: Endpoint,
    model: str,
    samples: tuple[list[Sample], list[Sample]],
    load: RandomLoad,
    progress: bool,
) -> tuple[list[Outcome], float]:
    """The outcomes, and seconds of processor time that they took here."""
    warmups, measured = samples
    fields: dict[str, Any] = {"temperature": load.temperature}
    if load.ignore_eos:
        fields["ignore_eos"] = True
    async with endpoint.connections() as connections:
        for outcome in await send(
            warmups,
            [0.0] * len(warmups),
            load.max_concurrency,
            lambda sample: endpoint.complete(connections, model, sample, fields),
        ):
            if outcome.error is not None:
                raise ThinrankError(f"a warm-up request failed: {outcome.error}")
        with tqdm(total=len(measured), desc="Requests", disable=not progress) as bar:

            async def request(sample: Sample) -> Outcome:
                outcome = await endpoint.complete(connections, model, sample, fields)
                bar.update()
                return outcome

            before = process_time()
            outcomes = await send(measured, load.arrivals(), load.max_concurrency, request)
            return outcomes, process_time() - before


def _file_name(settings: dict[str, Any]) -> str:
    """As vLLM names its own."""
    model = str(settings["model_id"]).rstrip("/").rpartition("/")[2]
    concurrency = "" if settings["max_concurrency"] is None else f"-concurrency{settings['max_concurrency']}"
    return f"{settings['backend']}-{settings['request_rate']}qps{concurrency}-{model}-{settings['date']}.json"


def _write(path: Path, result: dict[str, Any]) -> None:
    try:
        write_whole(path, json.dumps(result, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}", "check --output-json") from error
