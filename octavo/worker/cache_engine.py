"""How much memory the KV cache and its host tier get, and how many blocks that is."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

from octavo.backends.base import Backend
from octavo.config import KV_MEMORY_SHARE, EngineConfig, ModelConfig
from octavo.core import most_blocks
from octavo.errors import ConfigError
from octavo.graph import KVGroup


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the memory goes. Bytes, unless the name says otherwise."""

    memory_limit: int  # what the process may use: physical memory, or its cgroup's limit
    weight_bytes: int
    kv_bytes_per_token: int
    kv_groups: tuple[KVGroup, ...]  # of layers that share blocks; a sequence has a block table for each
    block_size: int  # tokens
    block_bytes: int
    num_blocks: int
    num_swap_blocks: int  # of the host tier
    swap_directory: str | None  # of the host tier's file; None: it is in RAM
    max_model_len: int  # tokens
    blocks_of_longest: int  # that a sequence of max_model_len tokens may hold at once

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each group of layers."""
        return tuple(group.window for group in self.kv_groups)

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def swap_bytes(self) -> int:
        return self.num_swap_blocks * self.block_bytes

    @property
    def full_context_requests(self) -> float:
        """How many requests of the longest context fit at once."""
        return self.num_blocks / self.blocks_of_longest


def allocate(plan: MemoryPlan, backend: Backend) -> None:
    """Has the backend make the KV pool and the host tier."""
    backend.allocate_kv_cache(plan.num_blocks)
    if plan.num_swap_blocks > 0:
        directory = None if plan.swap_directory is None else Path(plan.swap_directory)
        backend.allocate_swap_space(plan.num_swap_blocks, directory)


def plan_memory(config: EngineConfig, model: ModelConfig, backend: Backend, *, neighbours: int = 1) -> MemoryPlan:
    """Sizes the pool by what the user said, else by a share of the memory that weights and swap space leave.

    Args:
        neighbours: workers on this host, this one included, that are to fit into its memory together.

    Raises:
        ConfigError: the context is longer than the model's, or does not fit into the pool; or not a single block fits
            into the memory.
    """
    wanted_len = config.max_model_len or model.max_position
    if wanted_len > model.max_position:
        raise ConfigError(
            f"max_model_len={wanted_len}: the model was made for at most {model.max_position} tokens; give that or less"
        )
    windows = [group.window for group in backend.kv_groups]

    def held(length: int) -> int:
        return most_blocks(length, config.block_size, windows, config.max_num_batched_tokens)

    limit = backend.memory_limit() // (neighbours if backend.cache_in_ram else 1)
    # A stage without attention has blocks of no bytes: it takes as many as the others have.
    num_swap_blocks = _num_swap_blocks(config, backend, limit)
    num_blocks = _num_blocks(config, backend, limit, most=config.max_num_seqs * held(wanted_len))
    capacity = bisect_right(range(wanted_len + 1), num_blocks, key=held) - 1  # the longest that fits
    if capacity < 1:
        raise ConfigError(
            f"the KV pool of {num_blocks} blocks does not hold a single token, which takes a block in each of the "
            f"model's {len(windows)} groups of layers; give a pool of {held(1)} blocks or more"
        )
    if config.max_model_len is not None and config.max_model_len > capacity:
        raise ConfigError(
            f"max_model_len={config.max_model_len} does not fit into the KV pool of {num_blocks} blocks "
            f"({capacity} tokens); lower it to {capacity}, or give a larger pool"
        )
    return MemoryPlan(
        memory_limit=limit,
        weight_bytes=backend.weight_bytes,
        kv_bytes_per_token=backend.kv_bytes_per_token,
        kv_groups=backend.kv_groups,
        block_size=config.block_size,
        block_bytes=backend.block_bytes,
        num_blocks=num_blocks,
        num_swap_blocks=num_swap_blocks,
        swap_directory=config.swap_directory,
        max_model_len=capacity,
        blocks_of_longest=held(capacity),
    )


def _num_swap_blocks(config: EngineConfig, backend: Backend, limit: int) -> int:
    num_blocks = config.swap_space_bytes // max(backend.block_bytes, 1)
    if config.swap_space_bytes > 0 and num_blocks < 1:
        raise ConfigError(
            f"swap_space_bytes={config.swap_space_bytes}: {_one_block(config, backend)}; give that or more, or 0"
        )
    if config.swap_directory is None and backend.cache_in_ram and config.swap_space_bytes > limit:
        raise ConfigError(
            f"swap_space_bytes={config.swap_space_bytes}: this process may use {limit} bytes of memory; give less, or "
            "a swap_directory"
        )
    return num_blocks


def _num_blocks(config: EngineConfig, backend: Backend, limit: int, *, most: int) -> int:
    """Of the pool; `most` is what can be of use."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    if config.kv_cache_memory_bytes is not None:
        num_blocks = config.kv_cache_memory_bytes // max(backend.block_bytes, 1)
        if num_blocks < 1:
            raise ConfigError(
                f"kv_cache_memory_bytes={config.kv_cache_memory_bytes}: {_one_block(config, backend)}; "
                "give that or more"
            )
        return num_blocks
    weights = backend.weight_bytes
    swap = config.swap_space_bytes if config.swap_directory is None and backend.cache_in_ram else 0
    num_blocks = min(int(KV_MEMORY_SHARE * max(limit - weights - swap, 0)) // max(backend.block_bytes, 1), most)
    if num_blocks < 1:
        raise ConfigError(
            f"no memory is left for the KV cache: the limit is {limit} bytes, the weights take {weights}, swap space "
            f"in RAM {swap}, and one block of {config.block_size} tokens {backend.block_bytes}; use a smaller model, "
            "block_size or swap_space_bytes"
        )
    return num_blocks


def _one_block(config: EngineConfig, backend: Backend) -> str:
    return f"one block of {config.block_size} tokens alone takes {backend.block_bytes} bytes"
