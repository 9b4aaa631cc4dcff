"""Which backend runs the model: what was asked for, else what suits the machine."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path

from octavo.backends.base import Backend
from octavo.collectives import Collectives
from octavo.config import EngineConfig, ModelConfig
from octavo.errors import ConfigError
from octavo.metrics import log_event
from octavo.models import build_graph
from octavo.sampling import Sampler
from octavo.weights import Checkpoint
from octavo.worker.parts import Place, part_of

NATIVE = "octavo._native"
GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # the second under WSL; without one, torch need not be asked


def make_backend(
    config: EngineConfig,
    model: ModelConfig,
    checkpoint: Checkpoint,
    vocab_size: int,
    on_load: Callable[[float], None],
    place: Place,
    collectives: Collectives | None,
) -> tuple[Backend, str | None]:
    """A backend with the model's weights, and a note for the user where it is not the one to expect.

    Args:
        vocab_size, on_load, place, collectives: as of `Worker`.

    Raises:
        ConfigError: the backend is missing here, or cannot honour an option.
        ModelError: the checkpoint does not hold the tensors that the model needs.
    """
    if config.backend == "torch" or (config.backend == "auto" and _wants_gpu(config)):
        return _torch_backend(config, model, checkpoint, vocab_size, on_load, place, collectives), None
    try:
        return _cpu_backend(config, model, checkpoint, vocab_size, on_load, place, collectives), None
    except ImportError as error:
        if error.name != NATIVE:
            raise
        missing = f"the native runtime cannot be loaded ({error})"
    if config.backend == "cpu":
        raise ConfigError(f"backend='cpu': {missing}; reinstall octavo where there is a C++ compiler, or use 'torch'")
    log_event("native_runtime_missing", {"reason": missing, "backend": "torch"}, logging.WARNING)
    backend = _torch_backend(config, model, checkpoint, vocab_size, on_load, place, collectives)
    return backend, f"{missing}; torch runs the model, more slowly"


def _wants_gpu(config: EngineConfig) -> bool:
    """Whether `auto` means torch: a device was named that only torch has, or there is a GPU that torch can use."""
    if config.device != "auto":
        return config.device != "cpu"
    if not any(device.exists() for device in GPU_DEVICES) or importlib.util.find_spec("torch") is None:
        return False
    from octavo.backends.torch import resolve_device

    return resolve_device("auto") != "cpu"


def _cpu_backend(
    config: EngineConfig,
    model: ModelConfig,
    checkpoint: Checkpoint,
    vocab_size: int,
    on_load: Callable[[float], None],
    place: Place,
    collectives: Collectives | None,
) -> Backend:
    from octavo.backends.cpu import CpuBackend, PackedCache

    if config.device not in ("auto", "cpu"):
        raise ConfigError(f"device={config.device!r}: backend='cpu' has none; leave it out, or use backend='torch'")
    if config.dtype == "float32":
        raise ConfigError("dtype='float32': backend='cpu' computes in bfloat16; use 'auto', or backend='torch'")
    cache = None if config.packed_cache is None else PackedCache(Path(config.packed_cache), checkpoint.sources)
    graph, tensors = part_of(build_graph(model, "bfloat16"), checkpoint.tensors, place)
    return CpuBackend(
        graph,
        tensors,
        kv_cache_dtype="bfloat16" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        block_size=config.block_size,
        num_threads=config.num_threads,
        vocab_size=vocab_size,
        quantization=config.quantization,
        activation_dtype="int8" if config.activation_dtype == "auto" else config.activation_dtype,
        fast_math=config.fast_math,
        packed_cache=cache,
        collectives=collectives,
        on_load=on_load,
    )


def _torch_backend(
    config: EngineConfig,
    model: ModelConfig,
    checkpoint: Checkpoint,
    vocab_size: int,
    on_load: Callable[[float], None],
    place: Place,
    collectives: Collectives | None,
) -> Backend:
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("backend='torch' needs torch, which is not installed: pip install 'octavo[torch]'")
    from octavo.backends.torch import TorchBackend, resolve_device

    for name, is_cpus in (
        ("fast_math", config.fast_math),
        ("quantization", config.quantization == "int8"),
        ("activation_dtype", config.activation_dtype != "auto"),
        ("packed_cache", config.packed_cache is not None),
    ):
        if is_cpus:
            raise ConfigError(
                f"{name}={getattr(config, name)!r} is of backend='cpu'; leave it out with backend='torch', which "
                "expands weights to dtype"
            )
    if config.kv_cache_dtype == "int8":
        raise ConfigError(
            "kv_cache_dtype='int8' is of backend='cpu'; backend='torch' stores float32 or bfloat16: use one of these"
        )
    device = resolve_device(config.device)
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    graph, tensors = part_of(build_graph(model, dtype), checkpoint.tensors, place)
    return TorchBackend(
        graph,
        tensors,
        device=device,
        dtype=dtype,
        kv_cache_dtype=dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        block_size=config.block_size,
        num_threads=config.num_threads,
        sampler=Sampler(vocab_size),
        collectives=collectives,
        on_load=on_load,
    )
