"""/metrics under vLLM's names, /health, /version, and what lm-eval needs of a tokenizer."""

from pathlib import Path

import httpx2 as httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from served_model import NAME, load, serving
from thinrank import LLM, __version__

SUFFIXES = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "request_time_per_output_token_seconds_bucket",
    "request_queue_time_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
}


def samples(http: httpx.Client, **labels: str) -> dict[str, float]:
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return {
        sample.name.removeprefix("thinrank:"): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
        if labels.items() <= sample.labels.items()
    }


def test_metrics_count_what_happens(folder: Path) -> None:
    with serving(load(folder)) as served, served.http() as http:
        assert samples(http, model_name=NAME).keys() >= SUFFIXES
        prompt = [5] * 130
        for _ in range(2):
            http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 9, "n": 2, "ignore_eos": True})
        counted = samples(http, model_name=NAME)
        assert counted["prompt_tokens_total"] == 260 and counted["generation_tokens_total"] == 36
        # Each request is two sequences of 130 tokens; two full blocks of 64 can be found again.
        assert counted["prefix_cache_queries_total"] == 520
        assert counted["prefix_cache_hits_total"] == 3 * 128
        assert counted["time_to_first_token_seconds_count"] == 4
        assert counted["inter_token_latency_seconds_count"] == 4 * 8
        assert counted["e2e_request_latency_seconds_count"] == 4
        assert counted["e2e_request_latency_seconds_sum"] >= counted["time_to_first_token_seconds_sum"] > 0
        assert counted["num_requests_running"] == counted["kv_cache_usage_perc"] == 0
        assert samples(http, finished_reason="length")["request_success_total"] == 4

        with http.stream(
            "POST",
            "/v1/completions",
            json={"prompt": "x", "max_tokens": 9000, "ignore_eos": True, "stream": True},
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            running = samples(http, model_name=NAME)
            assert running["num_requests_running"] == 1 and 0 < running["kv_cache_usage_perc"] < 1
        http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert samples(http, finished_reason="abort")["request_success_total"] == 1

        http.get("/no/such/path")
        http.post("/v1/completions", json={})
        assert samples(http, handler="other", status="404")["http_requests_total"] == 1
        assert samples(http, handler="/v1/completions", status="400")["http_requests_total"] == 1


def test_small_routes(http: httpx.Client, reference: LLM) -> None:
    assert http.get("/version").json() == {"version": __version__}
    ids = reference.tokenizer.encode("Hello Ünïcödé")
    tokenized = http.post("/tokenize", json={"prompt": "Hello Ünïcödé", "return_token_strs": True}).json()
    assert tokenized["tokens"] == ids and tokenized["count"] == len(ids) == len(tokenized["token_strs"])
    assert tokenized["max_model_len"] == 16384
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "Hello Ünïcödé"}
    messages = [{"role": "user", "content": "Hi"}]
    chat = http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
    assert chat["tokens"] == reference.tokenizer.encode_chat(messages, add_generation_prompt=False)
    info = http.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"]) == ("<s>", "</s>") and "messages" in info["chat_template"]
    for body in ({}, {"prompt": "a", "messages": messages}, {"prompt": 5}):
        assert http.post("/tokenize", json=body).status_code == 400
    assert http.post("/detokenize", json={"tokens": [400]}).status_code == 400


@pytest.mark.parametrize("origins", [(), ("https://page.example",)])
def test_web_pages_may_call_only_if_told(folder: Path, origins: tuple[str, ...]) -> None:
    with serving(load(folder), allowed_origins=origins) as served, served.http() as http:
        response = http.get("/health", headers={"origin": "https://page.example"})
        assert response.headers.get("access-control-allow-origin") == (origins[0] if origins else None)
