"""Low-rank generation on the CPU: thinrank against transformers running the same factors as two Linears.

    python benchmarks/cpu_decode.py --threads 2 --output benchmarks/results/cpu_decode.json

Both generate the same number of tokens greedily from the same random weights of SmolLM2-135M's shape, in one
process, alternating. The tokens must be equal. Medians over the repetitions; the ratio is transformers' time
over ours, so that above 1 we are faster.
"""

import argparse
import json
import platform
import statistics
import subprocess
import time
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from thinrank.compression.truncate import rank_for
from thinrank.config import EngineConfig, SamplingParams
from thinrank.engine.engine import Engine
from thinrank.model.decoder import Decoder
from thinrank.model.registry import parse_config

SHAPE = LlamaConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49152,
    tie_word_embeddings=True,
    max_position_embeddings=2048,
)


def build(keep_ratio: float) -> tuple[LlamaForCausalLM, Engine]:
    """The same random factors in both runtimes, float32."""
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(SHAPE).eval()
    ranks, tensors = {}, {}
    for module, linear in list(theirs.named_modules()):
        if not isinstance(linear, nn.Linear) or module == "lm_head":
            continue
        out_features, in_features = linear.weight.shape
        ranks[module] = rank_for(keep_ratio, out_features, in_features)
        factor_in = nn.Linear(in_features, ranks[module], bias=False)
        factor_out = nn.Linear(ranks[module], out_features, bias=False)
        parent, _, name = module.rpartition(".")
        setattr(theirs.get_submodule(parent), name, nn.Sequential(factor_in, factor_out))
        tensors[f"{module}.factor_in.weight"] = factor_in.weight.data
        tensors[f"{module}.factor_out.weight"] = factor_out.weight.data
    tensors |= {name: tensor for name, tensor in theirs.state_dict().items() if name not in tensors}
    decoder = Decoder.build(parse_config(SHAPE.to_dict(), ranks=ranks), tensors.__getitem__)
    return theirs, Engine(decoder, EngineConfig(enable_prefix_caching=False))


def generate_ours(engine: Engine, prompt: list[int], tokens: int) -> list[int]:
    engine.add(prompt, SamplingParams(max_tokens=tokens, temperature=0))
    out = []
    while engine.has_unfinished:
        out += [token.token_id for token in engine.step()]
    return out


def generate_theirs(model: LlamaForCausalLM, prompt: list[int], tokens: int) -> list[int]:
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return ids[0, len(prompt) :].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep-ratio", type=float, default=0.8)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--num-iters", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, engine = build(options.keep_ratio)
    prompt = torch.randint(0, SHAPE.vocab_size, (options.input_len,)).tolist()
    times: dict[str, list[float]] = {"thinrank": [], "transformers": []}
    for iteration in range(options.num_iters + 1):  # the first one warms up
        started = time.perf_counter()
        ours = generate_ours(engine, prompt, options.output_len)
        between = time.perf_counter()
        theirs = generate_theirs(model, prompt, options.output_len)
        ended = time.perf_counter()
        if ours != theirs:
            raise SystemExit("the two runtimes disagree; no number is worth printing")
        if iteration:
            times["thinrank"].append(between - started)
            times["transformers"].append(ended - between)
    medians = {name: statistics.median(values) for name, values in times.items()}
    result = {
        "benchmark": "cpu_decode",
        "shape": "smollm2-135m",
        "dtype": "float32",
        "keep_ratio": options.keep_ratio,
        "input_len": options.input_len,
        "output_len": options.output_len,
        "threads": options.threads,
        "num_iters": options.num_iters,
        "seconds_p50": medians,
        "tokens_per_second": {name: options.output_len / value for name, value in medians.items()},
        "ratio": medians["transformers"] / medians["thinrank"],
        "cpu": platform.processor() or platform.machine(),
        "versions": {name: version(name) for name in ("thinrank", "torch", "transformers")},
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
    }
    text = json.dumps(result, indent=2)
    if options.output:
        options.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
