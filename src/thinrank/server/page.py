"""GET /: the page for people. Its files are in the folder `page` beside this one, as they are sent."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI, Response
from pydantic import BaseModel

_FOLDER = Path(__file__).with_suffix("")
_INDEX = "index.html"
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
#: What the page may load and call: this server, and nothing else. Text of models and people cannot become markup: what
#: would parse it throws.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # a new version of the server has a new page
}


class PageModel(BaseModel):
    """What the page has to know of the model. defaults: of sampling, the model's own."""

    name: str
    max_model_len: int
    has_chat_template: bool
    defaults: dict[str, float | int]


def _path(name: str) -> str:
    return "/" if name == _INDEX else f"/page/{name}"


_FILES = {_path(file.name): file for file in sorted(_FOLDER.iterdir())}
#: Of the page's files, which need no key: the page asks for it.
PAGE_PATHS = frozenset(_FILES)


def add_page(app: FastAPI) -> None:
    """Routes of the page's files, which are read now."""
    for path, file in _FILES.items():
        _add_file(app, path, file.read_bytes(), f"{_MEDIA_TYPES[file.suffix]}; charset=utf-8")


def _add_file(app: FastAPI, path: str, content: bytes, media_type: str) -> None:
    @app.get(path, include_in_schema=False)
    async def page_file() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)
