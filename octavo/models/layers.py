"""Parts that several families share, written with graph ops."""

from __future__ import annotations

from octavo.config import ModelConfig
from octavo.graph import Trace, Value
from octavo.models.rope import inverse_frequencies


def self_attention(t: Trace, config: ModelConfig, i: int, x: Value, *, qk_norm: bool = False) -> Value:
    """Projections, RoPE, attention and output projection of layer `i`: [T, hidden] -> [T, hidden]."""
    layer, name = config.layers[i], f"layers.{i}.attn"
    q = t.linear(x, f"{name}.q", config.num_heads * config.head_dim, bias=config.attention_bias)
    k = t.linear(x, f"{name}.k", config.num_kv_heads * config.head_dim, bias=config.attention_bias)
    v = t.linear(x, f"{name}.v", config.num_kv_heads * config.head_dim, bias=config.attention_bias)
    if qk_norm:
        q = t.rms_norm(q, f"{name}.q_norm", eps=config.rms_norm_eps, head_dim=config.head_dim)
        k = t.rms_norm(k, f"{name}.k_norm", eps=config.rms_norm_eps, head_dim=config.head_dim)
    frequencies, attention_factor = inverse_frequencies(layer.rope)
    inv_freq = tuple(frequencies.tolist())
    q = t.rope(q, head_dim=config.head_dim, inv_freq=inv_freq, attention_factor=attention_factor)
    k = t.rope(k, head_dim=config.head_dim, inv_freq=inv_freq, attention_factor=attention_factor)
    x = t.attention(
        q,
        k,
        v,
        layer=i,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.attention_scale,
        window=layer.window,
        softcap=config.attention_softcap,
    )
    return t.linear(x, f"{name}.o", config.hidden_size, bias=config.attention_out_bias)


def gated_mlp(t: Trace, config: ModelConfig, i: int, x: Value) -> Value:
    """down(activation(gate(x)) * up(x)) of layer `i`: [T, hidden] -> [T, hidden]."""
    name = f"layers.{i}.mlp"
    gate = t.linear(x, f"{name}.gate", config.intermediate_size, bias=config.mlp_bias)
    up = t.linear(x, f"{name}.up", config.intermediate_size, bias=config.mlp_bias)
    inner = t.silu_mul(gate, up) if config.activation == "silu" else t.gelu_mul(gate, up)
    return t.linear(inner, f"{name}.down", config.hidden_size, bias=config.mlp_bias)


def logits(t: Trace, config: ModelConfig, x: Value) -> Value:
    """Final norm and output projection of the rows that need logits: [T, hidden] -> float32 [S, vocabulary]."""
    x = t.select_rows(x)
    x = t.rms_norm(x, "norm", eps=config.rms_norm_eps)
    x = t.lm_head(x, "embed" if config.tie_embeddings else "lm_head", config.vocab_size)
    return x if config.logit_softcap is None else t.softcap(x, config.logit_softcap)
