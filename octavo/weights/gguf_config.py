"""From GGUF metadata to the dict that Hugging Face's config.json would hold.

So that models know one kind of configuration. Keys: docs/gguf.md of ggml-org/ggml, `gguf-py/gguf/constants.py` of
ggml-org/llama.cpp; defaults for absent keys are those of llama.cpp's loader (`src/llama-model.cpp`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log
from typing import Any

import numpy as np

from octavo.errors import ModelError
from octavo.weights.files import shown
from octavo.weights.tensor import WeightTensor

Tensors = Mapping[str, WeightTensor]
Config = dict[str, Any]

_FLOAT32_MAX = float(np.finfo(np.float32).max)


class _Keys:
    """Typed access to the keys of one architecture; a value of the wrong kind is a ModelError that names the key."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self.arch = ""
        self.arch = self.text("general.architecture")

    def name(self, key: str) -> str:
        return key if key.startswith(("general.", "tokenizer.")) else f"{self.arch}.{key}"

    def get(self, key: str) -> Any:
        return self.metadata.get(self.name(key))

    def text(self, key: str, default: str | None = None) -> str:
        value = self._required(key, default)
        if not isinstance(value, str):
            raise self._unexpected(key, value, "text")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._required(key, default)
        if isinstance(value, np.ndarray):
            raise ModelError(f"GGUF metadata: {self.name(key)} differs from layer to layer, which is not supported")
        if type(value) is not int or value < 1:
            raise self._unexpected(key, value, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number, in the shortest decimal form that its float32 has: 1e-05, not 9.999999747378752e-06."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _FLOAT32_MAX:
            raise self._unexpected(key, value, "a number")
        return float(str(np.float32(value)))

    def token(self, key: str) -> int | None:
        key = f"tokenizer.ggml.{key}_token_id"
        value = self.get(key)
        if value is not None and (type(value) is not int or value < 0):
            raise self._unexpected(key, value, "a token id")
        return value

    def _required(self, key: str, default: object) -> Any:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"GGUF metadata lacks {self.name(key)}")
        return value

    def _unexpected(self, key: str, value: object, expected: str) -> ModelError:
        return ModelError(f"GGUF metadata: {self.name(key)} is {shown(value)}; expected {expected}")


def config_from_gguf(metadata: Mapping[str, Any], tensors: Tensors) -> Config:
    """The configuration of a GGUF model in the terms of Hugging Face's config.json.

    llama3's RoPE scaling, which GGUF keeps as a tensor of divisors, becomes
    `rope_scaling = {"rope_type": "factors", "freq_factors": [...]}`.

    Args:
        metadata, tensors: of the GGUF file, under its names.

    Raises:
        ModelError: the architecture or its RoPE scaling is not supported, or a key is missing or malformed.
    """
    keys = _Keys(metadata)
    if keys.arch not in _ARCHITECTURES:
        raise ModelError(
            f"GGUF architecture {shown(keys.arch)} is not supported; supported: {', '.join(sorted(_ARCHITECTURES))}"
        )
    if "token_embd.weight" not in tensors or len(tensors["token_embd.weight"].shape) != 2:
        raise ModelError("the GGUF file has no matrix token_embd.weight")
    config = _common(keys, tensors)
    config.update(_ARCHITECTURES[keys.arch](keys, config))
    scaling = _rope_scaling(keys, tensors)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config


def _common(keys: _Keys, tensors: Tensors) -> Config:
    hidden, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    layers = keys.count("block_count")
    if layers > len(tensors):
        raise ModelError(f"GGUF metadata: {keys.name('block_count')} is {layers}, but there are {len(tensors)} tensors")
    head_dim = keys.count("attention.key_length", keys.count("rope.dimension_count", max(hidden // heads, 1)))
    if keys.count("attention.value_length", head_dim) != head_dim:
        raise ModelError("GGUF models whose keys and values differ in width are not supported")
    if keys.number("expert_count", 0.0) > 0:
        raise ModelError(f"GGUF mixtures of experts ({keys.name('expert_count')} > 0) are not supported")
    stops = [keys.token("eos"), keys.token("eot"), keys.token("eom")]
    eos = list(dict.fromkeys(token for token in stops if token is not None))
    return {
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "max_position_embeddings": keys.count("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "bos_token_id": keys.token("bos"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
    }


def _llama(_keys: _Keys, _config: Config) -> Config:
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu"}


def _gemma3(keys: _Keys, config: Config) -> Config:
    # Only the 27B model scales its queries by hidden_size / heads; GGUF does not say so, and llama.cpp too goes by its
    # 62 layers.
    per_head = config["hidden_size"] // config["num_attention_heads"]
    result: Config = {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": per_head if config["num_hidden_layers"] == 62 else config["head_dim"],
        "sliding_window": keys.count("attention.sliding_window"),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
    }
    pattern = keys.get("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray):
        if pattern.dtype != np.bool_ or len(pattern) != config["num_hidden_layers"]:
            raise ModelError("GGUF metadata: gemma3.attention.sliding_window_pattern must hold one bool per layer")
        result["layer_types"] = ["sliding_attention" if local else "full_attention" for local in pattern]
    else:
        result["sliding_window_pattern"] = keys.count("attention.sliding_window_pattern", 6)
    return result


_ARCHITECTURES: dict[str, Callable[[_Keys, Config], Config]] = {"llama": _llama, "gemma3": _gemma3}


def _rope_scaling(keys: _Keys, tensors: Tensors) -> Config | None:
    before = keys.number("rope.scale_linear", 1.0)  # the key that came before rope.scaling
    kind = keys.text("rope.scaling.type", "none" if before == 1.0 else "linear")
    if "rope_freqs.weight" in tensors:
        if kind != "none":
            raise ModelError(f"GGUF RoPE scaling {shown(kind)} together with rope_freqs.weight is not supported")
        return {"rope_type": "factors", "freq_factors": tensors["rope_freqs.weight"].to_float32().ravel().tolist()}
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": keys.number("rope.scaling.factor", None if before == 1.0 else before)}
    if kind == "yarn":
        return _yarn(keys)
    raise ModelError(
        f"GGUF RoPE scaling {shown(kind)} is not supported; supported: none, linear, yarn, rope_freqs.weight"
    )


def _yarn(keys: _Keys) -> Config:
    for key, neutral in (("yarn_log_multiplier", 0.0), ("yarn_ext_factor", 1.0)):
        if keys.number(f"rope.scaling.{key}", neutral) != neutral:
            raise ModelError(f"GGUF RoPE scaling 'yarn' with {keys.name(f'rope.scaling.{key}')} is not supported")
    factor = keys.number("rope.scaling.factor")
    if factor < 1:
        raise ModelError(f"GGUF metadata: {keys.name('rope.scaling.factor')} is {factor}; expected at least 1")
    result: Config = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.count("rope.scaling.original_context_length"),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    # llama.cpp's factors multiply YaRN's own attention factor; Hugging Face's replaces it.
    extra = keys.number("rope.scaling.attn_factor", 1.0) * keys.number("rope.scaling.yarn_attn_factor", 1.0)
    if extra != 1.0:
        result["attention_factor"] = extra * (0.1 * log(factor) + 1.0)
    return result
