"""How often the most likely token changes when keys and values come about another way.

    python benchmarks/recomputation.py MODEL [--dtype bfloat16] [--device cpu] [--texts 4] [--tokens 512]

The same texts go through an engine's decoder and cache in several ways, forced token by token: prompts in one pass (the
reference), in chunks, behind a prefix that has a pass of its own as after a hit of the prefix cache, all texts in
one pass, and by decode steps as before a preemption. Of each way: positions whose most likely token differs, and the
relative L2 difference of the logits. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch
from torch import Tensor

from thinrank import LLM
from thinrank.builtin_text import held_out_text
from thinrank.engine.engine import Engine
from thinrank.eval.forcing import decode_logits, prefill_logits
from thinrank.model.batch import ForwardBatch


def chunks(engine: Engine, texts: list[list[int]], size: int | None) -> Tensor:
    """Logits at every token but the last: float32 [texts, tokens - 1, vocab_size]."""
    return torch.stack([torch.cat(list(prefill_logits(engine, text, size)))[:-1].cpu() for text in texts])


def together(engine: Engine, texts: list[list[int]]) -> Tensor:
    batch = ForwardBatch.whole_sequences([torch.tensor(text) for text in texts], engine.decoder.device)
    return engine.decoder(batch).unflatten(0, (len(texts), -1))[:, :-1].cpu()


def steps(engine: Engine, texts: list[list[int]], count: int) -> Tensor:
    """The last `count` of them by decode steps, all texts in a batch."""
    split = len(texts[0]) - count
    logits = decode_logits(engine, [text[:split] for text in texts], [text[split:] for text in texts])
    return torch.stack([step.cpu().clone() for step in logits], dim=1)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    options = parser.parse_args()

    llm = LLM(options.model, dtype=options.dtype, device=options.device, max_num_seqs=options.texts)
    engine = llm.engine
    ids = llm.tokenizer.encode(held_out_text()[: 8 * options.texts * options.tokens])
    texts = [ids[i * options.tokens :][: options.tokens] for i in range(options.texts)]
    half = options.tokens // 2
    reference = chunks(engine, texts, None)
    ways: dict[str, Callable[[], Tensor]] = {
        "chunks of 50": lambda: chunks(engine, texts, 50),
        "behind a prefix": lambda: chunks(engine, texts, half // 64 * 64),
        "together": lambda: together(engine, texts),
        "decode steps": lambda: steps(engine, texts, half),
    }
    rows = []
    for way, compute in ways.items():
        logits = compute()
        expected = reference[:, -logits.shape[1] :]
        row = {
            "way": way,
            "positions": logits.shape[0] * logits.shape[1],
            "positions_that_differ": int((logits.argmax(-1) != expected.argmax(-1)).sum()),
            "relative_error": float((logits - expected).norm() / expected.norm()),
        }
        rows.append(row)
        print(*row.values(), sep="\t", flush=True)
    report = {"model": options.model, "dtype": str(engine.decoder.dtype).removeprefix("torch.")}
    print(json.dumps(report | {"device": str(engine.decoder.device), "rows": rows}))


if __name__ == "__main__":
    main()
