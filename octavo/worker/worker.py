"""A worker: keeps the weights, the KV cache and the state of the sequences, and runs its part of each step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from octavo.collectives import Collectives
from octavo.config import EngineConfig, ModelConfig
from octavo.core import StepPlan, StepResult
from octavo.errors import ConfigError
from octavo.metrics import Profiler
from octavo.weights import Checkpoint
from octavo.worker.backends import make_backend
from octavo.worker.cache_engine import MemoryPlan, allocate, plan_memory
from octavo.worker.model_runner import ModelRunner
from octavo.worker.parts import Place

ONLY = Place()  # a worker without others


@dataclass(frozen=True, slots=True)
class BootReport:
    """What was loaded, how it runs, and where the memory goes."""

    model: str
    family: str
    backend: str
    load_seconds: float
    packed_cache: str  # see `Backend.packed_cache`
    memory: MemoryPlan
    note: str | None = None  # why the backend is not the one to expect
    workers: tuple[str, ...] = ()  # where several share the model: a line for each

    def fields(self) -> dict[str, object]:
        """For the log."""
        memory = self.memory
        return {
            "model": self.model,
            "family": self.family,
            "backend": self.backend,
            "load_seconds": self.load_seconds,
            "packed_cache": self.packed_cache,
            "memory_limit": memory.memory_limit,
            "weight_bytes": memory.weight_bytes,
            "kv_bytes": memory.kv_bytes,
            "kv_bytes_per_token": memory.kv_bytes_per_token,
            "num_blocks": memory.num_blocks,
            "block_size": memory.block_size,
            "block_bytes": memory.block_bytes,
            "windows": list(memory.windows),
            "num_swap_blocks": memory.num_swap_blocks,
            "swap_bytes": memory.swap_bytes,
            "swap_directory": memory.swap_directory,
            "max_model_len": memory.max_model_len,
            "full_context_requests": memory.full_context_requests,
        }

    def __str__(self) -> str:
        memory = self.memory
        lines = [
            f"{self.model} ({self.family}) on {self.backend}, loaded in {self.load_seconds:.1f} s "
            f"(packed cache: {self.packed_cache})",
            f"weights {_size(memory.weight_bytes)}; KV {_size(memory.kv_bytes_per_token)} a token; pool of "
            f"{memory.num_blocks} blocks x {memory.block_size} tokens, {_size(memory.kv_bytes)} at most "
            f"(process limit {_size(memory.memory_limit)})",
            *_group_lines(memory),
            *_swap_lines(memory),
            f"context {memory.max_model_len} tokens; {memory.full_context_requests:.1f} requests of that length fit "
            "at once",
            *([] if self.note is None else [self.note]),
            *self.workers,
        ]
        return "\n  ".join(lines)


def _group_lines(memory: MemoryPlan) -> list[str]:
    """What there is to say of a model whose layers do not all keep everything."""
    layers: dict[int, int] = {}  # by window
    for group in memory.kv_groups:
        if group.window is not None:
            layers[group.window] = layers.get(group.window, 0) + len(group.layers)
    if not layers:
        return []
    largest, of_all = (how(len(group.layers) for group in memory.kv_groups) for how in (max, sum))
    windows = ", ".join(f"{count} keep {window} tokens" for window, count in layers.items())
    return [f"a block holds {memory.block_size} tokens of {largest} of {of_all} layers, of which {windows}"]


def _swap_lines(memory: MemoryPlan) -> list[str]:
    if memory.num_swap_blocks == 0:
        return []
    where = "RAM" if memory.swap_directory is None else f"a file in {memory.swap_directory}"
    return [f"swap: {_size(memory.swap_bytes)} in {where} ({memory.num_swap_blocks} blocks)"]


class Worker:
    """Loads a model, or its part of one, when it is made; after `allocate`, `execute` runs step after step."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        checkpoint: Checkpoint,
        vocab_size: int,
        on_load: Callable[[float], None] | None = None,
        *,
        place: Place = ONLY,
        collectives: Collectives | None = None,
    ) -> None:
        """
        Args:
            vocab_size: ids that the tokeniser knows; larger ones are never sampled.
            on_load: called with the share of the weights that are loaded, 0 to 1, as they are.
            place: of this worker among those that share the model.
            collectives: connects it with them.

        Raises:
            ConfigError: the backend is missing here, or the memory does not suffice.
            ModelError: the checkpoint does not hold the tensors that the model needs.
        """
        start = time.perf_counter()
        self._config, self._model = config, model
        self._backend, note = make_backend(
            config, model, checkpoint, vocab_size, on_load or (lambda share: None), place, collectives
        )
        self._place = place
        self.boot_report = BootReport(
            model=checkpoint.path.name,
            family=model.family,
            backend=self._backend.description,
            load_seconds=time.perf_counter() - start,
            packed_cache=self._backend.packed_cache,
            memory=plan_memory(config, model, self._backend, neighbours=place.neighbours),
            note=note,
        )

    def allocate(self, num_blocks: int | None = None, num_swap_blocks: int | None = None) -> None:
        """Makes the KV cache, once; then steps may come.

        Args:
            num_blocks, num_swap_blocks: as many as all workers have room for; else as many as this one has.

        Raises:
            ConfigError: the memory does not suffice.
        """
        if num_blocks is not None and num_swap_blocks is not None:
            config = replace(self._config, num_kv_blocks=num_blocks, kv_cache_memory_bytes=None)
            memory = plan_memory(config, self._model, self._backend, neighbours=self._place.neighbours)
            memory = replace(memory, num_swap_blocks=num_swap_blocks)
            self.boot_report = replace(self.boot_report, memory=memory)
        memory = self.boot_report.memory
        allocate(memory, self._backend)
        try:
            self._runner = ModelRunner(
                self._backend,
                block_size=memory.block_size,
                max_num_seqs=self._config.max_num_seqs,
                max_model_len=memory.max_model_len,
            )
        except MemoryError as error:
            raise ConfigError(
                f"max_num_seqs={self._config.max_num_seqs} sequences of up to {memory.max_model_len} tokens do not fit "
                "into memory; lower max_num_seqs or max_model_len"
            ) from error

    def execute(self, plan: StepPlan) -> StepResult | None:
        """See `ModelRunner.execute`."""
        return self._runner.execute(plan)

    def learn(self, token_ids: list[int]) -> None:
        """See `ModelRunner.learn`."""
        self._runner.learn(token_ids)

    def profiler(self) -> Profiler:
        """See `Backend.profiler`."""
        return self._backend.profiler()


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
