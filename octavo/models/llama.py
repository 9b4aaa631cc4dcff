"""Llama and what shares its layers: Llama 1 to 3, SmolLM2, Mistral."""

from __future__ import annotations

from octavo.config import LayerConfig, ModelConfig
from octavo.graph import Trace, Value
from octavo.models.config_keys import ConfigKeys
from octavo.models.config_parts import decoder_config, head_dim, max_position, num_layers, rope_config, rope_section
from octavo.models.exact import power
from octavo.models.layers import gated_mlp, logits, self_attention


def configure(keys: ConfigKeys) -> ModelConfig:
    rope = rope_config(keys, rope_section(keys, theta=10_000.0))
    layer = LayerConfig(rope, _window(keys))
    return decoder_config(
        keys,
        family="llama",
        layers=(layer,) * num_layers(keys),
        max_position=max_position(keys, rope),
        attention_scale=power(head_dim(keys), -0.5),
        tie_embeddings=False,
        mlp_bias=keys.flag("mlp_bias"),
        activations={"silu": "silu"},
    )


def build(t: Trace, config: ModelConfig) -> Value:
    x = t.embed(t.token_ids, "embed", config.vocab_size, config.hidden_size)
    for i in range(config.num_layers):
        h = t.rms_norm(x, f"layers.{i}.attn_norm", eps=config.rms_norm_eps)
        x = t.add(x, self_attention(t, config, i, h))
        h = t.rms_norm(x, f"layers.{i}.mlp_norm", eps=config.rms_norm_eps)
        x = t.add(x, gated_mlp(t, config, i, h))
    return logits(t, config, x)


def _window(keys: ConfigKeys) -> int | None:
    """Mistral's window holds for every layer; Llama has none, whatever the file says."""
    if keys.text("model_type", "llama") != "mistral" or not keys.flag("use_sliding_window", True):
        return None
    return keys.optional_integer("sliding_window")
