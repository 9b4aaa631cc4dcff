"""Tiny random checkpoints of every family and every feature, saved by transformers, which then is the reference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

VOCAB = 96
WINDOW = 12
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,  # not hidden_size / heads
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
GEMMA = {
    "num_hidden_layers": 4,
    "query_pre_attn_scalar": 20,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
}

# name -> (config class, model class, changes to SIZES). Prompts are up to 100 tokens, three times the original
# context of the scaled RoPEs.
CHECKPOINTS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama-tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama-biases": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "llama-one-kv-head": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 1, "head_dim": 8}),
    "llama-all-kv-heads": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 6, "head_dim": None}),
    "llama-linear": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    ),
    "llama3-8": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": {**LLAMA3, "factor": 8.0}}),
    "llama3-32": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": {**LLAMA3, "factor": 32.0}}),
    "llama-yarn": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": YARN, "max_position_embeddings": 128}),
    "mistral-window": (MistralConfig, MistralForCausalLM, {"sliding_window": WINDOW}),
    "mistral-full": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, GEMMA),
    "gemma3-variations": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            **GEMMA,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "final_logit_softcapping": 5.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
}


@dataclass(frozen=True)
class Reference:
    """A checkpoint on disk, and transformers' model of it."""

    path: Path
    model: PreTrainedModel

    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        with torch.inference_mode():
            return self.model(torch.tensor([tokens])).logits[0].float().numpy()


def make(name: str, path: Path, **more: Any) -> Reference:
    """Weights are large enough that attention is far from uniform, and norms far from one."""
    config_class, model_class, changes = CHECKPOINTS[name]
    torch.manual_seed(list(CHECKPOINTS).index(name))
    model = model_class(config_class(**{**SIZES, **changes, **more}, attn_implementation="eager")).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.5, 0.5))
            elif parameter.ndim == 1:
                parameter.normal_(0.0, 0.5)
            else:
                parameter.normal_(0.0, 1.5 * parameter.shape[1] ** -0.5)
    model.save_pretrained(path)
    return Reference(path, model)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()
