"""Several torch backends that share one model, each a thread of this process, driven as `Paged` drives one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from octavo.backends.base import Batch
from octavo.backends.torch import TorchBackend
from octavo.graph import DType
from octavo.sampling import Sampled, Sampler, SamplingRows
from octavo.weights import open_checkpoint
from octavo.worker.parts import Place, part_of
from tests.backends.paged import Logits, Paged, graph
from tests.collectives_in_threads import run, workers


def load_parts(
    path: Path, tensor_parallel: int, pipeline_parallel: int, *, dtype: DType = "float32", block_size: int = 4
) -> list[TorchBackend]:
    """The backends of all workers, each with its part of the weights; T is `tensor_parallel`, P the other."""
    whole, tensors = graph(path, dtype), open_checkpoint(path).tensors
    backends = []
    for index, collectives in enumerate(workers(tensor_parallel, pipeline_parallel)):
        part, own = part_of(whole, tensors, Place(index, tensor_parallel, pipeline_parallel))
        backends.append(
            TorchBackend(
                part,
                own,
                device="cpu",
                dtype=dtype,
                kv_cache_dtype=dtype,
                block_size=block_size,
                num_threads=1,
                sampler=Sampler(whole.output.width or 0),
                collectives=collectives,
            )
        )
    return backends


class Parallel:
    """Sequences on all of these backends at once: their pools are dealt out alike, and begin as NaN."""

    def __init__(self, backends: Sequence[TorchBackend], *, release: bool = False) -> None:
        self.backends = list(backends)
        self._paged = [Paged(backend, release=release) for backend in backends]
        self._sampler = next(i for i, backend in enumerate(backends) if _samples(backend))

    def batches(self, work: dict[str, Sequence[int]], logit_rows: Sequence[int] | None = None) -> list[Batch]:
        return [paged.batch(work, logit_rows) for paged in self._paged]

    def step(self, work: dict[str, Sequence[int]]) -> dict[str, Logits]:
        """The logits of every token, by sequence, where they are sampled."""
        batches = self.batches(work)
        tasks = [
            lambda backend=backend, batch=batch: [part for _, part in backend.forward(batch)]
            for backend, batch in zip(self.backends, batches, strict=True)
        ]
        logits = np.concatenate(run(tasks)[self._sampler])
        return dict(zip(work, np.split(logits, batches[0].query_starts[1:-1]), strict=True))

    def logits(self, tokens: Sequence[int], chunk: int | None = None, name: str = "a") -> Logits:
        size = chunk or len(tokens)
        return np.concatenate([self.step({name: tokens[i : i + size]})[name] for i in range(0, len(tokens), size)])

    def execute(self, work: dict[str, Sequence[int]], rows: SamplingRows, logit_rows: Sequence[int]) -> Sampled:
        """What the one that samples has sampled; the others must give None."""
        batches = self.batches(work, logit_rows)
        tasks = [
            lambda backend=backend, batch=batch: backend.execute(batch, rows)
            for backend, batch in zip(self.backends, batches, strict=True)
        ]
        results = run(tasks)
        sampled = results.pop(self._sampler)
        assert sampled is not None
        assert results == [None] * len(results)
        return sampled


def _samples(backend: TorchBackend) -> bool:
    assert backend._collectives is not None
    return backend._collectives.samples
