"""`fidelity`: how far each way of computing is from float32 arithmetic on the same weights.

The weights are those that all systems compute with: rounded to the compute dtype first, for the reference too,
so that arithmetic is compared and not rounding. The reference chooses its greedy tokens; these are fed to
every system, so that all logits have seen the same history. Then every system runs greedily on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..bench.huggingface import HuggingFaceSystem
from ..bench.report import Report, ReportFile, at_least, header
from ..bench.shapes import BenchModel, checkpoint_model, fast_decoder, reference_decoder
from ..bench.timing import Nvml, reset_memory
from ..checkpoint.load import DTYPES
from ..device import resolve_device
from ..errors import OptionError, ThinrankError, unknown_name
from .paths import ComputePath, DecodePath, HuggingFacePath, PrefillPath, ReferencePath, TokenIds
from .prompts import make_prompts, read_prompts

#: Tokens of a chunked prefill's pass: no divisor of a block, so that chunks end within blocks.
CHUNK = 24
#: A single row and several take different kernels on a GPU.
BATCH_SIZE = 8


@dataclass(frozen=True)
class FidelityRow:
    """One system on one path.

    Teacher-forced, over `positions`: kl: KL(reference || system) in nats; logit_difference: |difference| of
    single logits; top1: share of positions where the most likely token is the same. Running greedily, None
    for a path that does not generate: exact_match: share of prompts whose output tokens all equal the
    reference's; first_token_match: whose first one does; token_match: share of equal tokens, place by place.
    """

    system: str
    path: str
    positions: int
    kl_mean: float
    kl_max: float
    logit_difference_mean: float
    logit_difference_max: float
    top1: float
    exact_match: float | None
    first_token_match: float | None
    token_match: float | None


FidelityReport = Report[FidelityRow]


def fidelity(
    model: str | Path,
    *,
    num_prompts: int = 20,
    prompt_len: int = 64,
    output_len: int = 64,
    prompts: str | Path | None = None,
    hf: bool = True,
    dtype: str = "auto",
    device: str = "auto",
    seed: int = 0,
    output_json: str | Path | None = None,
    command: str | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> FidelityReport:
    """Compare every path of thinrank, and transformers, with float32.

    model: a checkpoint folder. prompts: a file of them, one a line or JSONL, whatever their lengths; None:
    pieces of `prompt_len` tokens of the built-in text, or random tokens where there is no tokenizer. hf: also
    run transformers on the same factors. dtype: as `load_model` has it. output_json: the file to write, after
    every row. command: for the header. on_progress: told what is being done.

    The reference's logits, num_prompts * output_len * vocab_size * 4 bytes, stay in main memory.

    Raises OptionError for an option that is unknown or out of range; ThinrankError when a system computes
    infinite or undefined logits; OutputError when the file cannot be written; what `open_checkpoint` and the
    tokenizer raise.
    """
    at_least(1, num_prompts=num_prompts, prompt_len=prompt_len, output_len=output_len)
    at_least(0, seed=seed)
    if dtype != "auto" and dtype not in DTYPES:
        raise unknown_name("dtype", dtype, ["auto", *DTYPES])
    measured = checkpoint_model(model, dtype, resolve_device(device), seed)
    if prompts is None:
        given = make_prompts(num_prompts, prompt_len, Path(model), measured.config, seed)
    else:
        given = read_prompts(prompts, num_prompts, Path(model), measured.config)
    length = max(map(len, given.token_ids)) + output_len
    if length > measured.config.max_position_embeddings:
        raise OptionError(
            f"the longest prompt and its output have {length} tokens, the model has "
            f"{measured.config.max_position_embeddings} positions",
            "lower --output-len, or shorten the prompts",
        )
    settings = {
        "checkpoint": measured.name,
        "keep_ratio": measured.keep_ratio,
        "prompts": given.source,
        "num_prompts": num_prompts,
        "prompt_tokens": sum(map(len, given.token_ids)),
        "output_len": output_len,
        "batch_size": BATCH_SIZE,
        "reference": "float32 arithmetic in plain PyTorch, without a cache",
        "weights": f"rounded to {str(measured.dtype).removeprefix('torch.')} for all, the reference too",
    }
    file = ReportFile[FidelityRow](
        output_json, header("fidelity", measured, Nvml(measured.device), command, **settings)
    )
    on_progress("running the reference in float32")
    expected = _expect(measured, given.token_ids, output_len, length)
    for system, name, path in _paths(measured, length, hf):
        on_progress(f"running {system} {name}")
        file.add(rows=[_row(system, name, path, expected)])
        del path  # its weights may be freed before the next system's come
    return file.report


@dataclass(frozen=True)
class _Expected:
    """prompts, and for each of them the reference's greedy tokens and its logits: float32 [output_len,
    vocab_size], in main memory."""

    prompts: TokenIds
    continuations: TokenIds
    logits: list[Tensor]


def _expect(model: BenchModel, prompts: TokenIds, output_len: int, length: int) -> _Expected:
    reset_memory(model.device)
    with _no_tf32():
        path = ReferencePath(
            reference_decoder(model), replace(model, dtype=torch.float32), BATCH_SIZE, length
        )
        continuations = path.generate(prompts, output_len)
        logits = [each.cpu() for each in path.logits(prompts, continuations)]
    return _Expected(prompts, continuations, logits)


def _paths(model: BenchModel, length: int, hf: bool) -> Iterator[tuple[str, str, ComputePath]]:
    """System, name of the path, and the path; each is made when the one before is done with."""
    reset_memory(model.device)
    decoder = fast_decoder(model)
    yield "thinrank", "prefill", PrefillPath(decoder, model, length)
    yield "thinrank", "prefill-chunked", PrefillPath(decoder, model, length, CHUNK)
    yield "thinrank", "decode", DecodePath(decoder, model, length, rows=1)
    yield "thinrank", "decode-batch", DecodePath(decoder, model, length, rows=BATCH_SIZE)
    del decoder
    if hf:
        reset_memory(model.device)
        system = HuggingFaceSystem(model)
        yield "hf-static", "prefill", HuggingFacePath(system, decode=False)
        yield "hf-static", "decode", HuggingFacePath(system, decode=True)


def _row(system: str, name: str, path: ComputePath, expected: _Expected) -> FidelityRow:
    """Raises ThinrankError when logits are not finite."""
    metrics = torch.cat(
        [
            position_metrics(logits, reference.to(logits.device))
            for logits, reference in zip(
                path.logits(expected.prompts, expected.continuations), expected.logits, strict=True
            )
        ],
        dim=1,
    )
    if not metrics.isfinite().all():
        raise ThinrankError(
            f"{system} {name} computed infinite or undefined logits",
            "try --dtype float32, or check the checkpoint",
        )
    kl, difference_mean, difference_max, top1 = metrics.cpu()
    chosen = path.generate(expected.prompts, len(expected.continuations[0]))
    equal = None if chosen is None else torch.tensor(chosen) == torch.tensor(expected.continuations)
    return FidelityRow(
        system=system,
        path=name,
        positions=len(kl),
        kl_mean=float(kl.mean()),
        kl_max=float(kl.max()),
        logit_difference_mean=float(difference_mean.mean()),
        logit_difference_max=float(difference_max.max()),
        top1=float(top1.mean()),
        exact_match=None if equal is None else float(equal.all(1).double().mean()),
        first_token_match=None if equal is None else float(equal[:, 0].double().mean()),
        token_match=None if equal is None else float(equal.double().mean()),
    )


def position_metrics(logits: Tensor, reference: Tensor) -> Tensor:
    """float64 [4, tokens]: KL(reference || logits) in nats, the mean and the largest |difference| of a logit,
    and 1 where the most likely token is the same.

    logits, reference: [tokens, vocab_size].
    """
    logits, reference = logits.double(), reference.double()
    expected = reference.log_softmax(-1)
    kl = (expected.exp() * (expected - logits.log_softmax(-1))).sum(-1)
    difference = (logits - reference).abs()
    same = logits.argmax(-1) == reference.argmax(-1)
    return torch.stack((kl, difference.mean(-1), difference.amax(-1), same.double()))


@contextmanager
def _no_tf32() -> Iterator[None]:
    """float32 products in float32, whatever the process has chosen."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
