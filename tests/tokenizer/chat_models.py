"""Tokenisers with the special tokens of many chat styles, saved so that octavo and transformers both can read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.tokenizer.chat_styles import NOT_SPECIAL, SPECIAL
from tests.tokenizer.corpus import TEXTS
from tests.tokenizer.pieces import train


def save_byte_level(path: Path) -> None:
    engine = tokenizers.Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    engine.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet))
    _finish(engine, path)


def save_sentencepiece(path: Path, *, scheme: str | None) -> None:
    """`scheme` None prepends U+2581 in the normaliser, after every special token; else it is Metaspace's."""
    lines = [line for text in TEXTS for line in text.split("\n") if line and "\0" not in line] * 3
    processor = train(path, lines, vocab_size=900)
    pieces = {processor.id_to_piece(i): i for i in range(processor.vocab_size())}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(pieces, key=pieces.__getitem__)
        if not processor.is_byte(pieces[piece]) and piece not in SPECIAL
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    engine = tokenizers.Tokenizer(models.BPE(pieces, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    space = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    engine.decoder = decoders.Sequence([decoders.Replace("▁", " "), *space])
    if scheme is None:
        engine.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        engine.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    _finish(engine, path)


def _finish(engine: tokenizers.Tokenizer, path: Path) -> None:
    """BOS comes from a post-processor, as in most published files; a chat template must not get a second one."""
    engine.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    engine.add_tokens([AddedToken(text, special=False, normalized=False) for text in NOT_SPECIAL])
    bos = engine.token_to_id("<s>")
    engine.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    engine.save(str(path / "tokenizer.json"))
    write_config(path)


def write_config(path: Path, **more: Any) -> None:
    values = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **more}
    (path / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")
