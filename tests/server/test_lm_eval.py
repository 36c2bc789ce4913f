"""lm-evaluation-harness over HTTP: its local-completions model finds our tokenizer, and scores as we do."""

from typing import Any

import pytest

from served_model import NAME, Served
from thinrank import LLM, SamplingParams

pytest.importorskip("lm_eval")

PAIRS = [("The quick brown", " fox jumps"), ("Hello", " world, naïve"), ("a", "bcd")]


def test_scores_and_text(served: Served, reference: LLM) -> None:
    """Sums of log-probabilities agree to 1e-3: float32, summed in another order, over up to 12 tokens."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
        return [Instance(kind, {}, pair, index) for index, pair in enumerate(arguments)]

    model = LocalCompletionsAPI(
        base_url=f"{served.url}/v1/completions", model=NAME, batch_size=2, max_length=1000
    )
    assert type(model.tokenizer).__name__ == "RemoteTokenizer"
    scores = model.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)
    for (context, continuation), (score, is_greedy) in zip(PAIRS, scores, strict=True):
        # As the harness splits them: the continuation is what the whole has more than the context.
        encode = reference.tokenizer.encode
        start, ids = len(encode(context)), encode(context + continuation)
        logprobs = reference.logits(ids).log_softmax(-1)[start - 1 : -1]
        assert score == pytest.approx(float(logprobs[range(len(ids) - start), ids[start:]].sum()), abs=1e-3)
        assert is_greedy == (logprobs.argmax(-1).tolist() == ids[start:])

    asked = [
        ("The quick", {"until": ["\n\n"], "max_gen_toks": 8}),
        ("Hello", {"until": [], "max_gen_toks": 8}),
    ]
    texts = model.generate_until(instances("generate_until", asked), disable_tqdm=True)
    params = SamplingParams(temperature=0, max_tokens=8, stop=["</s>"])
    expected = reference.generate([prompt for prompt, _ in asked], params, use_tqdm=False)
    assert texts == [result.outputs[0].text for result in expected]
