"""How much memory the KV cache gets, and how many blocks that is."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.backends.base import Backend
from octavo.config import KV_MEMORY_SHARE, EngineConfig, ModelConfig
from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the memory goes. Bytes, unless the name says otherwise."""

    memory_limit: int  # what the process may use: physical memory, or its cgroup's limit
    weight_bytes: int
    kv_bytes_per_token: int
    block_size: int  # tokens
    num_blocks: int
    max_model_len: int  # tokens

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.block_size * self.kv_bytes_per_token

    @property
    def full_context_requests(self) -> float:
        """How many requests of the longest context fit at once."""
        return self.num_blocks / -(-self.max_model_len // self.block_size)


class CacheEngine:
    """Plans the KV pool of one worker and has the backend allocate it."""

    def __init__(self, backend: Backend, config: EngineConfig, model: ModelConfig) -> None:
        self.plan = plan_memory(config, model, backend)
        backend.allocate_kv_cache(self.plan.num_blocks)


def plan_memory(config: EngineConfig, model: ModelConfig, backend: Backend) -> MemoryPlan:
    """Sizes the pool by what the user said, else by a share of the memory that the weights leave.

    Raises:
        ConfigError: the context is longer than the model's, or does not fit into the pool.
    """
    limit, weights, per_token = backend.memory_limit(), backend.weight_bytes, backend.kv_bytes_per_token
    block_bytes = config.block_size * per_token
    wanted_len = config.max_model_len or model.max_position
    if wanted_len > model.max_position:
        raise ConfigError(
            f"max_model_len={wanted_len}: the model was made for at most {model.max_position} tokens; give that or less"
        )
    if config.num_kv_blocks is not None:
        num_blocks = config.num_kv_blocks
    elif config.kv_cache_memory_bytes is not None:
        num_blocks = config.kv_cache_memory_bytes // block_bytes
        if num_blocks < 1:
            raise ConfigError(
                f"kv_cache_memory_bytes={config.kv_cache_memory_bytes}: one block of {config.block_size} tokens alone "
                f"takes {block_bytes} bytes; give that or more"
            )
    else:
        share = int(KV_MEMORY_SHARE * max(limit - weights, 0)) // block_bytes
        useful = config.max_num_seqs * -(-wanted_len // config.block_size)
        num_blocks = min(share, useful)
        if num_blocks < 1:
            raise ConfigError(
                f"no memory is left for the KV cache: the limit is {limit} bytes, the weights take {weights}, and one "
                f"block of {config.block_size} tokens {block_bytes}; use a smaller model or block_size"
            )
    capacity = num_blocks * config.block_size
    if config.max_model_len is not None and config.max_model_len > capacity:
        raise ConfigError(
            f"max_model_len={config.max_model_len} does not fit into the KV pool of {num_blocks} blocks "
            f"({capacity} tokens); lower it to {capacity}, or give a larger pool"
        )
    return MemoryPlan(limit, weights, per_token, config.block_size, num_blocks, min(wanted_len, capacity))
