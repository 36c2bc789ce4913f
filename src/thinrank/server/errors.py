"""What a client is told when something goes wrong: OpenAI's error object and an HTTP status.

400 for what the client got wrong, 401 key, 404 model or path, 405 method, 408 slow body, 413 size, 429 load, 503 dead
or stopping engine, 504 time limit. A 500 is a bug of ours, or of the checkpoint; a traceback goes to the log, never to
the client.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ..errors import ThinrankError
from .responses import ErrorDetail, ErrorResponse
from .worker import EngineDeadError, StepFailedError

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer other than the one asked for. param: the field at fault. code: for programs, such as
    "context_length_exceeded"."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> ErrorResponse:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return ErrorResponse(
            error=ErrorDetail(message=self.message, type=kind, param=self.param, code=self.code)
        )

    def response(self) -> JSONResponse:
        return JSONResponse(self.body().model_dump(), self.status, self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: Exception) -> ApiError:
    """Any error in the terms above; what is nobody's mistake becomes a 500 that says nothing of its cause."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ThinrankError):
        return bad_request(str(error))
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_unavailable")
    if isinstance(error, StepFailedError):
        return ApiError(500, str(error), code="step_failed")
    return ApiError(500, "internal error; the server's log has the traceback", code="internal_error")


def install_handlers(app: FastAPI) -> None:
    """Make every error that leaves a route an `ErrorResponse`."""

    async def own(request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response()

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return _validation_error(error).response()

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if error.status_code == 400 and error.__cause__ is not None:
            # FastAPI's, for bytes that are no text or number.
            unreadable = f"the body cannot be read as JSON: {error.__cause__}"
            return bad_request(unreadable, code="invalid_json").response()
        message = f"there is no {request.url.path}" if error.status_code == 404 else f"{error.detail}".lower()
        return ApiError(error.status_code, message, headers=error.headers).response()

    for kind in (ApiError, ThinrankError, EngineDeadError, StepFailedError, Exception):
        app.add_exception_handler(kind, own)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)


def _validation_error(error: RequestValidationError) -> ApiError:
    """The first mistake, in words: pydantic's list names every branch of every union."""
    first: dict[str, Any] = error.errors()[0]
    if first["type"] == "json_invalid":
        return bad_request(f"the body is not valid JSON: {first['ctx']['error']}", code="invalid_json")
    location = [str(part) for part in first["loc"][1:]]
    if first["type"] == "body":
        return bad_request(first["msg"])
    if not location:
        return bad_request("the body must be a JSON object, sent as Content-Type: application/json")
    message = first["msg"].removeprefix("Value error, ")
    param = location[0]
    where = ".".join(location)
    if first["type"] == "missing":
        return bad_request(f"{where} is missing", param)
    value = first.get("input")
    shown = "" if value is None or isinstance(value, dict | list) else f" {_shortened(value)}"
    return bad_request(f"{where}{shown}: {message[:1].lower()}{message[1:]}", param)


def _shortened(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, str | int | float | bool) else type(value).__name__
    return text if len(text) <= 40 else f"{text[:37]}..."
