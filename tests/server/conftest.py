"""One server for all tests of this folder, and an `LLM` on the same model to hold it against."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from octavo import LLM
from tests.engine.test_chat import TEMPLATE, with_template
from tests.server.live import LiveServer


@pytest.fixture(scope="session")
def model(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("server") / "tiny"
    shutil.copytree(tiny_llama, path)
    return with_template(path, TEMPLATE)


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[LiveServer]:
    with LiveServer(model) as server:
        yield server


@pytest.fixture(scope="session")
def client(server: LiveServer) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="session")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), num_kv_blocks=512, num_threads=1) as llm:
        yield llm
