"""A tiny random model with a tokeniser, made by transformers and tokenizers: an engine that boots in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

TEXT = [
    "the quick brown fox jumps over the lazy dog and runs into the forest",
    "a journey of a thousand miles begins with a single step, says the book",
    "numbers such as 1 2 3 4 5 and signs such as , . ; : ! ? are here as well",
]
SPECIAL = ["<|end|>", "<|start|>", "<|turn|>"]  # ids 0, 1, 2


def make_tokenizer(directory: Path, *, adds_bos: bool) -> None:
    """Byte-level BPE over all bytes; `<|end|>` (id 0) ends a text, and `<|start|>` (id 1) begins it if asked for."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|start|> $A", special_tokens=[("<|start|>", 1)]
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))


def make_llama(directory: Path, *, seed: int = 0, adds_bos: bool = False, **config: Any) -> Path:
    """Saves a Llama with grouped heads and a vocabulary that is wider than the tokeniser's; returns the directory."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": 384,
        "hidden_size": 72,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 0,
        "initializer_range": 0.2,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **config})).eval()
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    make_tokenizer(directory, adds_bos=adds_bos)
    return directory


def make_gemma(directory: Path, *, seed: int = 0, **config: Any) -> Path:
    """Saves a Gemma 3 with three layers that look back over 40 tokens and one that sees all; returns the directory."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": 384,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "query_pre_attn_scalar": 16,
        "sliding_window": 40,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "bos_token_id": 1,
        "eos_token_id": 0,
        "initializer_range": 0.2,
    }
    model = Gemma3ForCausalLM(Gemma3TextConfig(**{**sizes, **config})).eval()
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    make_tokenizer(directory, adds_bos=False)
    return directory
