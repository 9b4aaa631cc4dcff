"""`copy_blocks` of both backends: whole blocks of every layer, in order, and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.backends.torch import TorchBackend
from octavo.sampling import Sampler
from octavo.weights import open_checkpoint
from tests.backends.checkpoints import make
from tests.backends.native import load_native
from tests.backends.paged import graph

NUM_BLOCKS = 24
# A chain of copies that only comes out right in order: 5's old content goes to 9, then 7's to 5, and 5's new one to 2.
PAIRS = [(5, 9), (7, 5), (0, 11), (5, 2), (3, 3)]


def expected(before: np.ndarray, pairs: list[tuple[int, int]]) -> np.ndarray:
    after = before.copy()
    for source, destination in pairs:
        after[destination] = after[source]
    return after


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("gemma3-variations", tmp_path_factory.mktemp("copy"), head_dim=16).path


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("block_size", [16, 32])
def test_native(path: Path, num_threads: int, block_size: int) -> None:
    backend = load_native(path, num_threads=num_threads, block_size=block_size)
    backend.allocate_kv_cache(NUM_BLOCKS)
    rng = np.random.default_rng(0)
    parts = [part for cache in backend.kv_caches() for part in cache]
    for part in parts:
        part[:] = rng.integers(0, 2**16, part.shape, np.uint16)
    before = [part.copy() for part in parts]
    backend.copy_blocks(PAIRS)
    for part, old in zip(parts, before, strict=True):
        np.testing.assert_array_equal(part, expected(old, PAIRS))
    backend.copy_blocks([])
    for pair in [(0, NUM_BLOCKS), (NUM_BLOCKS, 0), (-1, 0), (0, -1)]:
        with pytest.raises(ValueError, match="block outside the KV cache"):
            backend.copy_blocks([(4, 6), pair])
    for part, old in zip(parts, before, strict=True):  # all are looked at before any is done
        np.testing.assert_array_equal(part, expected(old, PAIRS))


def test_torch(path: Path) -> None:
    traced = graph(path, "float32")
    backend = TorchBackend(
        traced,
        open_checkpoint(path).tensors,
        device="cpu",
        dtype="float32",
        kv_cache_dtype="float32",
        block_size=16,
        num_threads=None,
        sampler=Sampler(traced.output.width or 0),
    )
    backend.allocate_kv_cache(NUM_BLOCKS)
    parts = [part for cache in backend.kv_caches.values() for part in (cache.keys, cache.values)]
    for part in parts:
        part.copy_(torch.rand(part.shape))
    before = [part.numpy().copy() for part in parts]
    pairs = [(5, 9), (7, 5), (0, 11)]  # no destination is a source later on, as in a plan
    backend.copy_blocks(pairs)
    for part, old in zip(parts, before, strict=True):
        np.testing.assert_array_equal(part.numpy(), expected(old, pairs))
