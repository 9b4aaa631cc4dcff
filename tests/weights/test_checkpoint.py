"""Opening models on disk, compared with what transformers loads from the same files."""

import json

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import save_file

from octavo.errors import ModelError
from octavo.weights import open_checkpoint

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, VOCAB, LAYERS = 4, 2, 8, 32, 48, 40, 2


def gguf_shapes():
    shapes = {"token_embd": (VOCAB, HIDDEN), "output": (VOCAB, HIDDEN), "output_norm": (HIDDEN,)}
    for n in range(LAYERS):
        shapes |= {
            f"blk.{n}.attn_norm": (HIDDEN,),
            f"blk.{n}.ffn_norm": (HIDDEN,),
            f"blk.{n}.attn_q": (HEADS * HEAD_DIM, HIDDEN),
            f"blk.{n}.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{n}.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{n}.attn_output": (HIDDEN, HEADS * HEAD_DIM),
            f"blk.{n}.ffn_gate": (INTERMEDIATE, HIDDEN),
            f"blk.{n}.ffn_up": (INTERMEDIATE, HIDDEN),
            f"blk.{n}.ffn_down": (HIDDEN, INTERMEDIATE),
        }
    return shapes


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    rng = np.random.default_rng(1)
    for name, shape in gguf_shapes().items():
        writer.add_tensor(f"{name}.weight", rng.normal(size=shape).astype(np.float16 if len(shape) > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def to_hf(name):
    """Octavo's name as transformers' LlamaForCausalLM has it."""
    parts = {"attn": "self_attn", "q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj", "gate": "gate_proj"}
    parts |= {
        "up": "up_proj",
        "down": "down_proj",
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
    }
    parts |= {"embed": "embed_tokens"}
    full = ".".join(parts.get(part, part) for part in name.split("."))
    return full if name.startswith("lm_head") else f"model.{full}"


def test_a_gguf_llama_equals_transformers(tiny_gguf):
    checkpoint = open_checkpoint(tiny_gguf)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_gguf.parent, gguf_file=tiny_gguf.name, dtype=torch.float32
    )
    expected = model.state_dict()
    assert {to_hf(name) for name in checkpoint.tensors} == set(expected)
    for name, tensor in checkpoint.tensors.items():
        np.testing.assert_array_equal(tensor.to_float32(), expected[to_hf(name)].numpy(), err_msg=name)
    for key in ("hidden_size", "num_key_value_heads", "num_hidden_layers", "intermediate_size", "vocab_size"):
        assert checkpoint.config[key] == getattr(model.config, key)
    assert checkpoint.path == tiny_gguf
    assert checkpoint.format == "gguf"
    assert checkpoint.generation_config == {}
    assert checkpoint.metadata["general.architecture"] == "llama"
    assert checkpoint.nbytes == sum(2 * v.numel() if v.ndim > 1 else 4 * v.numel() for v in expected.values())


def test_real_models_hold_what_their_layers_need(smollm2, gemma3):
    assert (len(smollm2.tensors), smollm2.unused) == (2 + 30 * 9, [])
    assert (len(gemma3.tensors), gemma3.unused) == (2 + 18 * 13, [])
    assert smollm2.tensors["layers.29.attn.k.weight"].shape == (192, 576)
    assert smollm2.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    mean = gemma3.tensors["layers.0.attn.q_norm.weight"].to_float32().mean()
    assert mean > 0.5  # already a multiplier, around one


# ---- safetensors -----------------------------------------------------------------------------------------------------


def save_model(model, directory, **options):
    model.save_pretrained(directory, **options)
    return open_checkpoint(directory)


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
@pytest.mark.parametrize("tie", [True, False])
def test_safetensors_of_transformers(tmp_path, shard, tie):
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
        num_hidden_layers=LAYERS, vocab_size=VOCAB, tie_word_embeddings=tie, attention_bias=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    checkpoint = save_model(model, tmp_path, max_shard_size=shard)
    expected = model.state_dict()
    if tie:
        expected.pop("lm_head.weight")
    assert {to_hf(name) for name in checkpoint.tensors} == set(expected)
    for name, tensor in checkpoint.tensors.items():
        assert tensor.dtype == "BF16"
        np.testing.assert_array_equal(tensor.to_float32(), expected[to_hf(name)].float().numpy())
    assert checkpoint.config["tie_word_embeddings"] is tie
    assert checkpoint.config["hidden_size"] == HIDDEN
    assert checkpoint.generation_config["eos_token_id"] == 2
    assert (checkpoint.format, checkpoint.metadata, checkpoint.unused) == ("safetensors", {}, [])


def test_gemma3_norms_from_safetensors_are_what_the_model_multiplies_by(tmp_path):
    config = transformers.Gemma3TextConfig(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
        num_hidden_layers=LAYERS, vocab_size=VOCAB, head_dim=HEAD_DIM,
    )  # fmt: skip
    model = transformers.Gemma3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.normal_()
    checkpoint = save_model(model, tmp_path)
    layer = model.model.layers[1]
    ours = {
        "norm": model.model.norm,
        "layers.1.attn_norm": layer.input_layernorm,
        "layers.1.post_attn_norm": layer.post_attention_layernorm,
        "layers.1.mlp_norm": layer.pre_feedforward_layernorm,
        "layers.1.post_mlp_norm": layer.post_feedforward_layernorm,
        "layers.1.attn.q_norm": layer.self_attn.q_norm,
        "layers.1.attn.k_norm": layer.self_attn.k_norm,
    }
    for name, norm in ours.items():
        ones = torch.ones_like(norm.weight)  # its root mean square is 1, so the norm gives its multiplier
        expected = norm(ones).detach().numpy()
        np.testing.assert_allclose(checkpoint.tensors[f"{name}.weight"].to_float32(), expected, rtol=1e-5)
    assert "lm_head.weight" not in checkpoint.tensors


# ---- refusals --------------------------------------------------------------------------------------------------------


def minimal(directory, config="{}"):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(config)
    save_file({"model.norm.weight": np.ones(2, np.float32)}, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("{", r"config\.json: not valid JSON"),
        ("[]", "expected a JSON object, found list"),
        ('{"a": 1, "a": 2}', "key 'a' occurs twice"),
        ('{"text_config": 3}', "text_config is not an object"),
        ('{"quantization_config": {"quant_method": "gptq"}}', "quantised by 'gptq' are not supported"),
        ('{"text_config": {"quantization_config": {"quant_method": "fp8"}}}', "quantised by 'fp8'"),
        ('{"quantization_config": "awq"}', "quantised by 'awq'"),
    ],
)
def test_a_bad_config(tmp_path, config, reason):
    with pytest.raises(ModelError, match=reason) as caught:
        open_checkpoint(minimal(tmp_path, config))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "config", ["{}", '{"model_type": ["llama"], "text_config": null, "tie_word_embeddings": null}']
)
def test_what_a_config_says_about_the_model_is_not_judged_here(tmp_path, config):
    assert open_checkpoint(minimal(tmp_path, config)).tensors["norm.weight"].to_float32().tolist() == [1, 1]


def test_a_bad_generation_config(tmp_path):
    (minimal(tmp_path) / "generation_config.json").write_text("nonsense")
    with pytest.raises(ModelError, match=r"generation_config\.json: not valid JSON"):
        open_checkpoint(tmp_path)


def test_directories_that_hold_no_model(tmp_path):
    with pytest.raises(ModelError, match="no such file or directory"):
        open_checkpoint(tmp_path / "missing")
    with pytest.raises(ModelError, match=r"neither a \.gguf file nor config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/pwned'\ntR.")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"only pickled weights \(pytorch_model\.bin\), which are never read"):
        open_checkpoint(tmp_path)
    with pytest.raises(ModelError, match=r"not a \.gguf file"):
        open_checkpoint(tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").unlink()
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"safetensors without the config\.json"):
        open_checkpoint(tmp_path)


def test_one_gguf_in_a_directory(tmp_path, tiny_gguf):
    (tmp_path / "a.gguf").write_bytes(tiny_gguf.read_bytes())
    (tmp_path / "mmproj-vision.gguf").write_bytes(b"projector")
    assert open_checkpoint(tmp_path).path == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(tiny_gguf.read_bytes())
    with pytest.raises(ModelError, match=r"several GGUF models; name one: a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)


def test_a_problem_inside_a_gguf_names_the_file(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"x\.gguf: GGUF architecture 'mamba' is not supported"):
        open_checkpoint(tmp_path)


def test_unused_tensors_are_listed(tmp_path):
    save_file(
        {"model.norm.weight": np.ones(2, np.float32), "score.weight": np.ones(2, np.float32)},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert open_checkpoint(tmp_path).unused == ["score.weight"]
