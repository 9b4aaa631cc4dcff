"""Drives a backend the way the engine does: sequences in scattered blocks, chunk by chunk, several in one step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.backends.base import Backend, Batch
from octavo.backends.torch import TorchBackend
from octavo.core import NOTHING
from octavo.graph import DType, Graph
from octavo.models import build_graph, model_config
from octavo.sampling import Sampler
from octavo.weights import open_checkpoint

Logits = NDArray[np.float32]


def graph(path: Path, dtype: DType) -> Graph:
    checkpoint = open_checkpoint(path)
    return build_graph(model_config(checkpoint.config, checkpoint.generation_config), dtype)


def load(
    path: Path, *, dtype: DType = "float32", kv_cache_dtype: str | None = None, block_size: int = 4, device: str = "cpu"
) -> TorchBackend:
    traced = graph(path, dtype)
    return TorchBackend(
        traced,
        open_checkpoint(path).tensors,
        device=device,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype or dtype,
        block_size=block_size,
        num_threads=1,
        sampler=Sampler(traced.output.width or 0),
    )


class Paged:
    """Sequences on one backend. Its cache holds nothing but NaN where no token was stored.

    Args:
        num_blocks: for each group of layers; they all come from one pool.
        release: give blocks back once no later token sees them, as the engine does; they are NaN then, too.
    """

    def __init__(
        self,
        backend: TorchBackend,
        *,
        num_blocks: int = 256,
        block_size: int = 4,
        seed: int = 0,
        release: bool = False,
    ) -> None:
        self.backend = backend
        self._begin(backend, num_blocks, block_size, seed, release)
        self._spoil(slice(None))

    def _begin(self, backend: Backend, num_blocks: int, block_size: int, seed: int, release: bool) -> None:
        self._windows = [group.window for group in backend.kv_groups]
        num_blocks *= len(self._windows)
        backend.allocate_kv_cache(num_blocks)
        self._block_size = block_size
        self._release = release
        self._free = np.random.default_rng(seed).permutation(num_blocks).tolist()
        self._tables: dict[str, list[list[int]]] = {}  # a list a group
        self._lengths: dict[str, int] = {}

    def _spoil(self, blocks: slice | list[int]) -> None:
        """Fill blocks with NaN."""
        for cache in self.backend.kv_caches.values():
            cache.keys[blocks] = torch.nan
            cache.values[blocks] = torch.nan

    def _release_unseen(self, name: str, start: int) -> None:
        """What neither position `start` nor a later one sees goes back into the pool, and NOTHING takes its place."""
        for window, table in zip(self._windows, self._tables[name], strict=True):
            if window is not None:
                first = min(max(0, start - window + 1) // self._block_size, len(table))
                gone = [block for block in table[:first] if block != NOTHING]
                self._spoil(gone)
                self._free += gone  # the next to be taken, in this very step
                table[:first] = [NOTHING] * first

    def batch(self, work: dict[str, Sequence[int]], logit_rows: Sequence[int] | None = None) -> Batch:
        """The next tokens of some sequences; logits of all rows unless told otherwise."""
        positions, slots, contexts = [], [], []
        for name, tokens in work.items():
            start = self._lengths.get(name, 0)
            stop = self._lengths[name] = start + len(tokens)
            tables = self._tables.setdefault(name, [[] for _ in self._windows])
            if self._release:
                self._release_unseen(name, start)
            for table in tables:
                while len(table) * self._block_size < stop:
                    table.append(self._free.pop())
            positions += range(start, stop)
            slots += [
                [table[p // self._block_size] * self._block_size + p % self._block_size for table in tables]
                for p in range(start, stop)
            ]
            contexts.append(stop)
        width = max(len(self._tables[name][0]) for name in work)
        block_tables = np.zeros((len(self._windows), len(work), width), np.int32)
        for r, name in enumerate(work):
            for group, table in enumerate(self._tables[name]):
                block_tables[group, r, : len(table)] = np.maximum(table, 0)
        starts = np.cumsum([0, *(len(tokens) for tokens in work.values())])
        return Batch(
            token_ids=np.array([token for tokens in work.values() for token in tokens], np.int32),
            positions=np.array(positions, np.int32),
            slot_mapping=np.ascontiguousarray(np.array(slots, np.int64).T),
            query_starts=starts.astype(np.int32),
            context_lens=np.array(contexts, np.int32),
            block_tables=block_tables,
            logit_rows=np.array(range(starts[-1]) if logit_rows is None else logit_rows, np.int32),
        )

    def step(self, work: dict[str, Sequence[int]]) -> dict[str, Logits]:
        """Run one step; the logits of every token, by sequence."""
        batch = self.batch(work)
        logits = np.concatenate([part for _, part in self.backend.forward(batch)])
        return dict(zip(work, np.split(logits, batch.query_starts[1:-1]), strict=True))

    def logits(self, tokens: Sequence[int], chunk: int | None = None, name: str = "a") -> Logits:
        """A whole sequence, `chunk` tokens a step: [tokens, vocabulary]."""
        size = chunk or len(tokens)
        return np.concatenate([self.step({name: tokens[i : i + size]})[name] for i in range(0, len(tokens), size)])


def assert_close(found: Logits, expected: Logits, tolerance: float = 1e-4) -> None:
    """Equal up to `tolerance` of the largest logit; a NaN is not."""
    assert found.shape == expected.shape
    worst = np.abs(found - expected).max()
    assert worst <= tolerance * np.abs(expected).max(), f"{worst} of {np.abs(expected).max()}"
