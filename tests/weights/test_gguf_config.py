"""GGUF metadata becomes the config.json that the model's authors published."""

from math import log

import numpy as np
import pytest

from octavo.errors import ModelError
from octavo.weights import WeightTensor
from octavo.weights.gguf_config import config_from_gguf


def f32(value):
    """A number as a GGUF file gives it back: rounded to float32."""
    return float(np.float32(value))


def tensors(*names, vocab=48, hidden=16, extra=None):
    result = {"token_embd.weight": WeightTensor("token_embd.weight", (vocab, hidden), "F32", np.zeros(0, np.uint8))}
    result |= dict.fromkeys(names, result["token_embd.weight"])
    return result | (extra or {})


def llama(**changes):
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 8192,
        "llama.embedding_length": 16,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.layer_norm_rms_epsilon": f32(1e-5),
    }
    return _changed(metadata, "llama", changes)


def gemma3(**changes):
    metadata = {
        "general.architecture": "gemma3",
        "gemma3.block_count": 2,
        "gemma3.context_length": 32768,
        "gemma3.embedding_length": 640,
        "gemma3.feed_forward_length": 2048,
        "gemma3.attention.head_count": 4,
        "gemma3.attention.head_count_kv": 1,
        "gemma3.attention.layer_norm_rms_epsilon": f32(1e-6),
        "gemma3.attention.key_length": 256,
        "gemma3.attention.value_length": 256,
        "gemma3.attention.sliding_window": 512,
        "gemma3.rope.freq_base": 1000000.0,
    }
    return _changed(metadata, "gemma3", changes)


def _changed(metadata, arch, changes):
    for key, value in changes.items():
        name = key.replace("__", ".")
        metadata[name if name.startswith(("general.", "tokenizer.")) else f"{arch}.{name}"] = value
    return {key: value for key, value in metadata.items() if value is not None}


def test_smollm2_as_published(smollm2):
    published = {  # config.json of HuggingFaceTB/SmolLM2-135M-Instruct
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    }
    assert smollm2.config == published | {"head_dim": 64}


def test_gemma3_as_published(gemma3):
    published = {  # config.json of google/gemma-3-270m
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 640,
        "intermediate_size": 2048,
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 18,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000.0,
        "rope_theta": 1000000.0,
        "sliding_window": 512,
        "vocab_size": 262144,
    }
    derived = {"tie_word_embeddings": True, "mlp_bias": False, "sliding_window_pattern": 6}
    assert gemma3.config == published | derived


@pytest.mark.parametrize(
    ("metadata", "key", "value"),
    [
        (llama(), "head_dim", 4),
        (llama(rope__dimension_count=2), "head_dim", 2),
        (llama(rope__dimension_count=2, attention__key_length=8, attention__value_length=8), "head_dim", 8),
        (llama(), "num_key_value_heads", 4),
        (llama(), "rope_theta", 10000.0),
        (llama(), "vocab_size", 48),
        (llama(), "tie_word_embeddings", True),
        (llama(), "eos_token_id", None),
        (llama(attention__layer_norm_rms_epsilon=f32(1e-6)), "rms_norm_eps", 1e-06),
        (llama(tokenizer__ggml__eos_token_id=2, tokenizer__ggml__eot_token_id=2), "eos_token_id", 2),
        (
            llama(tokenizer__ggml__eos_token_id=2, tokenizer__ggml__eot_token_id=7, tokenizer__ggml__eom_token_id=8),
            "eos_token_id",
            [2, 7, 8],
        ),
        (gemma3(attention__key_length=None, attention__value_length=None), "query_pre_attn_scalar", 160),
        (gemma3(attention__sliding_window_pattern=4), "sliding_window_pattern", 4),
        (gemma3(attention__sliding_window_pattern=np.array([True, False])), "layer_types",
         ["sliding_attention", "full_attention"]),
        (gemma3(rope__freq_base_swa=20000.0), "rope_local_base_freq", 20000.0),
        (gemma3(final_logit_softcapping=30.0), "final_logit_softcapping", 30.0),
    ],
)  # fmt: skip
def test_derived_values(metadata, key, value):
    assert config_from_gguf(metadata, tensors("x"))[key] == value


def test_gemma3_27b_scales_queries_by_hidden_size_over_heads():
    metadata = gemma3(block_count=62, embedding_length=5376, attention__head_count=32, attention__key_length=128,
                      attention__value_length=128)  # fmt: skip
    names = [f"blk.{n}.attn_q.weight" for n in range(62)]
    assert config_from_gguf(metadata, tensors(*names))["query_pre_attn_scalar"] == 168  # its published value


def test_biases_and_output_follow_from_the_tensors():
    config = config_from_gguf(llama(), tensors("output.weight", "blk.0.attn_q.bias", "blk.0.ffn_up.bias"))
    assert (config["tie_word_embeddings"], config["attention_bias"], config["mlp_bias"]) == (False, True, True)


# ---- RoPE ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        (llama(), None),
        (llama(rope__scaling__type="none"), None),
        (llama(rope__scaling__type="linear", rope__scaling__factor=8.0), {"rope_type": "linear", "factor": 8.0}),
        (llama(rope__scale_linear=4.0), {"rope_type": "linear", "factor": 4.0}),
        (llama(rope__scale_linear=1.0), None),
        (gemma3(rope__scaling__type="linear", rope__scaling__factor=8.0), {"rope_type": "linear", "factor": 8.0}),
        (
            llama(rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=2048),
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 2048,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
        ),
    ],
)
def test_rope_scaling(metadata, scaling):
    assert config_from_gguf(metadata, tensors("x")).get("rope_scaling") == scaling


def test_yarn_attention_factor_multiplies_its_own():
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 99}
    scaling = config_from_gguf(llama(**yarn, rope__scaling__attn_factor=0.5), tensors())["rope_scaling"]
    assert scaling["attention_factor"] == pytest.approx(0.5 * (0.1 * log(4.0) + 1))


def test_llama3_scaling_is_a_tensor_of_divisors():
    factors = np.array([1.0, 1.5, 8.0], np.float32)
    extra = {"rope_freqs.weight": WeightTensor("rope_freqs.weight", (3,), "F32", factors.view(np.uint8))}
    config = config_from_gguf(llama(), tensors(extra=extra))
    assert config["rope_scaling"] == {"rope_type": "factors", "freq_factors": [1.0, 1.5, 8.0]}
    with pytest.raises(ModelError, match=r"'yarn' together with rope_freqs\.weight"):
        config_from_gguf(llama(rope__scaling__type="yarn"), tensors(extra=extra))


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({}, r"lacks general\.architecture"),
        (llama(general__architecture="mamba"), "architecture 'mamba' is not supported; supported: gemma3, llama"),
        (llama(general__architecture=np.arange(2000)), r"general\.architecture is an array; expected text"),
        (llama(general__architecture=["llama"]), r"general\.architecture is an array; expected text"),
        (llama(attention__layer_norm_rms_epsilon=np.ones(99)), "is an array; expected a number"),
        (llama(expert_count=np.array([8, 8])), "is an array; expected a number"),
        (llama(tokenizer__ggml__eos_token_id=np.array([1, 2])), "is an array; expected a token id"),
        (llama(block_count=None), r"lacks llama\.block_count"),
        (llama(block_count=2**32 - 1), r"block_count is 4294967295, but there are 1 tensors"),
        (llama(block_count=0), r"block_count is 0; expected a positive integer"),
        (llama(attention__head_count="4"), "is '4'; expected a positive integer"),
        (llama(attention__head_count=True), "is True; expected a positive integer"),
        (llama(attention__head_count_kv=np.array([1, 2])), "differs from layer to layer"),
        (llama(attention__layer_norm_rms_epsilon=None), r"lacks llama\.attention\.layer_norm_rms_epsilon"),
        (llama(rope__freq_base=float("nan")), "is nan; expected a number"),
        (llama(rope__freq_base=1e300), "expected a number"),
        (llama(attention__value_length=8), "keys and values differ in width"),
        (llama(expert_count=8), "mixtures of experts"),
        (llama(tokenizer__ggml__eos_token_id="2"), r"tokenizer\.ggml\.eos_token_id is '2'"),
        (llama(rope__scaling__type="longrope"), "RoPE scaling 'longrope' is not supported"),
        (llama(rope__scaling__type=np.array([1])), r"llama\.rope\.scaling\.type is an array; expected text"),
        (llama(rope__scaling__type="linear"), r"lacks llama\.rope\.scaling\.factor"),
        (llama(rope__scaling__type="yarn", rope__scaling__factor=0.5), r"is 0\.5; expected at least 1"),
        (llama(rope__scaling__type="yarn", rope__scaling__yarn_log_multiplier=0.1), "yarn_log_multiplier is not"),
        (gemma3(attention__sliding_window=None), r"lacks gemma3\.attention\.sliding_window"),
        (gemma3(attention__sliding_window_pattern=np.array([True])), "one bool per layer"),
    ],
)  # fmt: skip
def test_refusals(metadata, reason):
    names = ["blk.0.attn_q.weight"] if "gemma3.block_count" in metadata else []
    with pytest.raises(ModelError, match=reason):
        config_from_gguf(metadata, tensors(*names))


def test_a_file_without_embedding():
    with pytest.raises(ModelError, match=r"no matrix token_embd\.weight"):
        config_from_gguf(llama(), {})
