"""The `sentencepiece` library as reference: a GGUF vocabulary as one of its models, and one of its models as GGUF."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as proto

USER_DEFINED = 4


def processor_from_gguf(metadata: Mapping[str, Any]) -> sentencepiece.SentencePieceProcessor:
    """GGUF's token types are SentencePiece's own numbers; a user-defined token is stored with plain spaces there."""
    model = proto.ModelProto()
    model.trainer_spec.model_type = proto.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = True
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = metadata["tokenizer.ggml.add_space_prefix"]
    model.normalizer_spec.remove_extra_whitespaces = False
    unknown = metadata["tokenizer.ggml.unknown_token_id"]
    rows = zip(
        metadata["tokenizer.ggml.tokens"],
        metadata["tokenizer.ggml.scores"].tolist(),
        metadata["tokenizer.ggml.token_type"].tolist(),
        strict=True,
    )
    for i, (text, score, kind) in enumerate(rows):
        piece = text.replace(" ", "▁") if kind == USER_DEFINED else text
        model.pieces.add(piece=piece, score=score, type=2 if i == unknown else kind)
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


def train(directory: Path, lines: Iterable[str], **options: Any) -> sentencepiece.SentencePieceProcessor:
    """A tiny BPE model with byte fallback and the ids of Llama 2 (unk 0, bos 1, eos 2)."""
    prefix = directory / "spm"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(prefix),
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")


def gguf_from_processor(processor: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    model = proto.ModelProto()
    model.ParseFromString(processor.serialized_model_proto())
    texts = [p.piece.replace("▁", " ") if p.type == USER_DEFINED else p.piece for p in model.pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": np.array([p.score for p in model.pieces], dtype=np.float32),
        "tokenizer.ggml.token_type": np.array([p.type for p in model.pieces], dtype=np.int32),
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
        "tokenizer.ggml.add_space_prefix": model.normalizer_spec.add_dummy_prefix,
        "tokenizer.ggml.add_bos_token": True,
    }
