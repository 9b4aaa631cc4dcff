"""The vocabulary of a GGUF file: what both of its tokeniser models share.

Key names and token types are those of the GGUF specification (`tokenizer.ggml.*`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken

from octavo.errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@dataclass(frozen=True, slots=True)
class GgufVocab:
    """`tokens[i]` is the stored text of id i and `types[i]` its GGUF token type; `ids` is the way back."""

    tokens: Sequence[str]
    types: Sequence[int]
    ids: dict[str, int]

    def added_tokens(self) -> list[AddedToken]:
        """Tokens that are matched verbatim in the text before anything else; control and unknown ones are special."""
        return [
            AddedToken(token, special=kind != USER_DEFINED, normalized=False)
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in (CONTROL, USER_DEFINED, UNKNOWN)
        ]


def read_vocab(metadata: Mapping[str, object]) -> GgufVocab:
    """Checks and indexes the token list.

    Raises:
        ModelError: the list is missing, two ids share a text, or the types do not fit the tokens.
    """
    tokens = string_list(metadata, "tokenizer.ggml.tokens")
    types = integers(metadata, "tokenizer.ggml.token_type", len(tokens))
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next((token, i) for i, token in enumerate(tokens) if ids[token] != i)
        raise ModelError(
            f"tokenizer.ggml.tokens: {twice[0]!r} has two ids, {twice[1]} and {ids[twice[0]]}; the file is damaged, "
            "convert the model again"
        )
    return GgufVocab(tokens, types, ids)


def string_list(metadata: Mapping[str, object], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise ModelError(f"{key} is missing or is not a list of strings; the file carries no usable tokenizer")
    return value


def integers(metadata: Mapping[str, object], key: str, length: int) -> list[int]:
    """The array `key`, or all NORMAL where the file leaves it out, as the format allows for token types."""
    value = metadata.get(key)
    if value is None:
        return [NORMAL] * length
    types: list[int] = value.tolist() if hasattr(value, "tolist") else list(value)  # type: ignore[call-overload]
    if len(types) != length:
        raise ModelError(f"{key} has {len(types)} entries for {length} tokens; convert the model again")
    return types
