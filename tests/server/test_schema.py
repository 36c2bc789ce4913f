"""Requests made up from the published schema, good and bad ones: none of them is a 500, and answers keep to it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from served_model import load, serving

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
OPERATIONS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/health"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/stats"),
    ("GET", "/ranks"),
    ("GET", "/tokenizer_info"),
]
MAX_EXAMPLES = {"POST": 25, "GET": 3}


@pytest.fixture(scope="module")
def api(folder: Path) -> Iterator[Any]:
    """Of a server with little room and a time limit, so that a request for much is short."""
    with serving(load(folder, max_model_len=64), request_timeout=5) as served:
        yield schemathesis.openapi.from_url(f"{served.url}/openapi.json")


@pytest.mark.parametrize(
    "mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.value
)
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_no_request_is_a_500(api: Any, method: str, path: str, mode: GenerationMode) -> None:
    operation = api[path][method]
    if mode is GenerationMode.NEGATIVE and method == "GET":
        pytest.skip("there is nothing to get wrong")

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=MAX_EXAMPLES[method],
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            case.body.pop("model", None)  # or all that there is to see is 404
        case.call_and_validate(checks=CHECKS, timeout=60)

    check()


def test_all_operations_are_tested(api: Any) -> None:
    published = {(result.ok().method.upper(), result.ok().path) for result in api.get_all_operations()}
    assert published == {(method, path) for method, path in OPERATIONS}


def test_the_schema_promises_our_errors(http: httpx.Client) -> None:
    schema = http.get("/openapi.json").json()
    responses = schema["paths"]["/v1/completions"]["post"]["responses"]
    assert "422" not in responses
    assert responses["400"]["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorResponse")
    parameters = schema["components"]["schemas"]["CompletionRequest"]["properties"]
    assert parameters["temperature"]["anyOf"][0]["minimum"] == 0
