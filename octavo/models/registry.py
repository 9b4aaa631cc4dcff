"""The families that octavo knows: a model is a file beside this one and a row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.config import ModelConfig
from octavo.graph import DType, Graph, Trace, Value
from octavo.models import gemma3, llama
from octavo.models.config_keys import ConfigKeys


@dataclass(frozen=True, slots=True)
class Family:
    configure: Callable[[ConfigKeys], ModelConfig]
    build: Callable[[Trace, ModelConfig], Value]
    architectures: tuple[str, ...]  # `architectures` of a config.json
    model_types: tuple[str, ...]  # `model_type` of a config.json that names no architecture


FAMILIES = {
    "llama": Family(llama.configure, llama.build, ("LlamaForCausalLM", "MistralForCausalLM"), ("llama", "mistral")),
    "gemma3": Family(
        gemma3.configure,
        gemma3.build,
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        ("gemma3_text", "gemma3"),
    ),
}


def build_graph(config: ModelConfig, dtype: DType) -> Graph:
    """Trace the model: from token ids and positions to float32 logits [S, vocabulary].

    Args:
        dtype: of the activations, "float32" or "bfloat16".
    """
    trace = Trace(dtype)
    return trace.graph(FAMILIES[config.family].build(trace, config))
