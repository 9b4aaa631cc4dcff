"""Drives a backend the way the engine does: sequences in scattered blocks, chunk by chunk, several in one step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.backends.base import Batch
from octavo.backends.torch import TorchBackend
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
    """Sequences on one backend. Its cache holds nothing but NaN where no token was stored."""

    def __init__(self, backend: TorchBackend, *, num_blocks: int = 256, block_size: int = 4, seed: int = 0) -> None:
        backend.allocate_kv_cache(num_blocks)
        for cache in backend.kv_caches.values():
            cache.keys.fill_(torch.nan)
            cache.values.fill_(torch.nan)
        self.backend = backend
        self._block_size = block_size
        self._free = np.random.default_rng(seed).permutation(num_blocks).tolist()
        self._tables: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    def batch(self, work: dict[str, Sequence[int]], logit_rows: Sequence[int] | None = None) -> Batch:
        """The next tokens of some sequences; logits of all rows unless told otherwise."""
        positions, slots, contexts = [], [], []
        for name, tokens in work.items():
            start = self._lengths.get(name, 0)
            stop = self._lengths[name] = start + len(tokens)
            table = self._tables.setdefault(name, [])
            while len(table) * self._block_size < stop:
                table.append(self._free.pop())
            positions += range(start, stop)
            slots += [
                table[p // self._block_size] * self._block_size + p % self._block_size for p in range(start, stop)
            ]
            contexts.append(stop)
        tables = np.zeros((len(work), max(len(self._tables[name]) for name in work)), np.int32)
        for row, name in zip(tables, work, strict=True):
            row[: len(self._tables[name])] = self._tables[name]
        starts = np.cumsum([0, *(len(tokens) for tokens in work.values())])
        return Batch(
            token_ids=np.array([token for tokens in work.values() for token in tokens], np.int32),
            positions=np.array(positions, np.int32),
            slot_mapping=np.array(slots, np.int64),
            query_starts=starts.astype(np.int32),
            context_lens=np.array(contexts, np.int32),
            block_tables=tables,
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
