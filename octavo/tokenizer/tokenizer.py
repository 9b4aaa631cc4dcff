"""Text to token ids and back.

Encoding is the `tokenizers` library's work. Decoding is done here, on bytes: each id stands for a fixed byte string,
so text can be streamed without looking back (see detokenizer.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import tokenizers
from tokenizers import models, normalizers

from octavo.errors import ModelError, RequestError

# How the vocabulary writes bytes: GPT-2's printable stand-ins, or SentencePiece's U+2581 for a space and <0xNN>.
PieceStyle = Literal["byte_level", "sentencepiece"]

_PLAIN = 0
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """What frames a prompt and what ends a reply."""

    bos: int | None
    eos: tuple[int, ...]
    before: tuple[int, ...] = ()  # put before a prompt: usually (bos,) or nothing
    after: tuple[int, ...] = ()


class Tokenizer:
    """The tokeniser of one model.

    Attributes:
        vocab_size: largest id that the tokeniser knows, plus one; the model's embedding may have more rows.
        chat_templates: Jinja sources as the model ships them, never run here, by name; the usual one is "default".
        named_tokens: texts of the special tokens that have a role, such as "bos_token", as chat templates see them.
        strips_leading_space: decoding removes the space that encoding put before the text.
    """

    def __init__(
        self,
        engine: tokenizers.Tokenizer,
        style: PieceStyle,
        special: SpecialIds,
        vocab_size: int,
        *,
        prepare: Callable[[str], str] | None = None,
        strips_leading_space: bool = False,
        chat_templates: Mapping[str, str] | None = None,
        named_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """`prepare` is applied to every stretch of plain text between special tokens, before `engine` sees it."""
        engine.no_truncation()
        engine.no_padding()
        self.vocab_size = vocab_size
        self.strips_leading_space = strips_leading_space
        self.chat_templates = dict(chat_templates or {})
        self.named_tokens = dict(named_tokens or {})
        added = engine.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self._special = frozenset(i for i, token in added.items() if token.special)
        self._ids = special
        self._engine = engine
        self._inert = _without_special_tokens(engine)
        self._style = style
        self._prepare = prepare
        self._stretches = _stretch_engine(self.special_texts)
        self._guarded: tuple[str, tokenizers.Tokenizer] | None = None
        self._pieces: dict[int, bytes] = {}

    @property
    def bos_token_id(self) -> int | None:
        return self._ids.bos

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a reply: the union of what the model, its generation config and the tokeniser say."""
        return self._ids.eos

    @property
    def adds_bos(self) -> bool:
        return self._ids.bos is not None and self._ids.bos in self._ids.before

    @property
    def special_texts(self) -> list[str]:
        return [self._added[i] for i in sorted(self._special)]

    @cached_property
    def longest_token(self) -> int:
        """Most characters that one token stands for. (One that swallows the white space around it, or a normaliser that
        drops characters, could make more of them; a text that would need that is none.)"""
        return max(map(len, self._engine.get_vocab()))

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def special_spans(self, text: str) -> list[tuple[int, int]]:
        """Where special tokens stand spelled out in `text`: the leftmost and longest, without overlaps."""
        found = self._stretches.encode(text, add_special_tokens=False)
        return [span for span, i in zip(found.offsets, found.ids, strict=True) if i != _PLAIN]

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        Args:
            add_special_tokens: add what the model wants around a prompt, usually BOS. A text that already begins with
                it does not get it twice.
            parse_special: special tokens spelled out in the text become those tokens; otherwise they stay plain text.

        Raises:
            RequestError: the text holds a lone surrogate, which no UTF-8 can carry.
        """
        _check_encodable(text)
        text = self._prepared(text, parse_special)
        engine = self._engine if parse_special else self._inert
        ids: list[int] = engine.encode(text, add_special_tokens=False).ids
        if not add_special_tokens:
            return ids
        before, after = list(self._ids.before), list(self._ids.after)
        if before and ids[: len(before)] == before:
            before = []
        if after and ids[-len(after) :] == after:
            after = []
        return before + ids + after

    def encode_guarded(self, text: str, guard: str) -> list[int]:
        """Token ids of `text` without its every `guard`, a character that keeps special tokens apart:

            <|im_start|>user ⏎ what is <⌁|im_end|> ? <|im_end|>        ⌁ is the guard
            token                      plain text    token

        Nothing is put around the text.

        Raises:
            RequestError: as `encode`.
        """
        _check_encodable(text)
        guarded = self._guarded  # another thread may put its own there
        if guarded is None or guarded[0] != guard:
            guarded = self._guarded = guard, _with_guard(self._engine, guard)
        ids: list[int] = guarded[1].encode(self._prepared(text, True), add_special_tokens=False).ids
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD, ids that the tokeniser does not know are left out."""
        data = self.bytes_of(ids, skip_special_tokens=skip_special_tokens)
        if self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def token_text(self, token_id: int) -> str:
        """The text of one token on its own, special tokens included."""
        return self.decode([token_id], skip_special_tokens=False)

    def bytes_of(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> bytes:
        """The bytes that `ids` stand for, leading space included."""
        if skip_special_tokens:
            return b"".join([self._piece(i) for i in ids if i not in self._special])
        return b"".join([self._piece(i) for i in ids])

    def _piece(self, token_id: int) -> bytes:
        piece = self._pieces.get(token_id)
        if piece is None:
            text = self._engine.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
            if text is None:
                return b""
            piece = self._pieces[token_id] = self._spell(token_id, text)
        return piece

    def _spell(self, token_id: int, text: str) -> bytes:
        if self._style == "sentencepiece":
            byte = _BYTE_PIECE.fullmatch(text)
            return bytes([int(byte[1], 16)]) if byte else text.replace("▁", " ").encode()
        if token_id in self._added:
            return text.encode()
        return bytes(_BYTE_OF[char] for char in text) if all(char in _BYTE_OF for char in text) else text.encode()

    def _prepared(self, text: str, parse_special: bool) -> str:
        if self._prepare is None:
            return text
        prepared = self._prepare(text)
        if not parse_special or prepared == text:
            return prepared
        stretches = self._stretches.encode(text, add_special_tokens=False)
        parts = zip(stretches.offsets, stretches.ids, strict=True)
        return "".join(self._prepare(text[a:b]) if i == _PLAIN else text[a:b] for (a, b), i in parts)


def _stretch_engine(special: list[str]) -> tokenizers.Tokenizer:
    """Cuts a text into special tokens and the stretches of plain text between them, which all get the id `_PLAIN`."""
    engine = tokenizers.Tokenizer(models.WordLevel({"": _PLAIN}, unk_token=""))
    engine.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
    return engine


def _without_special_tokens(engine: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A second face of `engine` to which special tokens are plain text."""
    inert = _face(engine, engine.normalizer, list(_added_tokens(engine).values()))
    inert.encode_special_tokens = True
    for i, token in _added_tokens(engine).items():
        if inert.token_to_id(token.content) != i:
            raise ModelError(
                f"the added token {token.content!r} has id {i}, which leaves a gap; rewrite tokenizer.json"
            )
    return inert


def _with_guard(engine: tokenizers.Tokenizer, guard: str) -> tokenizers.Tokenizer:
    """A face of `engine` that looks for special tokens while the guards are there, and for all else without them: the
    library matches added tokens that are not `normalized` first, then normalises the text between them."""
    steps = [normalizers.Replace(guard, "")]
    if engine.normalizer is not None:
        steps.append(engine.normalizer)
    return _face(engine, normalizers.Sequence(steps), [_verbatim(token) for token in _added_tokens(engine).values()])


def _verbatim(token: tokenizers.AddedToken) -> tokenizers.AddedToken:
    if not token.special:
        return token
    return tokenizers.AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=False,
        special=True,
    )


def _added_tokens(engine: tokenizers.Tokenizer) -> dict[int, tokenizers.AddedToken]:
    return dict(sorted(engine.get_added_tokens_decoder().items()))


def _face(
    engine: tokenizers.Tokenizer, normalizer: normalizers.Normalizer | None, added: list[tokenizers.AddedToken]
) -> tokenizers.Tokenizer:
    """Another tokeniser on the model of `engine`, which is shared, not copied. It puts nothing around a text."""
    face = tokenizers.Tokenizer(engine.model)
    if normalizer is not None:
        face.normalizer = normalizer
    if engine.pre_tokenizer is not None:
        face.pre_tokenizer = engine.pre_tokenizer
    face.add_tokens(added)
    return face


def _check_encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text holds the lone surrogate U+{ord(text[error.start]):04X} at position {error.start}; "
            "send valid Unicode"
        ) from error


def _byte_of_char() -> dict[str, int]:
    """GPT-2's stand-ins: printable Latin-1 characters are themselves, the other bytes are U+0100 onwards in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


_BYTE_OF = _byte_of_char()
