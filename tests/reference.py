"""The real models as transformers runs them: the independent reference of the real-model tests."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


def gguf_reference(path: Path) -> PreTrainedModel:
    """transformers' model on the same file, dequantised to float32."""
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()
