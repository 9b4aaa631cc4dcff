"""Gemma 3, text only: norms on both sides of each block, normed queries and keys, five local layers to one global."""

from __future__ import annotations

import math

from octavo.config import LayerConfig, ModelConfig
from octavo.graph import Trace, Value
from octavo.models.config_keys import ConfigKeys
from octavo.models.config_parts import decoder_config, max_position, num_layers, rope_config, rope_section
from octavo.models.exact import power
from octavo.models.layers import gated_mlp, logits, self_attention

# Published files leave these out where they equal the defaults of transformers' Gemma3TextConfig.
DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0


def configure(keys: ConfigKeys) -> ModelConfig:
    keys = keys.with_defaults(DEFAULTS)
    if keys.flag("use_bidirectional_attention"):
        raise keys.error("use_bidirectional_attention", "false: octavo generates text, left to right")
    window = keys.integer("sliding_window") if keys.flag("use_sliding_window", True) else None
    full, local = _ropes(keys)
    kinds = {
        "full_attention": LayerConfig(rope_config(keys, full)),
        "sliding_attention": LayerConfig(rope_config(keys, local), window),
    }
    return decoder_config(
        keys,
        family="gemma3",
        layers=tuple(kinds[kind] for kind in _layer_types(keys, kinds)),
        max_position=max_position(keys, kinds["full_attention"].rope, stated_is_scaled=True),
        attention_scale=power(keys.number("query_pre_attn_scalar"), -0.5),
        tie_embeddings=True,
        activations={"gelu_pytorch_tanh": "gelu_tanh"},
    )


def build(t: Trace, config: ModelConfig) -> Value:
    eps = config.rms_norm_eps
    x = t.embed(t.token_ids, "embed", config.vocab_size, config.hidden_size, scale=math.sqrt(config.hidden_size))
    for i in range(config.num_layers):
        h = t.rms_norm(x, f"layers.{i}.attn_norm", eps=eps)
        h = self_attention(t, config, i, h, qk_norm=True)
        x = t.add(x, t.rms_norm(h, f"layers.{i}.post_attn_norm", eps=eps))
        h = t.rms_norm(x, f"layers.{i}.mlp_norm", eps=eps)
        h = gated_mlp(t, config, i, h)
        x = t.add(x, t.rms_norm(h, f"layers.{i}.post_mlp_norm", eps=eps))
    return logits(t, config, x)


def _ropes(keys: ConfigKeys) -> tuple[ConfigKeys, ConfigKeys]:
    """RoPE of global and of local layers; scaling in the older style is meant for the global ones alone."""
    section = keys.section("rope_parameters")
    if "full_attention" in section or "sliding_attention" in section:
        full, local = section.section("full_attention"), section.section("sliding_attention")
        return full.with_defaults({"rope_theta": GLOBAL_THETA}), local.with_defaults({"rope_theta": LOCAL_THETA})
    local = ConfigKeys({"rope_theta": keys.number("rope_local_base_freq", LOCAL_THETA)})
    return rope_section(keys, theta=GLOBAL_THETA), local


def _layer_types(keys: ConfigKeys, known: dict[str, LayerConfig]) -> list[str]:
    count = num_layers(keys)
    if "layer_types" not in keys:
        pattern = keys.integer("sliding_window_pattern")
        return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(count)]
    types = keys.texts("layer_types")
    if len(types) != count or not set(types) <= set(known):
        raise keys.error("layer_types", f"{count} entries, each {' or '.join(known)}")
    return types
