"""A tiny random model behind a real HTTP server in a thread, and the clients that talk to it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
from fastapi import FastAPI
from openai import OpenAI

from thinrank import LLM
from thinrank.server.app import create_app
from thinrank.server.config import ServerConfig
from thinrank.server.run import Server, bind
from thinrank.server.service import Service
from tiny_models import random_tensors, tiny_config, write_folder
from tiny_tokenizers import CHAT_TEMPLATE, save_byte_level

NAME = "tiny"


@dataclass(frozen=True)
class Served:
    url: str
    llm: LLM
    app: FastAPI

    @property
    def service(self) -> Service:
        return self.app.state.service

    def openai(self, **options: Any) -> OpenAI:
        return OpenAI(
            **{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 60} | options
        )

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def free_blocks(self) -> int:
        return self.llm.engine.pool.num_free


def save_model(folder: Path, save_tokenizer: Any = save_byte_level, **changes: Any) -> Path:
    """A model whose random text has characters of every length, and bytes that are none."""
    config = tiny_config(vocab_size=400, max_position_embeddings=16384, **changes)
    write_folder(folder, config, random_tensors(config))
    return save_tokenizer(folder, CHAT_TEMPLATE)


def load(folder: Path, **options: Any) -> LLM:
    return LLM(folder, **{"device": "cpu", "kv_cache_memory": 2**25} | options)


@contextmanager
def serving(llm: LLM, **options: Any) -> Iterator[Served]:
    """Serve until the block ends, which must leave no thread behind."""
    config = ServerConfig(
        **{"served_model_names": (NAME, "alias"), "port": 0, "access_log": False, "shutdown_timeout": 1}
        | options
    )
    app = create_app(llm, config)
    listener = bind(config.host, 0)
    ready = threading.Event()
    server = Server(app, config, ready.set)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    assert ready.wait(30)
    try:
        yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", llm, app)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
