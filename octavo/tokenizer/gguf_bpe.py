"""Byte-level BPE from GGUF (`tokenizer.ggml.model` = "gpt2")."""

from __future__ import annotations

from collections.abc import Mapping

import tokenizers
from tokenizers import models

from octavo.errors import ModelError
from octavo.tokenizer.gguf_vocab import GgufVocab, string_list
from octavo.tokenizer.pretokenizers import PreTokenizer, pretokenizer


def read_pretokenizer(metadata: Mapping[str, object]) -> PreTokenizer:
    """The word-splitting rules that the file names.

    Raises:
        ModelError: it names none, or one that is not known.

    llama.cpp takes its "default" rule where the name is missing and warns of degraded output. Those are files older
    than the key: none of their models was trained with that rule, so octavo refuses them instead.
    """
    name = metadata.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or not name:
        raise ModelError(
            "tokenizer.ggml.pre is missing, so the model's word-splitting rules are unknown; "
            "convert the model again with a converter that writes it (llama.cpp since May 2024)"
        )
    return pretokenizer(name)


def build_bpe(metadata: Mapping[str, object], vocab: GgufVocab, rules: PreTokenizer) -> tokenizers.Tokenizer:
    """Words by `rules`, then merges in the order of the file.

    Raises:
        ModelError: the merges are missing, or one uses a token that the vocabulary lacks.
    """
    merges = _merges(string_list(metadata, "tokenizer.ggml.merges"), vocab.ids)
    engine = tokenizers.Tokenizer(models.BPE(vocab=vocab.ids, merges=merges, ignore_merges=rules.ignore_merges))
    engine.pre_tokenizer = rules.splitter()
    normalizer = rules.normalizer()
    if normalizer is not None:
        engine.normalizer = normalizer
    return engine


def _merges(lines: list[str], ids: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for rank, line in enumerate(lines):
        left, _, right = line.partition(" ")
        if left not in ids or right not in ids or left + right not in ids:
            raise ModelError(
                f"tokenizer.ggml.merges[{rank}]={line!r} uses a token that the vocabulary lacks; "
                "the file is damaged, convert the model again"
            )
        merges.append((left, right))
    return merges
