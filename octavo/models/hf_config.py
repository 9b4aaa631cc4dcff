"""From a config.json to a ModelConfig. `octavo.weights` translates GGUF metadata into the same keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.config import ModelConfig
from octavo.errors import ModelError
from octavo.models.config_keys import ConfigKeys
from octavo.models.registry import FAMILIES, Family


def model_config(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> ModelConfig:
    """Understand a model's configuration.

    Args:
        config: config.json of transformers 4 or 5; of a multimodal model, the text part is read.
        generation_config: generation_config.json, {} where there is none. Its end-of-sequence ids are added.

    Raises:
        ModelError: an architecture, RoPE type or value that octavo does not have, or a key that is missing.
    """
    outer, extra = ConfigKeys(config), ConfigKeys(generation_config, "generation_config.")
    text = outer.section("text_config")
    keys = ConfigKeys({**outer.values, **text.values, **_head(outer)})
    model = _family(outer).configure(keys)
    eos = [token for part in (text, outer, extra) for token in part.token_ids("eos_token_id")]
    bos = [token for part in (text, outer, extra) for token in part.token_ids("bos_token_id")]
    return replace(model, bos_token_id=bos[0] if bos else None, eos_token_ids=tuple(dict.fromkeys(eos)))


def _head(outer: ConfigKeys) -> dict[str, Any]:
    """Of a multimodal model, the head and so its tie to the embeddings belong to the whole, not to the text part."""
    return {key: value for key, value in outer.values.items() if key == "tie_word_embeddings"}


def _family(keys: ConfigKeys) -> Family:
    architectures = keys.texts("architectures")
    name = architectures[0] if architectures else keys.text("model_type")
    for family in FAMILIES.values():
        if name in (family.architectures if architectures else family.model_types):
            return family
    supported = [known for family in FAMILIES.values() for known in family.architectures]
    raise ModelError(f"architecture {name!r} is not supported; supported: {', '.join(supported)}")
