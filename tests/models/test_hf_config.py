"""config.json to ModelConfig: both styles of transformers, nesting, windows, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Gemma3Config, Gemma3TextConfig, LlamaConfig, MistralConfig

from octavo.config import LayerConfig, ModelConfig, RopeConfig
from octavo.errors import ModelError
from octavo.models import FAMILIES, model_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "sliding_window": 512,
}


def read(base: dict[str, Any], generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    """`...` takes a key away."""
    merged = {key: value for key, value in {**base, **changes}.items() if value is not ...}
    return model_config(merged, generation or {})


class TestLlama:
    def test_everything_that_a_plain_file_says(self) -> None:
        assert read(LLAMA, bos_token_id=1, eos_token_id=2) == ModelConfig(
            family="llama",
            vocab_size=1000,
            hidden_size=64,
            intermediate_size=160,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            rms_norm_eps=1e-5,
            max_position=2048,
            layers=(LayerConfig(RopeConfig(16, 10_000.0)),) * 2,
            attention_scale=0.25,
            bos_token_id=1,
            eos_token_ids=(2,),
        )

    def test_stated_head_dim_wins_over_hidden_size_by_heads(self) -> None:
        model = read(LLAMA, head_dim=24, hidden_size=50)
        assert (model.head_dim, model.attention_scale, model.layers[0].rope.dim) == (24, 24**-0.5, 24)

    def test_as_many_kv_heads_as_heads_unless_stated(self) -> None:
        assert read(LLAMA, num_key_value_heads=...).num_kv_heads == 4

    def test_biases_and_ties(self) -> None:
        model = read(LLAMA, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
        assert (model.attention_bias, model.attention_out_bias, model.mlp_bias, model.tie_embeddings) == (True,) * 4
        assert not read(LLAMA).tie_embeddings

    def test_model_type_serves_where_no_architecture_is_named(self) -> None:
        assert read(LLAMA, architectures=...).family == "llama"
        assert read(LLAMA, architectures=None).family == "llama"

    def test_llama_has_no_window_whatever_the_file_says(self) -> None:
        assert read(LLAMA, sliding_window=128).layers[0].window is None


class TestRope:
    def test_old_and_new_style_say_the_same(self) -> None:
        scaling = {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        }
        old = read(LLAMA, rope_theta=5e5, rope_scaling={"type": "llama3", **scaling})
        new = read(LLAMA, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
        assert old == new
        assert old.layers[0].rope == RopeConfig(16, 5e5, "llama3", factor=8.0, original_max_position=512)

    def test_what_transformers_saves(self) -> None:
        saved = LlamaConfig(
            hidden_size=64,
            num_attention_heads=4,
            rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1234.0},
            architectures=["LlamaForCausalLM"],
        ).to_dict()
        assert read(saved).layers[0].rope == RopeConfig(16, 1234.0, "linear", factor=2.0)

    def test_yarn(self) -> None:
        scaling = {
            "rope_type": "yarn",
            "factor": 4,
            "beta_fast": 24,
            "beta_slow": 2,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "truncate": False,
        }
        assert read(LLAMA, rope_scaling=scaling).layers[0].rope == RopeConfig(
            16,
            10_000.0,
            "yarn",
            factor=4.0,
            original_max_position=2048,
            beta_fast=24.0,
            beta_slow=2.0,
            mscale=1.0,
            mscale_all_dim=0.5,
            truncate=False,
        )

    def test_yarn_without_a_factor_takes_the_ratio_of_lengths(self) -> None:
        rope = read(LLAMA, rope_scaling={"type": "yarn", "original_max_position_embeddings": 512}).layers[0].rope
        assert (rope.factor, rope.original_max_position) == (4.0, 512)

    def test_factors_from_gguf(self) -> None:
        scaling = {"rope_type": "factors", "freq_factors": [1.0] * 4 + [8.0] * 4}
        assert read(LLAMA, rope_scaling=scaling).layers[0].rope.freq_factors == (1.0,) * 4 + (8.0,) * 4
        with pytest.raises(ModelError, match="3 RoPE frequency factors for heads of width 16"):
            read(LLAMA, rope_scaling=scaling | {"freq_factors": [1.0] * 3})

    @pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope", "proportional"])
    @pytest.mark.parametrize("key", ["type", "rope_type"])
    def test_other_types_are_refused_by_name(self, kind: str, key: str) -> None:
        with pytest.raises(ModelError, match=f"'{kind}' is not supported; supported: default, linear"):
            read(LLAMA, rope_scaling={key: kind, "factor": 2.0})

    def test_what_llama_cannot_do_is_refused(self) -> None:
        with pytest.raises(ModelError, match="partial_rotary_factor"):
            read(LLAMA, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5})
        with pytest.raises(ModelError, match="full_attention"):
            read(LLAMA, rope_parameters={"full_attention": {"rope_theta": 1e4}})
        with pytest.raises(ModelError, match=r"low_freq_factor is 4.0, expected less than high_freq_factor=4"):
            read(LLAMA, rope_scaling={"type": "llama3", "factor": 8, "low_freq_factor": 4.0, "high_freq_factor": 4.0})
        with pytest.raises(ModelError, match=r"rope_theta is 1\.0"):
            read(LLAMA, rope_theta=1.0, rope_scaling={"type": "yarn", "factor": 2})


class TestLongestContext:
    """vllm#2518: the maximum length scales with RoPE, where the file has not scaled it already."""

    @pytest.mark.parametrize(
        ("scaling", "stated", "longest"),
        [
            (None, 2048, 2048),
            ({"type": "linear", "factor": 4.0}, 4096, 16384),  # vicuna-16k
            ({"type": "linear", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384, 16384),
            ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 32768, 131072),  # Qwen2.5
            ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072, 131072),
            ({"type": "yarn", "factor": 4.0}, 32768, 131072),
            ({"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}, 163840, 163840),  # DeepSeek
        ],
    )
    def test_linear_and_yarn(self, scaling: dict[str, Any] | None, stated: int, longest: int) -> None:
        assert read(LLAMA, rope_scaling=scaling, max_position_embeddings=stated).max_position == longest

    def test_llama3_states_the_scaled_length(self) -> None:
        scaling = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
        scaling["original_max_position_embeddings"] = 8192
        assert read(LLAMA, rope_scaling=scaling, max_position_embeddings=131072).max_position == 131072

    def test_gemma3_states_the_scaled_length(self) -> None:
        model = read(GEMMA, rope_scaling={"rope_type": "linear", "factor": 8.0}, max_position_embeddings=131072)
        assert model.max_position == 131072


class TestMistral:
    def test_the_window_holds_for_every_layer(self) -> None:
        model = read(MISTRAL, sliding_window=64)
        assert [layer.window for layer in model.layers] == [64, 64]

    @pytest.mark.parametrize("off", [{"sliding_window": None}, {"sliding_window": 64, "use_sliding_window": False}])
    def test_no_window_when_it_is_off(self, off: dict[str, Any]) -> None:
        assert read(MISTRAL, **off).layers[0].window is None

    def test_what_transformers_saves(self) -> None:
        model = read(MistralConfig(sliding_window=32, architectures=["MistralForCausalLM"]).to_dict())
        assert (model.family, model.layers[0].window, model.rms_norm_eps) == ("llama", 32, 1e-6)


class TestGemma3:
    def test_defaults_of_transformers_fill_what_files_leave_out(self) -> None:
        model, reference = read(GEMMA), Gemma3TextConfig()
        assert model.vocab_size == reference.vocab_size
        assert model.num_heads == reference.num_attention_heads
        assert model.num_kv_heads == reference.num_key_value_heads
        assert model.head_dim == reference.head_dim
        assert model.rms_norm_eps == reference.rms_norm_eps
        assert model.max_position == reference.max_position_embeddings
        assert model.attention_scale == reference.query_pre_attn_scalar**-0.5
        assert model.tie_embeddings
        assert model.activation == "gelu_tanh"
        assert read(GEMMA, sliding_window=...).layers[0].window == reference.sliding_window

    def test_every_sixth_layer_is_global_with_its_own_rope(self) -> None:
        local, full = LayerConfig(RopeConfig(256, 1e4), 512), LayerConfig(RopeConfig(256, 1e6))
        assert read(GEMMA).layers == (*[local] * 5, full, local, local)

    def test_pattern_and_layer_types(self) -> None:
        windows = [layer.window for layer in read(GEMMA, sliding_window_pattern=2).layers]
        assert windows == [512, None] * 4
        types = ["full_attention"] + ["sliding_attention"] * 7
        assert [layer.window for layer in read(GEMMA, layer_types=types).layers] == [None] + [512] * 7

    @pytest.mark.parametrize("types", [["full_attention"] * 7, ["full_attention"] * 7 + ["chunked_attention"]])
    def test_bad_layer_types(self, types: list[str]) -> None:
        with pytest.raises(ModelError, match="layer_types"):
            read(GEMMA, layer_types=types)

    def test_no_window_when_it_is_off(self) -> None:
        assert {layer.window for layer in read(GEMMA, use_sliding_window=False).layers} == {None}

    def test_old_and_new_style_say_the_same(self) -> None:
        old = read(GEMMA, rope_theta=2e6, rope_local_base_freq=2e4, rope_scaling={"rope_type": "linear", "factor": 8.0})
        full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6}
        new = read(
            GEMMA,
            rope_parameters={
                "full_attention": full,
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            },
        )
        assert old == new
        assert old.layers[5].rope == RopeConfig(256, 2e6, "linear", factor=8.0)
        assert old.layers[0].rope == RopeConfig(256, 2e4)

    def test_scalars(self) -> None:
        model = read(GEMMA, query_pre_attn_scalar=168, final_logit_softcapping=30.0, attn_logit_softcapping=50)
        assert (model.attention_scale, model.logit_softcap, model.attention_softcap) == (168**-0.5, 30.0, 50.0)

    def test_the_text_part_of_a_multimodal_model(self) -> None:
        text = {**GEMMA, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
        del text["architectures"]
        config = {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "text_config": text,
            "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
            "eos_token_id": [1, 106],
        }
        expected = read(GEMMA, rope_scaling=text["rope_scaling"], eos_token_id=[1, 106])
        assert model_config(config, {}) == expected
        assert not model_config(config | {"tie_word_embeddings": False}, {}).tie_embeddings

    def test_what_transformers_saves_of_a_multimodal_model(self) -> None:
        config = Gemma3Config(text_config=Gemma3TextConfig(hidden_size=640, num_hidden_layers=7, sliding_window=64))
        model = model_config({**config.to_dict(), "architectures": ["Gemma3ForConditionalGeneration"]}, {})
        assert (model.hidden_size, model.num_layers, model.layers[0].window) == (640, 7, 64)
        assert model.layers[5] == LayerConfig(RopeConfig(256, 1e6))

    def test_bidirectional_attention_is_refused(self) -> None:
        with pytest.raises(ModelError, match="use_bidirectional_attention"):
            read(GEMMA, use_bidirectional_attention=True)


class TestEndOfSequence:
    @pytest.mark.parametrize(
        ("own", "generation", "union"),
        [
            (2, {}, (2,)),
            ([2, 5], {"eos_token_id": 5}, (2, 5)),
            (2, {"eos_token_id": [7, 2, 3]}, (2, 7, 3)),
            (None, {"eos_token_id": 9}, (9,)),
            (None, {}, ()),
            (0, {}, (0,)),
        ],
    )
    def test_the_union_of_both_files(self, own: Any, generation: dict[str, Any], union: tuple[int, ...]) -> None:
        assert read(LLAMA, generation, eos_token_id=own).eos_token_ids == union

    def test_bos_may_come_from_either(self) -> None:
        assert read(LLAMA, {"bos_token_id": 3}).bos_token_id == 3
        assert read(LLAMA, {"bos_token_id": 3}, bos_token_id=0).bos_token_id == 0
        assert read(LLAMA).bos_token_id is None

    @pytest.mark.parametrize("bad", ["</s>", [1, "2"], True, -1, 1.0])
    def test_ids_are_whole_numbers(self, bad: Any) -> None:
        with pytest.raises(ModelError, match=r"eos_token_id is .*, expected a token id"):
            read(LLAMA, eos_token_id=bad)
        with pytest.raises(ModelError, match=r"generation_config.eos_token_id"):
            read(LLAMA, {"eos_token_id": bad})


class TestRefusals:
    def test_unknown_architectures_list_the_known_ones(self) -> None:
        with pytest.raises(ModelError) as error:
            read(LLAMA, architectures=["MambaForCausalLM"])
        assert str(error.value) == (
            "architecture 'MambaForCausalLM' is not supported; supported: "
            "LlamaForCausalLM, MistralForCausalLM, Gemma3ForCausalLM, Gemma3ForConditionalGeneration"
        )
        with pytest.raises(ModelError, match="'mamba' is not supported"):
            read(LLAMA, architectures=..., model_type="mamba")

    def test_no_architecture_at_all(self) -> None:
        with pytest.raises(ModelError, match="model_type is missing"):
            model_config({}, {})

    @pytest.mark.parametrize(
        "key",
        [
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
            "rms_norm_eps",
        ],
    )
    @pytest.mark.parametrize("bad", [..., None, "many", 0, -3, True, [1]])
    def test_missing_or_senseless_sizes_name_the_key(self, key: str, bad: Any) -> None:
        with pytest.raises(ModelError, match=key):
            read(LLAMA, **{key: bad})

    @pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers"])
    def test_whole_numbers_are_whole(self, key: str) -> None:
        with pytest.raises(ModelError, match=rf"{key} is 64.0, expected a whole number from 1"):
            read(LLAMA, **{key: 64.0})

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"num_key_value_heads": 3}, "num_key_value_heads is 3, expected a divisor of num_attention_heads=4"),
            ({"hidden_size": 66}, "hidden_size is 66, expected a multiple of num_attention_heads=4"),
            ({"head_dim": 15}, "head_dim is 15, expected an even number"),
            ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected a whole number from 1 to 10000"),
            ({"head_dim": 2**40}, "head_dim is 1099511627776, expected a whole number from 1 to 1048576"),
            ({"hidden_act": "relu"}, "hidden_act is 'relu', expected one of silu"),
            ({"attention_bias": "yes"}, "attention_bias is 'yes', expected true or false"),
            ({"rope_theta": float("inf")}, "rope_theta is inf"),
            ({"rope_theta": float("nan")}, "rope_theta is nan"),
            ({"rope_scaling": "linear"}, "rope_scaling is 'linear', expected an object"),
            ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
            ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor is '2', expected a number > 0"),
            ({"rope_scaling": {"type": 3}}, "rope_scaling.type is 3, expected text"),
            ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM', expected a list of texts"),
            ({"text_config": [1]}, r"text_config is \[1\], expected an object"),
        ],
    )
    def test_ill_typed_or_contradictory_values(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ModelError, match=message):
            read(LLAMA, **changes)

    def test_every_message_is_one_line(self) -> None:
        with pytest.raises(ModelError) as error:
            read(LLAMA, hidden_act="a\nb")
        assert "\n" not in str(error.value)


def test_families_do_not_share_names() -> None:
    for names in (
        [name for family in FAMILIES.values() for name in family.architectures],
        [name for family in FAMILIES.values() for name in family.model_types],
    ):
        assert len(names) == len(set(names))
