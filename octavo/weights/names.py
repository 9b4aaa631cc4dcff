"""One set of weight names for every file format, and the changes of content that go with the names.

    embed.weight   norm.weight   lm_head.weight            (no lm_head where it is tied to embed)
    layers.N.attn_norm.weight                              before attention
    layers.N.attn.{q,k,v,o}.{weight,bias}                  [out_features, in_features], heads half-split for RoPE
    layers.N.attn.{q_norm,k_norm}.weight
    layers.N.post_attn_norm.weight                         after attention, before the residual (Gemma)
    layers.N.mlp_norm.weight                               before the MLP
    layers.N.mlp.{gate,up,down}.{weight,bias}
    layers.N.post_mlp_norm.weight                          after the MLP, before the residual (Gemma)

A norm's weight is always the multiplier itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from octavo.errors import ModelError
from octavo.weights.quants import SUPPORTED
from octavo.weights.tensor import WeightTensor

Rename = Callable[[str], str | None]

_HF_PREFIX = re.compile(r"(model\.language_model\.|language_model\.model\.|language_model\.|model\.)")
_HF_IGNORED = re.compile(r"(.*\.)?(vision_tower|vision_model|multi_modal_projector|visual)\..*|.*rotary_emb\.inv_freq")
_HF_TOP = {"embed_tokens.weight": "embed.weight", "norm.weight": "norm.weight", "lm_head.weight": "lm_head.weight"}
_HF_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")
_HF_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn.q",
    "self_attn.k_proj": "attn.k",
    "self_attn.v_proj": "attn.v",
    "self_attn.o_proj": "attn.o",
    "self_attn.q_norm": "attn.q_norm",
    "self_attn.k_norm": "attn.k_norm",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}
# Where norms stand on both sides, Hugging Face means by post_attention_layernorm the one after attention.
_HF_SANDWICH_PARTS = {
    **_HF_PARTS,
    "post_attention_layernorm": "post_attn_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "post_mlp_norm",
}

_GGUF_TOP = {
    "token_embd.weight": "embed.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}
_GGUF_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_GGUF_PARTS = {
    "attn_norm": "attn_norm",
    "attn_q": "attn.q",
    "attn_k": "attn.k",
    "attn_v": "attn.v",
    "attn_output": "attn.o",
    "attn_q_norm": "attn.q_norm",
    "attn_k_norm": "attn.k_norm",
    "post_attention_norm": "post_attn_norm",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "mlp.gate",
    "ffn_up": "mlp.up",
    "ffn_down": "mlp.down",
    "post_ffw_norm": "post_mlp_norm",
}
_GGUF_CONFIG_TENSORS = {"rope_freqs.weight"}  # read by gguf_config.py

# Models whose Hugging Face checkpoints store w where the norm multiplies by 1 + w. Gemma 3n and later do not.
_ONE_PLUS_NORMS = ("gemma", "gemma2", "gemma3", "gemma3_text")


def from_hf(stored: Mapping[str, WeightTensor], config: Mapping[str, Any]) -> tuple[dict[str, WeightTensor], list[str]]:
    """Rename the tensors of a Hugging Face checkpoint.

    Args:
        stored: tensors under the names of the file; vision towers and rotary buffers are dropped.
        config: config.json.

    Returns:
        Tensors under octavo's names, and the stored names that octavo has no use for.

    Raises:
        ModelError: two tensors claim one name, or a needed one has an unsupported type.
    """
    sandwich = any("pre_feedforward_layernorm" in name for name in stored)
    parts = _HF_SANDWICH_PARTS if sandwich else _HF_PARTS

    def rename(name: str) -> str | None:
        bare = _HF_PREFIX.sub("", name, count=1) if _HF_PREFIX.match(name) else name
        return _HF_TOP.get(bare) or _layer_name(_HF_LAYER, parts, bare)

    kept = {name: tensor for name, tensor in stored.items() if not _HF_IGNORED.fullmatch(name)}
    tensors, unused = _assign(kept, rename)
    if config.get("model_type") in _ONE_PLUS_NORMS:
        tensors = {name: _plus_one(t) if name.endswith("norm.weight") else t for name, t in tensors.items()}
    return tensors, unused


def from_gguf(
    stored: Mapping[str, WeightTensor], config: Mapping[str, Any]
) -> tuple[dict[str, WeightTensor], list[str]]:
    """Rename the tensors of a GGUF file and undo llama.cpp's reordering of q and k.

    Args:
        stored: tensors under the names of the file.
        config: what `gguf_config.config_from_gguf` made of the metadata.

    Returns, Raises: as `from_hf`.
    """

    def rename(name: str) -> str | None:
        return _GGUF_TOP.get(name) or _layer_name(_GGUF_LAYER, _GGUF_PARTS, name)

    tensors, unused = _assign({k: v for k, v in stored.items() if k not in _GGUF_CONFIG_TENSORS}, rename)
    if config["model_type"] == "llama":
        heads = {".attn.q.": config["num_attention_heads"], ".attn.k.": config["num_key_value_heads"]}
        for part, count in heads.items():
            tensors.update({name: t.deinterleaved(count) for name, t in tensors.items() if part in name})
    return tensors, unused


def untie(tensors: Mapping[str, WeightTensor], config: Mapping[str, Any]) -> tuple[dict[str, WeightTensor], bool]:
    """Settle whether `lm_head.weight` is `embed.weight`.

    A config that ties the two beside a file that holds both is a copy if they are equal, and is wrong if not: then
    the file wins, as in transformers.

    Returns:
        The tensors without a tied `lm_head.weight`, and whether it is tied.
    """
    text = config.get("text_config") or {}
    by_default = str(config.get("model_type", "")).startswith("gemma")
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", by_default)))
    result = dict(tensors)
    head, embed = result.get("lm_head.weight"), result.get("embed.weight")
    if tied and head is not None and embed is not None:
        tied = head.dtype == embed.dtype and head.shape == embed.shape and np.array_equal(head.stored, embed.stored)
        if tied:
            del result["lm_head.weight"]
    return result, tied


def _layer_name(pattern: re.Pattern[str], parts: Mapping[str, str], name: str) -> str | None:
    match = pattern.fullmatch(name)
    if match is None or match[2] not in parts:
        return None
    return f"layers.{int(match[1])}.{parts[match[2]]}.{match[3]}"


def _assign(stored: Mapping[str, WeightTensor], rename: Rename) -> tuple[dict[str, WeightTensor], list[str]]:
    tensors: dict[str, WeightTensor] = {}
    unused: list[str] = []
    for stored_name, tensor in stored.items():
        name = rename(stored_name)
        if name is None:
            unused.append(stored_name)
            continue
        if name in tensors:
            raise ModelError(f"tensors {tensors[name].name!r} and {stored_name!r} are both {name}")
        if tensor.dtype not in SUPPORTED:
            raise ModelError(
                f"tensor {stored_name!r} is of type {tensor.dtype}, which is not supported; "
                f"supported: {', '.join(SUPPORTED)}"
            )
        tensors[name] = tensor
    return {name: replace(tensor, name=name) for name, tensor in tensors.items()}, unused


def _plus_one(tensor: WeightTensor) -> WeightTensor:
    """The multiplier 1 + w, computed in float32 as the model does. Norms are small, so this is done at once."""
    multiplier = tensor.to_float32() + np.float32(1)
    return WeightTensor(tensor.name, tensor.shape, "F32", multiplier.reshape(-1).view(np.uint8))
