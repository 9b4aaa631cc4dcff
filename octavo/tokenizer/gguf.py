"""A Tokenizer from the key-values of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.errors import ModelError
from octavo.tokenizer.gguf_bpe import build_bpe, read_pretokenizer
from octavo.tokenizer.gguf_spm import build_spm, text_preparation
from octavo.tokenizer.gguf_vocab import read_vocab
from octavo.tokenizer.special_ids import eos_union, token_ids
from octavo.tokenizer.tokenizer import PieceStyle, SpecialIds, Tokenizer

_TEMPLATE = "tokenizer.chat_template"
_NAMED_TOKENS = {  # as transformers calls them, and as the format does, its spelling included
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "sep": "seperator",
    "pad": "padding",
    "cls": "cls",
    "mask": "mask",
}


def tokenizer_from_gguf(
    metadata: Mapping[str, object], config: Mapping[str, object], generation_config: Mapping[str, object]
) -> Tokenizer:
    """Builds the tokeniser that `tokenizer.ggml.model` names.

    Raises:
        ModelError: the model or its pre-tokeniser is not supported, or the vocabulary is damaged.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise ModelError(
            f"tokenizer.ggml.model={model!r} is not supported; supported are 'gpt2' (byte-level BPE) and "
            "'llama' (SentencePiece BPE)"
        )
    vocab = read_vocab(metadata)
    style: PieceStyle
    if model == "llama":
        style, engine, adds_bos = "sentencepiece", build_spm(metadata, vocab), True
        adds_space_prefix = _flag(metadata, "add_space_prefix", True)
    else:
        rules = read_pretokenizer(metadata)
        style, engine, adds_bos = "byte_level", build_bpe(metadata, vocab, rules), rules.adds_bos
        adds_space_prefix = False  # the key means nothing here, as in llama.cpp
    engine.add_tokens(vocab.added_tokens())
    return Tokenizer(
        engine,
        style,
        _special_ids(
            metadata, config, generation_config, len(vocab.tokens), _flag(metadata, "add_bos_token", adds_bos)
        ),
        len(vocab.tokens),
        prepare=text_preparation(adds_space_prefix) if style == "sentencepiece" else None,
        strips_leading_space=adds_space_prefix,
        chat_templates=_chat_templates(metadata),
        named_tokens={
            f"{name}_token": vocab.tokens[i]
            for name, key in _NAMED_TOKENS.items()
            for i in _own_ids(metadata, len(vocab.tokens), key)
        },
    )


def _chat_templates(metadata: Mapping[str, object]) -> dict[str, str]:
    """`tokenizer.chat_template` is the default, `tokenizer.chat_template.NAME` a named one."""
    found = {}
    for key, value in metadata.items():
        if key == _TEMPLATE or key.startswith(f"{_TEMPLATE}."):
            if not isinstance(value, str):
                raise ModelError(f"{key} is a {type(value).__name__}, expected text; convert the model again")
            found[key.removeprefix(_TEMPLATE).removeprefix(".") or "default"] = value
    return found


def _special_ids(
    metadata: Mapping[str, object],
    config: Mapping[str, object],
    generation_config: Mapping[str, object],
    vocab_size: int,
    adds_bos: bool,
) -> SpecialIds:
    bos = _own_ids(metadata, vocab_size, "bos")
    eos = _own_ids(metadata, vocab_size, "eos")
    ends = [*eos, *_own_ids(metadata, vocab_size, "eot"), *_own_ids(metadata, vocab_size, "eom")]
    adds_eos = _flag(metadata, "add_eos_token", False)
    for name, wanted, ids in (("bos", adds_bos, bos), ("eos", adds_eos, eos)):
        if wanted and not ids:
            raise ModelError(
                f"the tokenizer adds {name.upper()} to prompts but tokenizer.ggml.{name}_token_id is missing; "
                "convert the model again"
            )
    return SpecialIds(
        bos=bos[0] if bos else None,
        eos=eos_union(config, generation_config, ends),
        before=tuple(bos) if adds_bos else (),
        after=tuple(eos) if adds_eos else (),
    )


def _own_ids(metadata: Mapping[str, object], vocab_size: int, name: str) -> list[int]:
    key = f"tokenizer.ggml.{name}_token_id"
    ids = token_ids(metadata, key)
    if any(i >= vocab_size for i in ids):
        raise ModelError(f"{key}={ids[0]} is outside the vocabulary of {vocab_size} tokens; convert the model again")
    return ids


def _flag(metadata: Mapping[str, object], name: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise ModelError(f"tokenizer.ggml.{name}={value!r}: expected true or false; convert the model again")
    return value
