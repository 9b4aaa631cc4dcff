"""What the families' configurations have in common: sizes, RoPE and the longest context."""

from __future__ import annotations

from octavo.config import LayerConfig, ModelConfig, RopeConfig, RopeKind
from octavo.errors import ModelError
from octavo.models.config_keys import ConfigKeys

ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn", "factors")


# Far beyond any model, so that a broken file is an error and not an allocation.
MOST_LAYERS = 10_000
MOST_COLUMNS = 2**20


def num_layers(keys: ConfigKeys) -> int:
    return keys.integer("num_hidden_layers", most=MOST_LAYERS)


def head_dim(keys: ConfigKeys) -> int:
    """The stated width of a head, else hidden size / heads."""
    if "head_dim" in keys:
        return keys.integer("head_dim", most=MOST_COLUMNS)
    hidden, heads = keys.integer("hidden_size", most=MOST_COLUMNS), keys.integer("num_attention_heads")
    if hidden % heads:
        raise keys.error("hidden_size", f"a multiple of num_attention_heads={heads}, as there is no head_dim")
    return hidden // heads


def decoder_config(
    keys: ConfigKeys,
    *,
    family: str,
    layers: tuple[LayerConfig, ...],
    max_position: int,
    attention_scale: float,
    tie_embeddings: bool,
    mlp_bias: bool = False,
    activations: dict[str, str],
) -> ModelConfig:
    """The ModelConfig of a decoder with gated MLPs. `activations`: names that the file may use -> octavo's name."""
    key = "hidden_activation" if "hidden_activation" in keys else "hidden_act"
    activation = keys.text(key, next(iter(activations)))
    if activation not in activations:
        raise keys.error(key, f"one of {', '.join(activations)} for the family {family}")
    heads = keys.integer("num_attention_heads")
    kv_heads = keys.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise keys.error("num_key_value_heads", f"a divisor of num_attention_heads={heads}")
    if head_dim(keys) % 2:
        raise keys.error("head_dim", "an even number")
    attention_bias = keys.flag("attention_bias")
    return ModelConfig(
        family=family,
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        intermediate_size=keys.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim(keys),
        rms_norm_eps=keys.number("rms_norm_eps"),
        max_position=max_position,
        layers=layers,
        attention_scale=attention_scale,
        tie_embeddings=keys.flag("tie_word_embeddings", tie_embeddings),
        attention_bias=attention_bias,
        attention_out_bias=attention_bias,
        mlp_bias=mlp_bias,
        activation="silu" if activations[activation] == "silu" else "gelu_tanh",
        attention_softcap=keys.optional_number("attn_logit_softcapping"),
        logit_softcap=keys.optional_number("final_logit_softcapping"),
    )


def rope_section(keys: ConfigKeys, theta: float) -> ConfigKeys:
    """The RoPE keys in one place: `rope_parameters`, or the older `rope_scaling` with `rope_theta` beside it."""
    scaling = keys.section("rope_scaling")
    section = scaling if scaling.values else keys.section("rope_parameters")
    outer = {key: keys.values[key] for key in ("rope_theta", "partial_rotary_factor") if key in keys}
    return section.with_defaults({"rope_theta": theta, **outer})


def rope_config(keys: ConfigKeys, section: ConfigKeys) -> RopeConfig:
    """RoPE of one kind of layer.

    Raises:
        ModelError: a RoPE type that octavo does not have. `dynamic` is one: in transformers its frequencies change
            with the length so far, which keys that are in the cache already cannot follow.
    """
    kind = section.text("rope_type", section.text("type", "default"))
    if kind not in ROPE_KINDS:
        raise ModelError(f"RoPE type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    nested = [key for key, value in section.values.items() if isinstance(value, dict)]
    if nested:
        raise ModelError(
            f"model configuration: RoPE differs by layer type ({', '.join(nested)}), which this family lacks"
        )
    if section.number("partial_rotary_factor", 1.0) != 1.0:
        raise section.error("partial_rotary_factor", "1.0 for this family")
    dim = head_dim(keys)
    theta = section.number("rope_theta")
    if kind == "linear":
        original = section.optional_integer("original_max_position_embeddings")
        return RopeConfig(dim, theta, "linear", factor=section.number("factor"), original_max_position=original)
    if kind == "llama3":
        return _llama3(keys, section, dim, theta)
    if kind == "yarn":
        return _yarn(keys, section, dim, theta)
    if kind == "factors":
        factors = tuple(section.numbers("freq_factors"))
        if len(factors) != dim // 2:
            raise ModelError(f"model configuration: {len(factors)} RoPE frequency factors for heads of width {dim}")
        return RopeConfig(dim, theta, "factors", freq_factors=factors)
    return RopeConfig(dim, theta)


def max_position(keys: ConfigKeys, rope: RopeConfig, *, stated_is_scaled: bool = False) -> int:
    """The longest context, in tokens.

    Files disagree on whether `max_position_embeddings` counts before or after RoPE scaling:

    - default, llama3, factors: after. It is taken as it is.
    - linear, yarn with a stated original length: the original times the factor, unless the file states more.
    - linear, yarn without: before, as in vicuna-16k or Qwen2.5 with YaRN switched on. It is multiplied by the factor,
      unless the family always states the scaled length (`stated_is_scaled`, Gemma 3).
    """
    stated = keys.integer("max_position_embeddings")
    if rope.kind not in ("linear", "yarn"):
        return stated
    if rope.original_max_position is not None:
        return max(stated, int(rope.original_max_position * rope.factor))
    return stated if stated_is_scaled else int(stated * rope.factor)


def _llama3(keys: ConfigKeys, section: ConfigKeys, dim: int, theta: float) -> RopeConfig:
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if low >= high:
        raise section.error("low_freq_factor", f"less than high_freq_factor={high:g}")
    return RopeConfig(
        dim,
        theta,
        "llama3",
        factor=section.number("factor"),
        original_max_position=_original_length(keys, section),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(keys: ConfigKeys, section: ConfigKeys, dim: int, theta: float) -> RopeConfig:
    original = _original_length(keys, section)
    if theta <= 1:
        raise section.error("rope_theta", "a number > 1 for yarn")
    return RopeConfig(
        dim,
        theta,
        "yarn",
        factor=section.number("factor", keys.integer("max_position_embeddings") / original),
        original_max_position=original,
        beta_fast=section.number("beta_fast", 32.0),
        beta_slow=section.number("beta_slow", 1.0),
        attention_factor=section.optional_number("attention_factor"),
        mscale=section.optional_number("mscale"),
        mscale_all_dim=section.optional_number("mscale_all_dim"),
        truncate=section.flag("truncate", True),
    )


def _original_length(keys: ConfigKeys, section: ConfigKeys) -> int:
    """Context length before scaling; transformers falls back on max_position_embeddings."""
    key = "original_max_position_embeddings"
    return section.integer(key, keys.integer(key, keys.integer("max_position_embeddings")))
