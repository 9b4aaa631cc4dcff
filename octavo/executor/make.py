"""Which executor: in this process, or over Ray."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from octavo.config import EngineConfig, ModelConfig
from octavo.errors import ConfigError
from octavo.executor.base import Executor
from octavo.executor.local import LocalExecutor
from octavo.weights import Checkpoint


def make_executor(
    config: EngineConfig,
    model: ModelConfig,
    checkpoint: Checkpoint,
    vocab_size: int,
    on_load: Callable[[float], None] | None = None,
) -> Executor:
    """As `config.distributed_executor_backend` says; for arguments and errors see `Worker` and `RayExecutor`."""
    if config.distributed_executor_backend == "ray":
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("distributed_executor_backend='ray' needs Ray: pip install 'octavo[ray]'")
        from octavo.executor.ray import RayExecutor

        return RayExecutor(config, model, checkpoint, vocab_size, on_load)
    return LocalExecutor(config, model, checkpoint, vocab_size, on_load)
