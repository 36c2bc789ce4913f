"""Settings of vLLM, which reads them when it is first imported. Its tests have their own environment."""

import gc
import os
from collections.abc import Iterator

import pytest

from vllm_engine import ENVIRONMENT

os.environ |= ENVIRONMENT


@pytest.fixture(autouse=True)
def free_engines() -> Iterator[None]:
    """Their processes end with them."""
    yield
    gc.collect()
