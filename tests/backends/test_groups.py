"""Groups of layers: blocks that fell out of a window may go, and what others write there reaches no result."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.backends.cpu import CpuBackend, isas
from octavo.backends.cpu.native import fast_table
from octavo.graph import KVGroup
from tests.backends.checkpoints import make, prompt
from tests.backends.native import NativePaged, load_native
from tests.backends.paged import Logits, Paged, load
from tests.backends.test_cpu_bits import assert_same_bits

LONGEST = 620  # three pieces of attention
# Around a panel of 16, a block of 16 or 32 and a piece of 256.
WINDOWS = (1, 2, 15, 16, 17, 31, 33, 47, 48, 49, 255, 256, 257)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    @cache
    def path(name: str, window: int) -> Path:
        folder = tmp_path_factory.mktemp(f"{name}-{window}")
        return make(name, folder, head_dim=16, sliding_window=window, max_position_embeddings=1024).path

    return path


@pytest.fixture(scope="module")
def native(path: Callable[[str, int], Path]) -> Callable[..., CpuBackend]:
    return cache(lambda name, window, **options: load_native(path(name, window), **options))


@pytest.fixture(scope="module")
def kept(native: Callable[..., CpuBackend]) -> Callable[[str, int, int], Logits]:
    """Logits of `prompt(LONGEST, seed)` from a run that never releases a block: one sequence, one step, one thread."""
    return cache(
        lambda name, window, seed: NativePaged(native(name, window, isa="portable", fuse=False)).logits(
            prompt(LONGEST, seed=seed)
        )
    )


def test_a_windowed_group_holds_its_window_and_no_more(native: Callable[..., CpuBackend]) -> None:
    paged = NativePaged(native("gemma3", 33), release=True)
    assert [group.window for group in paged.native.kv_groups] == [None, 33, 33, 33]
    for i in range(LONGEST):
        paged.step({"a": [3 + i % 90]})
    held = [sum(block >= 0 for block in table) for table in paged._tables["a"]]
    assert held == [39, 3, 3, 3]


def test_one_table_for_all_layers_gives_the_same_bits(
    path: Callable[[str, int], Path], kept: Callable[[str, int, int], Logits], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if no layer had a window: the whole model is one group."""
    tokens = prompt(LONGEST, seed=0)
    monkeypatch.setattr(
        "octavo.graph.trace.group_layers",
        lambda nodes: (KVGroup(None, tuple(node.integer("layer") for node in nodes if node.op == "attention")),),
    )
    single = NativePaged(load_native(path("gemma3", 33), num_threads=2))
    assert len(single.native.kv_groups) == 1
    assert_same_bits(single.logits(tokens, 77), kept("gemma3", 33, 0))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("isa", isas())
def test_released_blocks_reach_no_result(
    native: Callable[..., CpuBackend], kept: Callable[[str, int, int], Logits], isa: str, window: int
) -> None:
    """Every instruction set, chunks that begin and end anywhere; what is released is NaN until another takes it."""
    for cascade in (False, True):
        backend = native("gemma3", window, isa=isa, num_threads=2, cascade=cascade)
        paged = NativePaged(backend, release=True, num_blocks=100, seed=window)
        rng = np.random.default_rng(window)
        done = {"a": 0, "b": 0}
        while done["a"] < LONGEST:
            work = {}
            for seed, key in enumerate(done):
                size = int(rng.choice([1, 1, 3, 15, 16, 17, 40, 200]))
                work[key] = prompt(LONGEST, seed=seed)[done[key] : done[key] + size]
            for seed, (key, logits) in enumerate(paged.step({k: t for k, t in work.items() if t}).items()):
                assert_same_bits(logits, kept("gemma3", window, seed)[done[key] : done[key] + len(logits)])
                done[key] += len(logits)


@pytest.mark.parametrize("window", [17, 48, 257])
def test_fast_math_reads_no_released_block(native: Callable[..., CpuBackend], window: int) -> None:
    isa = next((isa for isa in isas() if fast_table(isa) != isa), None)
    if isa is None:
        pytest.skip("this machine has no table of fast math")
    backend = native("gemma3", window, isa=isa, fast_math=True)
    tokens = prompt(LONGEST)
    assert_same_bits(NativePaged(backend, release=True).logits(tokens, 23), NativePaged(backend).logits(tokens, 23))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["gemma3", "gemma3-variations", "mistral-window"]),
    window=st.sampled_from([12, 16, 49, 256]),
    isa=st.sampled_from(isas()),
    cascade=st.booleans(),
    num_threads=st.integers(1, 3),
    block_size=st.sampled_from([16, 32, 64]),
    data=st.data(),
)
def test_any_workload_of_few_blocks(
    native: Callable[..., CpuBackend],
    kept: Callable[[str, int, int], Logits],
    name: str,
    window: int,
    isa: str,
    cascade: bool,
    num_threads: int,
    block_size: int,
    data: st.DataObject,
) -> None:
    """Sequences write into the blocks that others have just given back, in the same step too."""
    options = {"isa": isa, "cascade": cascade, "num_threads": num_threads, "block_size": block_size}
    backend = native(name, window, **options)
    paged = NativePaged(backend, release=True, block_size=block_size, num_blocks=64, seed=data.draw(st.integers(0, 9)))
    lengths = {str(i): data.draw(st.integers(1, 300), f"length {i}") for i in range(data.draw(st.integers(1, 3)))}
    done = dict.fromkeys(lengths, 0)
    while any(done[key] < lengths[key] for key in lengths):
        waiting = [key for key in lengths if done[key] < lengths[key]]
        running = data.draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True), "running")
        work = {}
        for key in running:
            size = data.draw(st.sampled_from([1, 7, 16, 17, 64, 300]), "chunk")
            work[key] = prompt(LONGEST, seed=int(key))[done[key] : min(done[key] + size, lengths[key])]
        for key, logits in paged.step(work).items():
            assert_same_bits(logits, kept(name, window, int(key))[done[key] : done[key] + len(logits)])
            done[key] += len(logits)


@pytest.mark.parametrize("window", [1, 3, 4, 5, 12, 50])
@pytest.mark.parametrize("name", ["gemma3", "mistral-window"])
def test_torch_reads_no_released_block(path: Callable[[str, int], Path], name: str, window: int) -> None:
    """Within the rounding of float32: sums of other shapes are added in another order."""
    backend = load(path(name, window))
    texts = {key: prompt(120, seed=seed) for seed, key in enumerate("ab")}
    expected = {key: Paged(backend).logits(tokens) for key, tokens in texts.items()}
    paged = Paged(backend, release=True, num_blocks=80)
    rng = np.random.default_rng(window)
    done = dict.fromkeys(texts, 0)
    while done["a"] < 120:
        sizes = {key: int(rng.choice([1, 1, 3, 4, 5, 30])) for key in texts}
        work = {key: texts[key][done[key] : done[key] + size] for key, size in sizes.items() if done[key] < 120}
        for key, logits in paged.step(work).items():
            worst = np.abs(logits - expected[key][done[key] : done[key] + len(logits)]).max()
            assert worst <= 1e-4 * np.abs(expected[key]).max()
            done[key] += len(logits)
