"""One server for all tests that neither break it nor need settings of their own."""

from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from openai import OpenAI

from served_model import Served, load, save_model, serving
from thinrank import LLM


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="session")
def served(folder: Path) -> Iterator[Served]:
    with serving(load(folder)) as served:
        yield served
        assert served.free_blocks() == served.llm.engine.pool.num_blocks, "a block is lost"


@pytest.fixture(scope="session")
def reference(folder: Path) -> LLM:
    """The same model without a server."""
    return load(folder)


@pytest.fixture(scope="session")
def openai(served: Served) -> OpenAI:
    return served.openai()


@pytest.fixture(scope="session")
def http(served: Served) -> Iterator[httpx.Client]:
    with served.http() as client:
        yield client
