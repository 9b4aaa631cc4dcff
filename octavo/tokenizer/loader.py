"""Chooses where a model's tokeniser comes from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from octavo.tokenizer.directory import tokenizer_from_directory
from octavo.tokenizer.gguf import tokenizer_from_gguf
from octavo.tokenizer.tokenizer import Tokenizer


def load_tokenizer(
    path: Path,
    metadata: Mapping[str, object],
    config: Mapping[str, object],
    generation_config: Mapping[str, object],
) -> Tokenizer:
    """The tokeniser of a model.

    Args:
        path: the GGUF file or the model's directory.
        metadata: GGUF key-values as plain Python values (lists of str, numpy arrays); empty for a directory.
        config: config.json, or what a GGUF file says in its place; only its token ids are read.
        generation_config: generation_config.json, likewise.

    Raises:
        ModelError: a file is missing, damaged, or of a kind that octavo does not know; the message names which.
    """
    if metadata:
        return tokenizer_from_gguf(metadata, config, generation_config)
    return tokenizer_from_directory(path, config, generation_config)
