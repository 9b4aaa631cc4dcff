from dataclasses import fields

import pytest

from octavo.config import EngineConfig, engine_config
from octavo.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("backend", "cuda", ["'cuda'", "auto, cpu, torch"]),
        ("backend", 3, ["3", "auto, cpu, torch"]),
        ("dtype", "float16", ["'float16'", "auto, float32, bfloat16"]),
        ("dtype", None, ["None", "auto, float32, bfloat16"]),
        ("kv_cache_dtype", "fp8", ["'fp8'", "auto, float32, bfloat16"]),
        ("scheduling_policy", "lifo", ["'lifo'", "fcfs, priority"]),
        ("scheduling_policy", True, ["True", "fcfs, priority"]),
        ("device", 0, ["0", "str"]),
        ("model", 7, ["7", "str"]),
        ("block_size", 0, ["0", "at least 1"]),
        ("block_size", -16, ["-16", "at least 1"]),
        ("block_size", 16.0, ["16.0", "int"]),
        ("block_size", True, ["True", "int"]),
        ("block_size", None, ["None", "int"]),
        ("block_size", "16", ["'16'", "int"]),
        ("max_num_seqs", 0, ["0", "at least 1"]),
        ("max_num_seqs", False, ["False", "int"]),
        ("max_num_batched_tokens", 0, ["0", "at least 1"]),
        ("max_model_len", 0, ["0", "at least 1"]),
        ("max_model_len", True, ["True", "int"]),
        ("kv_cache_memory_bytes", -1, ["-1", "at least 1"]),
        ("kv_cache_memory_bytes", 1e9, ["1000000000.0", "int"]),
        ("num_kv_blocks", 0, ["0", "at least 1"]),
        ("num_threads", 0, ["0", "at least 1"]),
        ("num_threads", "all", ["'all'", "int"]),
        ("seed", None, ["None", "int"]),
        ("seed", 1.5, ["1.5", "int"]),
        ("enable_prefix_caching", 1, ["1", "bool"]),
        ("enable_prefix_caching", "yes", ["'yes'", "bool"]),
        ("quantization", "int4", ["'int4'", "none, int8"]),
        ("activation_dtype", "float32", ["'float32'", "auto, int8, int16, bfloat16"]),
        ("activation_dtype", None, ["None", "auto, int8, int16, bfloat16"]),
        ("quantization", 8, ["8", "str"]),
        ("preemption_mode", "swap", ["'swap'", "needs swap_space_bytes", "0"]),
        ("preemption_mode", "drop", ["'drop'", "auto, recompute, swap"]),
        ("swap_space_bytes", -1, ["-1", "at least 0"]),
        ("swap_directory", "/tmp", ["'/tmp'", "needs swap_space_bytes"]),
        ("swap_directory", 3, ["3", "str"]),
        ("swap_space_bytes", True, ["True", "int"]),
        ("tensor_parallel_size", 2, ["2", "processes of their own", "distributed_executor_backend='ray'"]),
        ("tensor_parallel_size", 1025, ["1025", "at most 1024"]),
        ("tensor_parallel_size", True, ["True", "int"]),
        ("pipeline_parallel_size", 0, ["0", "at least 1"]),
        ("pipeline_parallel_size", 3, ["3", "processes of their own", "distributed_executor_backend='ray'"]),
        ("distributed_executor_backend", "mp", ["'mp'", "expected ray"]),
        ("ray_address", "auto", ["'auto'", "distributed_executor_backend='ray'"]),
    ],
)
def test_a_refusal_names_the_option_the_value_and_the_limit(name, value, says):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{"model": "m", name: value})
    message = str(caught.value)
    assert message.startswith(f"{name}=")
    assert "\n" not in message
    assert all(words in message for words in says)


def test_the_pool_is_sized_in_one_way():
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes and num_kv_blocks"):
        EngineConfig(model="m", kv_cache_memory_bytes=2**20, num_kv_blocks=10)


def test_swapping_needs_prefix_caching():
    with pytest.raises(ConfigError, match=r"swap_space_bytes=1: .* leave enable_prefix_caching on, or give 0"):
        EngineConfig(model="m", swap_space_bytes=1, enable_prefix_caching=False)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block_size": 1, "max_num_seqs": 1, "max_num_batched_tokens": 1},
        {"max_model_len": 1, "num_kv_blocks": 1, "num_threads": 1},
        {"kv_cache_memory_bytes": 1},
        {"seed": -1},
        {"quantization": "none"},
        {"quantization": "int8", "activation_dtype": "bfloat16"},
        {"preemption_mode": "recompute"},
        {"preemption_mode": "swap", "swap_space_bytes": 2**30},
        {"swap_directory": "/tmp", "swap_space_bytes": 1},
        {"backend": "torch", "device": "cuda:0", "dtype": "bfloat16", "kv_cache_dtype": "float32"},
        {"scheduling_policy": "priority", "enable_prefix_caching": False},
    ],
)
def test_what_is_allowed(options):
    config = engine_config("m", options)
    assert {name: getattr(config, name) for name in options} == options
    assert config.model == "m"


def test_an_unknown_option_is_named_with_all_that_exist():
    with pytest.raises(ConfigError) as caught:
        engine_config("m", {"max_batch": 3, "blocksize": 16})
    message = str(caught.value)
    assert "unknown option blocksize, max_batch" in message
    assert "\n" not in message
    assert all(f.name in message for f in fields(EngineConfig) if f.name != "model")


def test_the_defaults_are_the_public_face_of_the_design():
    config = EngineConfig(model="m")
    assert (config.backend, config.dtype, config.kv_cache_dtype, config.quantization) == ("auto", "auto", "auto", None)
    assert (config.block_size, config.max_num_seqs, config.max_num_batched_tokens) == (16, 256, 2048)
    assert (config.max_model_len, config.kv_cache_memory_bytes, config.num_kv_blocks) == (None, None, None)
    assert (config.scheduling_policy, config.preemption_mode, config.swap_space_bytes) == ("fcfs", "auto", 0)
    assert (config.seed, config.num_threads, config.enable_prefix_caching) == (0, None, True)
    assert (config.tensor_parallel_size, config.pipeline_parallel_size) == (1, 1)
    assert config.distributed_executor_backend is None


def test_every_option_has_a_line_of_help():
    for f in fields(EngineConfig):
        help_line = f.metadata["help"]
        assert help_line
        assert "\n" not in help_line
