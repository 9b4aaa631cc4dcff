"""Names and what changes with them: the order of q and k rows, Gemma's norms, tied embeddings."""

import gguf
import numpy as np
import pytest

from octavo.errors import ModelError
from octavo.weights import WeightTensor
from octavo.weights.names import from_gguf, from_hf, untie

RNG = np.random.default_rng(3)


def tensor(name, values, dtype="F32"):
    values = np.asarray(values, np.float32)
    stored = gguf.quantize(values, gguf.GGMLQuantizationType[dtype]).view(np.uint8).reshape(-1)
    return WeightTensor(name, values.shape, dtype, stored)


def named(*names):
    return {name: tensor(name, np.full(4, index)) for index, name in enumerate(names)}


LLAMA_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn.q.weight",
    "self_attn.q_proj.bias": "attn.q.bias",
    "self_attn.k_proj.weight": "attn.k.weight",
    "self_attn.v_proj.weight": "attn.v.weight",
    "self_attn.o_proj.weight": "attn.o.weight",
    "post_attention_layernorm.weight": "mlp_norm.weight",
    "mlp.gate_proj.weight": "mlp.gate.weight",
    "mlp.up_proj.weight": "mlp.up.weight",
    "mlp.down_proj.bias": "mlp.down.bias",
}
GEMMA_LAYER = {
    **LLAMA_LAYER,
    "self_attn.q_norm.weight": "attn.q_norm.weight",
    "self_attn.k_norm.weight": "attn.k_norm.weight",
    "post_attention_layernorm.weight": "post_attn_norm.weight",
    "pre_feedforward_layernorm.weight": "mlp_norm.weight",
    "post_feedforward_layernorm.weight": "post_mlp_norm.weight",
}


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model.", "model.language_model.", "language_model."])
@pytest.mark.parametrize("layer", [LLAMA_LAYER, GEMMA_LAYER], ids=["llama", "gemma"])
def test_names_of_hugging_face(prefix, layer):
    expected = {f"{prefix}layers.17.{theirs}": f"layers.17.{ours}" for theirs, ours in layer.items()}
    expected |= {f"{prefix}embed_tokens.weight": "embed.weight", f"{prefix}norm.weight": "norm.weight"}
    expected["language_model.lm_head.weight" if "language_model" in prefix else "lm_head.weight"] = "lm_head.weight"
    tensors, unused = from_hf(named(*expected), {"model_type": "llama"})
    assert unused == []
    for index, ours in enumerate(expected.values()):
        assert tensors[ours].to_float32().tolist() == [index] * 4
        assert tensors[ours].name == ours


def test_names_of_gguf():
    expected = {
        "token_embd.weight": "embed.weight",
        "output_norm.weight": "norm.weight",
        "output.weight": "lm_head.weight",
        "blk.3.attn_norm.weight": "layers.3.attn_norm.weight",
        "blk.3.attn_q.weight": "layers.3.attn.q.weight",
        "blk.3.attn_k.bias": "layers.3.attn.k.bias",
        "blk.3.attn_v.weight": "layers.3.attn.v.weight",
        "blk.3.attn_output.weight": "layers.3.attn.o.weight",
        "blk.3.attn_q_norm.weight": "layers.3.attn.q_norm.weight",
        "blk.3.attn_k_norm.weight": "layers.3.attn.k_norm.weight",
        "blk.3.post_attention_norm.weight": "layers.3.post_attn_norm.weight",
        "blk.3.ffn_norm.weight": "layers.3.mlp_norm.weight",
        "blk.3.ffn_gate.weight": "layers.3.mlp.gate.weight",
        "blk.3.ffn_up.weight": "layers.3.mlp.up.weight",
        "blk.3.ffn_down.weight": "layers.3.mlp.down.weight",
        "blk.3.post_ffw_norm.weight": "layers.3.post_mlp_norm.weight",
    }
    tensors, unused = from_gguf(named(*expected, "rope_freqs.weight", "v.blk.0.x"), {"model_type": "gemma3_text"})
    assert unused == ["v.blk.0.x"]
    assert list(tensors) == list(expected.values())
    assert [t.to_float32()[0] for t in tensors.values()] == list(range(len(expected)))


def test_the_gguf_package_uses_these_names():
    """Every GGUF name of these architectures is mapped, but for the ones that config and RoPE take."""
    for arch, model_type in ((gguf.MODEL_ARCH.LLAMA, "other"), (gguf.MODEL_ARCH.GEMMA3, "gemma3_text")):
        kinds = [gguf.TENSOR_NAMES[kind] for kind in gguf.MODEL_TENSORS[arch] if "EXP" not in kind.name]
        names = [f"{kind.format(bid=0)}.weight" for kind in kinds]
        names = [name for name in names if not {"rope_freqs", "attn_rot_embd"} & set(name.split("."))]
        _, unused = from_gguf(named(*names), {"model_type": model_type})
        assert [name for name in unused if "exps" not in name and "inp" not in name] == []


def test_vision_and_rotary_buffers_are_dropped_and_the_rest_listed():
    stored = named(
        "model.vision_tower.encoder.layers.0.self_attn.q_proj.weight",
        "vision_tower.x.weight",
        "multi_modal_projector.mm.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.self_attn.sinks",
        "model.layers.0.mlp.experts.0.up_proj.weight",
        "score.weight",
    )
    tensors, unused = from_hf(stored, {"model_type": "llama"})
    assert tensors == {}
    assert unused == [
        "model.layers.0.self_attn.sinks",
        "model.layers.0.mlp.experts.0.up_proj.weight",
        "score.weight",
    ]


def test_two_tensors_of_one_name():
    with pytest.raises(ModelError, match=r"are both norm\.weight"):
        from_hf(named("model.norm.weight", "norm.weight"), {})


def test_a_needed_tensor_of_unsupported_type_is_refused_at_once():
    bad = WeightTensor("model.norm.weight", (4,), "F8_E4M3", np.zeros(4, np.uint8))
    with pytest.raises(ModelError, match=r"'model\.norm\.weight' is of type F8_E4M3"):
        from_hf({bad.name: bad}, {})
    other = WeightTensor("position_ids", (4,), "I64", np.zeros(32, np.uint8))
    assert from_hf({other.name: other}, {}) == ({}, ["position_ids"])


# ---- q and k ---------------------------------------------------------------------------------------------------------


def interleave(weight, heads):
    """llama.cpp's permutation at conversion, row by row: row i < d/2 of a head goes to 2i, row d/2 + i to 2i + 1."""
    width = len(weight) // heads
    result = np.empty_like(weight)
    for head in range(heads):
        for i in range(width // 2):
            result[head * width + 2 * i] = weight[head * width + i]
            result[head * width + 2 * i + 1] = weight[head * width + width // 2 + i]
    return result


@pytest.mark.parametrize("dtype", ["F32", "F16", "Q4_1", "Q8_0"])
def test_q_and_k_of_llama_are_unpermuted_with_grouped_heads(dtype):
    config = {"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 2}
    original = {"q": RNG.normal(size=(48, 64)), "k": RNG.normal(size=(16, 64)), "v": RNG.normal(size=(16, 64))}
    heads = {"q": 6, "k": 2}
    stored = {}
    for part, weight in original.items():
        name = f"blk.0.attn_{part}.weight"
        stored[name] = tensor(name, interleave(weight, heads[part]) if part in heads else weight, dtype)
    tensors, _ = from_gguf(stored, config)
    for part, weight in original.items():
        ours, expected = tensors[f"layers.0.attn.{part}.weight"], tensor("", weight, dtype)
        np.testing.assert_array_equal(ours.raw, expected.raw)  # whole rows move, so the blocks stay as they were
        np.testing.assert_array_equal(ours.to_float32(), expected.to_float32())
        assert ours.nbytes == expected.nbytes


def test_biases_of_q_and_k_are_unpermuted():
    config = {"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 2}
    q, k = RNG.normal(size=48).astype(np.float32), RNG.normal(size=16).astype(np.float32)
    stored = {
        "blk.0.attn_q.bias": tensor("blk.0.attn_q.bias", interleave(q, 6)),
        "blk.0.attn_k.bias": tensor("blk.0.attn_k.bias", interleave(k, 2)),
    }
    tensors, _ = from_gguf(stored, config)
    np.testing.assert_array_equal(tensors["layers.0.attn.q.bias"].to_float32(), q)
    np.testing.assert_array_equal(tensors["layers.0.attn.k.bias"].to_float32(), k)


def test_gemma_is_not_unpermuted():
    stored = {"blk.0.attn_q.weight": tensor("blk.0.attn_q.weight", RNG.normal(size=(8, 4)))}
    tensors, _ = from_gguf(stored, {"model_type": "gemma3_text"})
    np.testing.assert_array_equal(tensors["layers.0.attn.q.weight"].stored, stored["blk.0.attn_q.weight"].stored)
    assert tensors["layers.0.attn.q.weight"].interleaved_heads is None


@pytest.mark.parametrize("heads", [5, 8])
def test_rows_that_do_not_divide_into_heads(heads):
    with pytest.raises(ModelError, match=f"8 rows do not divide into {heads} heads of an even width"):
        tensor("q", np.zeros((8, 4))).deinterleaved(heads)


# ---- norms and tied embeddings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["gemma", "gemma2", "gemma3", "gemma3_text"])
def test_gemma_norms_become_multipliers(model_type):
    weight = RNG.normal(size=8).astype(np.float16)
    names = ["model.norm.weight", "model.layers.0.self_attn.q_norm.weight", "model.layers.0.mlp.up_proj.weight"]
    tensors, _ = from_hf({name: tensor(name, weight, "F16") for name in names}, {"model_type": model_type})
    one_plus = np.float32(1) + weight.astype(np.float32)
    np.testing.assert_array_equal(tensors["norm.weight"].to_float32(), one_plus)
    np.testing.assert_array_equal(tensors["norm.weight"].raw.view(np.float32), one_plus)
    np.testing.assert_array_equal(tensors["layers.0.attn.q_norm.weight"].to_float32(), one_plus)
    np.testing.assert_array_equal(tensors["layers.0.mlp.up.weight"].to_float32(), weight.astype(np.float32))


@pytest.mark.parametrize("model_type", ["llama", "mistral", "gemma3n_text"])
def test_other_norms_stay(model_type):
    tensors, _ = from_hf(named("model.embed_tokens.weight", "model.norm.weight"), {"model_type": model_type})
    assert tensors["norm.weight"].to_float32().tolist() == [1] * 4


@pytest.mark.parametrize(
    ("config", "head", "tied"),
    [
        ({"tie_word_embeddings": True}, None, True),
        ({"tie_word_embeddings": True}, [1, 2], True),
        ({"tie_word_embeddings": True}, [1, 3], False),
        ({"tie_word_embeddings": False}, [1, 2], False),
        ({"model_type": "llama"}, [1, 2], False),
        ({"model_type": "gemma3_text"}, [1, 2], True),
        ({"model_type": "gemma3", "text_config": {}}, [1, 2], True),
        ({"model_type": "x", "text_config": {"tie_word_embeddings": True}}, [1, 2], True),
    ],
)
def test_tied_embeddings(config, head, tied):
    tensors = {"embed.weight": tensor("embed.weight", [1, 2])}
    if head:
        tensors["lm_head.weight"] = tensor("lm_head.weight", head)
    result, is_tied = untie(tensors, config)
    assert is_tied is tied
    assert ("lm_head.weight" in result) is (not tied)
