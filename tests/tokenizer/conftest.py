import pytest

from octavo.tokenizer import Tokenizer, load_tokenizer
from octavo.weights import Checkpoint


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: Checkpoint) -> Tokenizer:
    return load_tokenizer(smollm2.path, smollm2.metadata, smollm2.config, smollm2.generation_config)


@pytest.fixture(scope="session")
def gemma3_tokenizer(gemma3: Checkpoint) -> Tokenizer:
    return load_tokenizer(gemma3.path, gemma3.metadata, gemma3.config, gemma3.generation_config)
