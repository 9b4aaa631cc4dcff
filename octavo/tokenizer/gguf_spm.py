"""SentencePiece-style BPE from GGUF (`tokenizer.ggml.model` = "llama": Llama 2, Mistral, Gemma).

SentencePiece keeps no merge list. It joins, again and again, the two neighbouring symbols whose union is the piece of
the highest score, the leftmost first among equals (Kudo and Richardson, 2018, arXiv:1808.06226). A merge list with
the same effect has, for each piece in order of falling score, every way to split it into two pieces:

    score  piece           merges
     -0    ▁t              ▁ + t
    -12    ▁the            ▁ + the,  ▁t + he,  ▁th + e      (those whose halves are both pieces)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import tokenizers
from tokenizers import models, normalizers

from octavo.errors import ModelError
from octavo.tokenizer.gguf_vocab import BYTE, NORMAL, UNKNOWN, GgufVocab

SPACE = "▁"  # U+2581, how pieces write a space


def build_spm(metadata: Mapping[str, object], vocab: GgufVocab) -> tokenizers.Tokenizer:
    """Spaces become U+2581 and there are no words: merges run over all the text between two verbatim tokens.

    Raises:
        ModelError: the scores are missing or too few.
    """
    byte_fallback = sum(kind == BYTE for kind in vocab.types) == 256
    unknown = next((token for token, kind in zip(vocab.tokens, vocab.types, strict=True) if kind == UNKNOWN), None)
    if unknown is None:
        unknown = _named_unknown(metadata, vocab)
    if unknown is None and not byte_fallback:
        raise ModelError("the vocabulary has neither all 256 byte tokens nor an unknown token; convert the model again")
    engine = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab.ids,
            merges=_merges(_scores(metadata, len(vocab.tokens)), vocab),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=byte_fallback,
        )
    )
    engine.normalizer = normalizers.Replace(" ", SPACE)
    return engine


def text_preparation(adds_space_prefix: bool) -> Callable[[str], str]:
    """What happens to plain text before verbatim tokens are looked for in it: a literal U+2581 counts as a space, as
    everywhere in SentencePiece, and a space goes first where the model wants one."""

    def prepare(text: str) -> str:
        text = text.replace(SPACE, " ")
        return " " + text if adds_space_prefix and text else text

    return prepare


def _named_unknown(metadata: Mapping[str, object], vocab: GgufVocab) -> str | None:
    index = metadata.get("tokenizer.ggml.unknown_token_id")
    return vocab.tokens[index] if isinstance(index, int) and 0 <= index < len(vocab.tokens) else None


def _scores(metadata: Mapping[str, object], length: int) -> np.ndarray:
    value = metadata.get("tokenizer.ggml.scores")
    scores = np.asarray([] if value is None else value, dtype=np.float32)
    if scores.shape != (length,):
        raise ModelError(
            f"tokenizer.ggml.scores has {scores.size} entries for {length} tokens; convert the model again"
        )
    return scores


def _merges(scores: np.ndarray, vocab: GgufVocab) -> list[tuple[str, str]]:
    """Only normal pieces take part: the others are matched verbatim (control, user-defined), stand for one byte, or
    must not be produced (unused)."""
    normal = np.asarray(vocab.types) == NORMAL
    pieces = [vocab.tokens[i] for i in np.argsort(-scores, kind="stable") if normal[i]]
    known = set(pieces)
    return [
        (left, right)
        for piece in pieces
        for cut in range(1, len(piece))
        if (left := piece[:cut]) in known and (right := piece[cut:]) in known
    ]
