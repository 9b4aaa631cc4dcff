"""`move_blocks` of both backends: whole blocks of every layer of their group, in order, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.backends import swap_file
from octavo.backends.base import Backend
from octavo.core import BlockMove
from octavo.errors import ConfigError
from tests.backends.checkpoints import make, prompt
from tests.backends.native import NativePaged, load_native
from tests.backends.paged import Paged, load
from tests.backends.test_cpu_backend import resident_bytes

NUM_BLOCKS, NUM_SWAP_BLOCKS = 24, 5
# Chains that only come out right in order: 5's old content goes to 9 and to the host, then 7's to 5, and 5's new one to
# 2; 4 comes back as 6 when something else has its place in the cache, and before its place on the host is taken.
MOVES = [
    BlockMove("copy", 5, 9),
    BlockMove("swap_out", 5, 3),
    BlockMove("swap_out", 4, 0),
    BlockMove("copy", 7, 5),
    BlockMove("copy", 0, 11),
    BlockMove("copy", 7, 4),
    BlockMove("copy", 5, 2),
    BlockMove("swap_in", 0, 6),
    BlockMove("swap_out", 1, 0),
    BlockMove("swap_in", 3, 7),
    BlockMove("copy", 3, 3),
]

Parts = list[NDArray[np.generic]]


def expected(before: NDArray[np.generic]) -> NDArray[np.generic]:
    after, host = before.copy(), {}
    for kind, source, destination in MOVES:
        if kind == "copy":
            after[destination] = after[source]
        elif kind == "swap_out":
            host[destination] = after[source].copy()
        else:
            after[destination] = host[source]
    return after


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("gemma3-variations", tmp_path_factory.mktemp("copy"), head_dim=16).path


def native(path: Path, block_size: int, num_threads: int) -> tuple[Backend, Parts]:
    backend = load_native(path, num_threads=num_threads, block_size=block_size)
    backend.allocate_kv_cache(NUM_BLOCKS)
    return backend, [part for cache in backend.kv_caches() for part in cache]


def native_int8(path: Path, block_size: int, num_threads: int) -> tuple[Backend, Parts]:
    backend = load_native(path, num_threads=num_threads, block_size=block_size, kv_cache_dtype="int8")
    backend.allocate_kv_cache(NUM_BLOCKS)
    return backend, [part for cache in backend.kv_caches() for part in cache]


def on_torch(path: Path, block_size: int, num_threads: int) -> tuple[Backend, Parts]:
    backend = load(path, block_size=block_size)
    backend.allocate_kv_cache(NUM_BLOCKS)
    parts = [part.numpy() for cache in backend.kv_caches.values() for part in (cache.keys, cache.values)]
    return backend, parts


Make = Callable[[Path, int, int], tuple[Backend, Parts]]


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize(
    ("make_backend", "block_size", "num_threads"),
    [
        (native, 16, 1),
        (native, 16, 3),
        (native, 32, 2),
        (native_int8, 16, 1),
        (native_int8, 32, 3),
        (on_torch, 16, 1),
        (on_torch, 4, 1),
    ],
)
def test_in_order_and_nothing_else(
    path: Path, tmp_path: Path, make_backend: Make, block_size: int, num_threads: int, in_file: bool
) -> None:
    backend, parts = make_backend(path, block_size, num_threads)
    backend.allocate_swap_space(NUM_SWAP_BLOCKS, tmp_path if in_file else None)
    assert list(tmp_path.iterdir()) == []  # the file has no name
    rng = np.random.default_rng(0)
    for part in parts:
        part[:] = rng.integers(0, 2 ** (8 * min(part.itemsize, 2)), part.shape)
    before = [part.copy() for part in parts]
    # The layers of different groups lie at the same place in a block, so the last one written is what both hold.
    assert len({part.__array_interface__["data"][0] for part in parts}) == 2
    backend.move_blocks(MOVES)
    backend.move_blocks([])
    for part, old in zip(parts, before, strict=True):
        np.testing.assert_array_equal(part, expected(old))


def test_many_blocks_are_moved_by_all_threads(path: Path) -> None:
    """More than 4 MiB: each thread moves its part of every block, of the odd bytes at their borders too."""
    backend = load_native(path, num_threads=3)
    count = (6 << 20) // backend.block_bytes
    backend.allocate_kv_cache(count)
    backend.allocate_swap_space(count, None)
    parts = [part for cache in backend.kv_caches() for part in cache]
    rng = np.random.default_rng(0)
    for part in parts:
        part[:] = rng.integers(0, 2**16, part.shape)
    before = [part.copy() for part in parts]
    order = rng.permutation(count).tolist()
    backend.move_blocks([BlockMove("swap_out", block, slot) for slot, block in enumerate(order)])
    backend.move_blocks([BlockMove("swap_in", slot, slot) for slot in range(count)])
    for part, old in zip(parts, before, strict=True):
        np.testing.assert_array_equal(part, old[order])


@pytest.mark.parametrize(
    ("move", "where"),
    [
        (BlockMove("copy", 0, NUM_BLOCKS), "the KV cache"),
        (BlockMove("copy", NUM_BLOCKS, 0), "the KV cache"),
        (BlockMove("copy", -1, 0), "the KV cache"),
        (BlockMove("swap_out", NUM_BLOCKS, 0), "the KV cache"),
        (BlockMove("swap_in", 0, -1), "the KV cache"),
        (BlockMove("swap_out", 0, NUM_SWAP_BLOCKS), "the host tier"),
        (BlockMove("swap_in", -1, 0), "the host tier"),
    ],
)
def test_native_moves_never_leave_their_memory(path: Path, move: BlockMove, where: str) -> None:
    backend, parts = native(path, 16, 1)
    if "swap" in move.kind:
        with pytest.raises(ValueError, match="block outside"):
            backend.move_blocks([BlockMove("swap_out", 0, 0)])
    backend.allocate_swap_space(NUM_SWAP_BLOCKS, None)
    parts[0][4] = 7
    with pytest.raises(ValueError, match=f"block outside {where}"):
        backend.move_blocks([BlockMove("copy", 4, 6), move])
    assert not (parts[0][6] == 7).any()  # all are looked at before any is done


@pytest.mark.parametrize("make_backend", [native, on_torch])
class TestRoom:
    def test_memory_is_committed_when_it_is_written(self, path: Path, make_backend: Make) -> None:
        backend, _ = make_backend(path, 16, 1)
        before = resident_bytes()
        backend.allocate_swap_space((4 << 30) // backend.block_bytes, None)
        assert resident_bytes() - before < 1 << 20

    def test_too_much_memory(self, path: Path, make_backend: Make) -> None:
        backend, _ = make_backend(path, 16, 1)
        with pytest.raises(
            ConfigError, match=rf"swap space of {1 << 40} blocks .* does not fit into memory; lower swap"
        ):
            backend.allocate_swap_space(1 << 40, None)

    def test_too_much_for_the_disk(self, path: Path, tmp_path: Path, make_backend: Make) -> None:
        backend, _ = make_backend(path, 16, 1)
        with pytest.raises(ConfigError, match=r"swap_space_bytes: a swap file of \d+ bytes does not fit into .* free;"):
            backend.allocate_swap_space(1 << 40, tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_no_such_directory(self, path: Path, tmp_path: Path, make_backend: Make) -> None:
        backend, _ = make_backend(path, 16, 1)
        for directory in (tmp_path / "missing", path / "config.json"):
            with pytest.raises(ConfigError, match=r"swap_directory='.*': no swap file can be made there \(.*\); name"):
                backend.allocate_swap_space(3, directory)


def test_a_disk_that_fills_up_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"a swap file of 10 bytes cannot be had in .* \(No space left on device\)"):
        swap_file.swap_file(tmp_path, 10)


def test_the_disk_has_the_room_before_it_is_written(tmp_path: Path) -> None:
    with swap_file.swap_file(tmp_path, 3 << 20) as file:
        assert os.fstat(file.fileno()).st_blocks * 512 >= 3 << 20


class TestComingBack:
    """A sequence goes on from the host tier, in other blocks, as if nothing had happened."""

    @pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "int8"])
    @pytest.mark.parametrize("in_file", [False, True])
    def test_native(self, path: Path, tmp_path: Path, in_file: bool, kv_cache_dtype: str) -> None:
        tokens = prompt(120)
        whole = NativePaged(load_native(path, kv_cache_dtype=kv_cache_dtype)).logits(tokens)
        paged = NativePaged(load_native(path, num_threads=2, kv_cache_dtype=kv_cache_dtype))
        self.check(paged, paged.native, tokens, whole, tmp_path if in_file else None)

    @pytest.mark.parametrize("in_file", [False, True])
    def test_torch(self, path: Path, tmp_path: Path, in_file: bool) -> None:
        tokens = prompt(120)
        whole = Paged(load(path)).logits(tokens, 60)
        paged = Paged(load(path))
        self.check(paged, paged.backend, tokens, whole, tmp_path if in_file else None)

    def check(
        self, paged: Paged, backend: Backend, tokens: list[int], whole: NDArray[np.float32], directory: Path | None
    ) -> None:
        backend.allocate_swap_space(200, directory)
        paged.step({"a": tokens[:60]})
        old = [block for table in paged._tables["a"] for block in table]
        backend.move_blocks([BlockMove("swap_out", block, 199 - i) for i, block in enumerate(old)])
        paged._spoil(old)
        new = [paged._free.pop() for _ in old]
        backend.move_blocks([BlockMove("swap_in", 199 - i, block) for i, block in enumerate(new)])
        places = dict(zip(old, new, strict=True))
        paged._tables["a"] = [[places[block] for block in table] for table in paged._tables["a"]]
        np.testing.assert_array_equal(paged.step({"a": tokens[60:]})["a"], whole[60:])
