from pathlib import Path

import pytest

from octavo.tokenizer import Tokenizer, load_tokenizer
from octavo.weights import Checkpoint, open_checkpoint


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Checkpoint:
    return open_checkpoint(smollm2_path)


@pytest.fixture(scope="session")
def gemma3(gemma3_path: Path) -> Checkpoint:
    return open_checkpoint(gemma3_path)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: Checkpoint) -> Tokenizer:
    return load_tokenizer(smollm2.path, smollm2.metadata, smollm2.config, smollm2.generation_config)


@pytest.fixture(scope="session")
def gemma3_tokenizer(gemma3: Checkpoint) -> Tokenizer:
    return load_tokenizer(gemma3.path, gemma3.metadata, gemma3.config, gemma3.generation_config)
