"""Drives the native backend as `paged.py` drives torch's: tiny checkpoints with heads of 16, scattered blocks, NaNs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np

from octavo.backends.cpu import CpuBackend, PackedCache
from octavo.core import NOTHING
from octavo.weights import WeightTensor, open_checkpoint
from octavo.weights.quants import TYPES
from tests.backends.paged import Logits, Paged, graph

NAN = 0x7FC1  # a bfloat16
BLOCK = 16


def load_native(
    path: Path,
    *,
    isa: str | None = None,
    fuse: bool = True,
    num_threads: int = 1,
    block_size: int = BLOCK,
    fast_math: bool = False,
    cascade: bool = True,
    quantization: str | None = None,
    activation_dtype: str = "int8",
    kv_cache_dtype: str = "bfloat16",
    stored: Sequence[str] = (),
    packed_cache: Path | None = None,
) -> CpuBackend:
    """`stored`: formats that the matrices take in turn, filled at random; without any, they are as in the file."""
    traced = graph(path, "bfloat16")
    checkpoint = open_checkpoint(path)
    tensors = checkpoint.tensors
    return CpuBackend(
        traced,
        stored_at_random(tensors, stored) if stored else tensors,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        num_threads=num_threads,
        vocab_size=traced.output.width or 0,
        isa=isa,
        fuse=fuse,
        fast_math=fast_math,
        cascade=cascade,
        quantization=quantization,
        activation_dtype=activation_dtype,
        packed_cache=None if packed_cache is None else PackedCache(packed_cache, checkpoint.sources),
    )


def stored_at_random(tensors: Mapping[str, WeightTensor], dtypes: Sequence[str]) -> dict[str, WeightTensor]:
    """The matrices in these formats in turn: random bytes with small scales. Rows must be whole blocks, or stay."""
    turns = cycle(dtypes)
    return {
        name: _stored_at_random(tensor, next(turns))
        if len(tensor.shape) == 2 and tensor.shape[1] % 256 == 0
        else tensor
        for name, tensor in tensors.items()
    }


def _stored_at_random(tensor: WeightTensor, dtype: str) -> WeightTensor:
    kind, rng = TYPES[dtype], np.random.default_rng(0)
    count = tensor.shape[0] * tensor.shape[1]
    if kind.block == 1:
        values = rng.normal(0, 0.05, count).astype(np.float32)
        raw = values.astype("<f2") if dtype == "F16" else (values.view(np.uint32) >> 16).astype("<u2")
        return replace(tensor, dtype=dtype, stored=raw.view(np.uint8))
    blocks = rng.integers(0, 256, (count // kind.block, kind.nbytes), np.uint8)
    records = blocks.view(kind.record).reshape(-1)
    for field in {"d", "m", "dmin"} & set(kind.record.names):
        records[field] = rng.normal(0, 0.01, len(records))
    return replace(tensor, dtype=dtype, stored=blocks.reshape(-1))


class NativePaged(Paged):
    """Sequences on one native backend. Its cache holds nothing but NaN where no token was stored."""

    def __init__(
        self,
        backend: CpuBackend,
        *,
        num_blocks: int = 64,
        block_size: int = BLOCK,
        seed: int = 0,
        release: bool = False,
    ) -> None:
        self.native = backend
        self._begin(backend, num_blocks, block_size, seed, release)
        self._caches = backend.kv_caches()
        self._spoil(slice(None))

    def _spoil(self, blocks: slice | list[int]) -> None:
        for cache in self._caches:
            for part in cache:
                part[blocks] = NAN if part.itemsize == 2 else 0xFF  # of scales, a NaN as well

    def step(self, work: dict[str, Sequence[int]]) -> dict[str, Logits]:
        batch = self.batch(work)
        return dict(zip(work, np.split(self.native.logits(batch), batch.query_starts[1:-1]), strict=True))

    def fork(self, name: str, new: str, blocks: int) -> None:
        """A sequence that begins with the first `blocks` blocks of another, all of them full."""
        self._tables[new] = [table[:blocks] for table in self._tables[name]]
        self._lengths[new] = blocks * self._block_size

    def preempt(self, name: str) -> None:
        """Gives the blocks of a sequence back, as they are; it begins again at its first token."""
        for table in self._tables.pop(name):
            self._free[:0] = [block for block in table if block != NOTHING]
        del self._lengths[name]
