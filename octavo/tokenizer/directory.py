"""A Tokenizer from a directory in Hugging Face's layout: tokenizer.json and its companions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from octavo.errors import ModelError
from octavo.tokenizer.special_ids import eos_union, token_ids
from octavo.tokenizer.tokenizer import PieceStyle, SpecialIds, Tokenizer

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def tokenizer_from_directory(
    path: Path, config: Mapping[str, object], generation_config: Mapping[str, object]
) -> Tokenizer:
    """Reads tokenizer.json, and from tokenizer_config.json, special_tokens_map.json and chat_template.jinja what the
    special tokens and the chat template are.

    Which tokens go around a prompt is tokenizer.json's own post-processor; `add_bos_token` in tokenizer_config.json is
    not looked at, as in transformers.

    Raises:
        ModelError: a file is missing or damaged, or the decoder is of a kind that octavo does not know.
    """
    engine = _read_engine(path)
    settings = {**_read_json(path / "special_tokens_map.json"), **_read_json(path / "tokenizer_config.json")}
    _add_missing(engine, settings)
    style, strips = _piece_style(engine)
    before, after = _frame(engine)
    bos = _named_id(engine, settings, "bos_token")
    eos = _named_id(engine, settings, "eos_token")
    bos_ids = [bos] if bos is not None else token_ids(config, "bos_token_id")
    return Tokenizer(
        engine,
        style,
        SpecialIds(
            bos=bos_ids[0] if bos_ids else None,
            eos=eos_union(config, generation_config, [] if eos is None else [eos]),
            before=before,
            after=after,
        ),
        max(engine.get_vocab().values(), default=-1) + 1,
        strips_leading_space=strips,
        chat_templates=_chat_templates(path, settings),
        named_tokens={name: text for name in _NAMED_TOKENS if (text := _content(settings.get(name))) is not None},
    )


def _read_engine(path: Path) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        if (path / "tokenizer.model").is_file():
            raise ModelError(
                f"{path} has only tokenizer.model (SentencePiece), which octavo does not read; add the tokenizer.json "
                "that transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...) writes, or use a GGUF file"
            )
        raise ModelError(f"{path} has no tokenizer.json; add the one that the model was published with")
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{file} cannot be read: {error}; download it again") from error


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}; download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds a {type(value).__name__}, expected an object; download it again")
    return value


def _content(token: object) -> str | None:
    """The text of a token that is written either as text or as an AddedToken object."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _named_id(engine: tokenizers.Tokenizer, settings: Mapping[str, Any], name: str) -> int | None:
    content = _content(settings.get(name))
    return None if content is None else engine.token_to_id(content)


def _add_missing(engine: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
    """Tokens that only the companions call added or special; most tokenizer.json files already have them all."""
    present = {token.content for token in engine.get_added_tokens_decoder().values()}
    listed = settings.get("added_tokens_decoder", {})
    for token_id in sorted(listed, key=int):
        entry = listed[token_id]
        if entry["content"] not in present:
            engine.add_tokens([AddedToken(**{k: v for k, v in entry.items() if k != "id"})])
            present.add(entry["content"])
    for content in _special_contents(settings):
        if content not in present and engine.token_to_id(content) is not None:
            engine.add_special_tokens([AddedToken(content, special=True, normalized=False)])


def _special_contents(settings: Mapping[str, Any]) -> Iterator[str]:
    extra = settings.get("additional_special_tokens") or settings.get("extra_special_tokens") or []
    more = extra.values() if isinstance(extra, dict) else extra
    for token in [*(settings.get(name) for name in _NAMED_TOKENS), *more]:
        content = _content(token)
        if content is not None:
            yield content


def _piece_style(engine: tokenizers.Tokenizer) -> tuple[PieceStyle, bool]:
    """How the vocabulary writes bytes, and whether decoding strips the first space: both are in the decoder."""
    state: dict[str, Any] = json.loads(engine.decoder.__getstate__()) if engine.decoder is not None else {"type": None}
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return "byte_level", False
    replaces = any(step["type"] == "Replace" and step["pattern"] == {"String": "▁"} for step in steps)
    if kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} and (replaces or "Metaspace" in kinds):
        strips = any(step["type"] == "Strip" and step["content"] == " " and step["start"] > 0 for step in steps)
        prefixes = any(step["type"] == "Metaspace" and step["prepend_scheme"] != "never" for step in steps)
        return "sentencepiece", strips or prefixes
    raise ModelError(
        f"tokenizer.json has the decoder {', '.join(map(str, sorted(kinds, key=str)))}, which octavo does not know; "
        "supported are ByteLevel and SentencePiece's (Metaspace, or Replace with ByteFallback)"
    )


def _frame(engine: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the post-processor puts before and after a text, found by encoding one."""
    bare, framed = engine.encode("a", add_special_tokens=False).ids, engine.encode("a").ids
    for start in range(len(framed) - len(bare) + 1):
        if framed[start : start + len(bare)] == bare:
            return tuple(framed[:start]), tuple(framed[start + len(bare) :])
    raise ModelError("tokenizer.json has a post-processor that rewrites the text's own tokens; octavo does not know it")


def _chat_templates(path: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """chat_template.jinja where there is one, else what tokenizer_config.json holds: one, or a list of named ones."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return {"default": file.read_text(encoding="utf-8")}
    templates = settings.get("chat_template")
    if templates is None:
        return {}
    if isinstance(templates, str):
        return {"default": templates}
    try:
        named = {entry["name"]: entry["template"] for entry in templates}
    except (TypeError, KeyError) as error:
        raise ModelError(
            f"{path / 'tokenizer_config.json'}: chat_template is neither text nor a list of names and templates; "
            "download it again"
        ) from error
    return {str(name): str(template) for name, template in named.items()}
