"""The bits contract: a request's logits are the same bits whatever runs beside it, and however it is run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.backends.cpu import CpuBackend, isas
from octavo.backends.cpu.native import fast_table, quant_formats
from tests.backends.checkpoints import make, prompt
from tests.backends.native import NativePaged, load_native
from tests.backends.paged import Logits

MODELS = ("llama-biases", "mistral-window", "gemma3-variations")
LONGEST = 300  # more than a piece of attention
KV_CACHES = ("bfloat16", "int8")


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., CpuBackend]:
    @cache
    def path(name: str) -> Path:
        return make(name, tmp_path_factory.mktemp(name), head_dim=16).path

    return cache(lambda name, **options: load_native(path(name), **options))


@pytest.fixture(scope="module")
def alone(load: Callable[..., CpuBackend]) -> Callable[..., Logits]:
    """Logits of `prompt(LONGEST, seed)`: the plainest kernels, nothing fused, one thread, one sequence, one step."""
    return cache(
        lambda name, seed, kv_cache_dtype="bfloat16": NativePaged(
            load(name, isa="portable", fuse=False, kv_cache_dtype=kv_cache_dtype)
        ).logits(prompt(LONGEST, seed=seed))
    )


def assert_same_bits(found: Logits, expected: Logits) -> None:
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def test_reference_holds_no_nan(alone: Callable[[str, int], Logits]) -> None:
    """The cache is full of them; none may come through."""
    for name in MODELS:
        exact, in_int8 = alone(name, 0), alone(name, 0, "int8")
        assert np.isfinite(exact).all()
        assert 0 < np.abs(in_int8 - exact).mean() < 0.05 * exact.std()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(MODELS),
    isa=st.sampled_from(isas()),
    fuse=st.booleans(),
    num_threads=st.integers(1, 4),
    block_size=st.sampled_from([16, 32, 64]),
    kv_cache_dtype=st.sampled_from(["bfloat16", "int8"]),
    data=st.data(),
)
def test_any_workload(
    load: Callable[..., CpuBackend],
    alone: Callable[[str, int], Logits],
    name: str,
    isa: str,
    fuse: bool,
    num_threads: int,
    block_size: int,
    kv_cache_dtype: str,
    data: st.DataObject,
) -> None:
    options = {"num_threads": num_threads, "block_size": block_size, "kv_cache_dtype": kv_cache_dtype}
    backend = load(name, isa=isa, fuse=fuse, **options)
    paged = NativePaged(backend, block_size=block_size, num_blocks=128, seed=data.draw(st.integers(0, 99), "blocks"))
    lengths = {str(i): data.draw(st.integers(1, LONGEST), f"length {i}") for i in range(data.draw(st.integers(1, 5)))}
    done = dict.fromkeys(lengths, 0)
    for _ in range(400):
        waiting = [key for key in lengths if done[key] < lengths[key]]
        if not waiting:
            break
        running = data.draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True), "running")
        work = {}
        for key in running:
            size = data.draw(st.sampled_from([1, 1, 7, 16, 17, 64, LONGEST]), "chunk")
            work[key] = prompt(LONGEST, seed=int(key))[done[key] : min(done[key] + size, lengths[key])]
        for key, logits in paged.step(work).items():
            assert_same_bits(logits, alone(name, int(key), kv_cache_dtype)[done[key] : done[key] + len(logits)])
            done[key] += len(logits)
        victim = data.draw(st.sampled_from([None, None, None, *running]), "preempted")
        if victim is not None and lengths[victim] < LONGEST:  # a long one is not begun again and again
            paged.preempt(victim)
            done[victim] = 0
            lengths[victim] = min(lengths[victim] + 30, LONGEST)


@pytest.mark.parametrize("kv_cache_dtype", KV_CACHES)
@pytest.mark.parametrize("chunk", [1, 7, 16, 17])
@pytest.mark.parametrize("name", MODELS)
def test_each_instruction_set_and_chunk_size(
    load: Callable[..., CpuBackend], alone: Callable[..., Logits], name: str, chunk: int, kv_cache_dtype: str
) -> None:
    for isa in isas():
        paged = NativePaged(load(name, isa=isa, num_threads=2, kv_cache_dtype=kv_cache_dtype))
        found = paged.logits(prompt(LONGEST, seed=1)[:120], chunk)
        assert_same_bits(found, alone(name, 1, kv_cache_dtype)[:120])


def test_two_engines_at_once(load: Callable[..., CpuBackend], alone: Callable[[str, int], Logits]) -> None:
    """More threads than cores, from two Python threads: nobody waits for ever, nothing mixes."""
    from concurrent.futures import ThreadPoolExecutor

    def run(name: str) -> Logits:
        return NativePaged(load(name, num_threads=3)).logits(prompt(LONGEST, seed=2), 5)

    with ThreadPoolExecutor(2) as executor:
        results = list(executor.map(run, ("llama-biases", "gemma3-variations")))
    assert_same_bits(results[0], alone("llama-biases", 2))
    assert_same_bits(results[1], alone("gemma3-variations", 2))


@pytest.mark.parametrize("kv_cache_dtype", KV_CACHES)
@pytest.mark.parametrize("name", ["llama-one-kv-head", "gemma3"])
def test_a_long_context_that_threads_share(tmp_path: Path, name: str, kv_cache_dtype: str) -> None:
    """Five pieces of 256 positions and few KV heads: each thread takes some pieces of one row's attention."""
    path = make(name, tmp_path, head_dim=16, max_position_embeddings=2048).path
    tokens = prompt(1100, seed=3)
    plain = load_native(path, isa="portable", fuse=False, kv_cache_dtype=kv_cache_dtype)
    expected = NativePaged(plain, num_blocks=80).logits(tokens)
    for num_threads in (2, 5):
        backend = load_native(path, num_threads=num_threads, kv_cache_dtype=kv_cache_dtype)
        paged = NativePaged(backend, num_blocks=160)
        paged.step({"long": tokens[:1090], "other": tokens[:7]})
        for i in range(1090, 1100):
            assert_same_bits(paged.step({"long": tokens[i : i + 1]})["long"], expected[i : i + 1])


@pytest.mark.parametrize("kv_cache_dtype", KV_CACHES)
@pytest.mark.parametrize("name", MODELS)
def test_fast_math_gives_up_other_tables_bits_and_nothing_else(
    load: Callable[..., CpuBackend], name: str, kv_cache_dtype: str
) -> None:
    if all(fast_table(isa) == isa for isa in isas()):
        pytest.skip("this machine has no table of fast math")
    tokens = prompt(LONGEST, seed=4)
    isa = next(isa for isa in isas() if fast_table(isa) != isa)
    options = {"isa": isa, "kv_cache_dtype": kv_cache_dtype}
    plain = NativePaged(load(name, fast_math=True, fuse=False, **options)).logits(tokens)
    paged = NativePaged(load(name, fast_math=True, num_threads=3, **options))
    paged.step({"mate": tokens[:77]})
    for first in range(0, LONGEST, 23):
        found = paged.step({"own": tokens[first : first + 23], "other" + str(first): tokens[:5]})["own"]
        assert_same_bits(found, plain[first : first + 23])
    exact = NativePaged(load(name, **options)).logits(tokens)
    assert 0 < np.abs(exact - plain).max() < 0.1 * exact.std()


@pytest.mark.parametrize("kv_cache_dtype", KV_CACHES)
@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("name", ["llama", "llama-one-kv-head", "gemma3"])
def test_what_sequences_share_is_read_once_and_gives_the_same_bits(
    load: Callable[..., CpuBackend], name: str, num_threads: int, isa: str, kv_cache_dtype: str
) -> None:
    """A tree of prefixes: b has 2 pieces of a, c 1 piece of a, d 3 pieces of b; beside them e, which shares nothing."""
    texts = {key: prompt(850, seed=i) for i, key in enumerate("abcde", 10)}
    for new, old, pieces in (forks := (("b", "a", 2), ("c", "a", 1), ("d", "b", 3))):
        texts[new][: 256 * pieces] = texts[old][: 256 * pieces]
    sizes = {"a": 1, "b": 5, "c": 1, "d": 3, "e": 1}
    layers = {"llama": 3, "llama-one-kv-head": 3, "gemma3": 1}[name]  # without a window
    found = []
    for cascade in (False, True):
        backend = load(name, isa=isa, num_threads=num_threads, cascade=cascade, kv_cache_dtype=kv_cache_dtype)
        paged = NativePaged(backend, num_blocks=300)
        paged.step({key: texts[key][:800] for key in "ae"})
        for new, old, pieces in forks:
            paged.fork(old, new, 16 * pieces)
            paged.step({new: texts[new][256 * pieces : 800]})
        for i in range(5):
            begins = {key: 800 + i * size for key, size in sizes.items()}
            found.append(paged.step({key: texts[key][begins[key] : begins[key] + sizes[key]] for key in sizes}))
            # Of pieces 0, 1 and 2 there are 4, 3 and 2 readers.
            assert backend.shared_positions == (layers * 256 * (3 + 2 + 1) if cascade else 0)
    for apart, together in zip(found[:5], found[5:], strict=True):
        for key in sizes:
            assert_same_bits(together[key], apart[key])


@pytest.mark.parametrize("num_threads", [1, 3])
def test_rows_of_one_prompt_share_nothing(load: Callable[..., CpuBackend], num_threads: int) -> None:
    """Its tiles of rows have a block table in common, but each is as much as a shared unit takes."""
    backend = load("llama", num_threads=num_threads)
    paged = NativePaged(backend)
    for tokens in (prompt(700), prompt(200)):
        paged.step({"a": tokens})
        assert backend.shared_positions == 0


WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2}  # super-blocks


@pytest.mark.parametrize("kv_cache_dtype", KV_CACHES)
@pytest.mark.parametrize("activation_dtype", ["int8", "int16", "bfloat16"])
@pytest.mark.parametrize("width", [*quant_formats(), "int8", "all in turn"])
def test_each_width(tmp_path: Path, width: str, activation_dtype: str, kv_cache_dtype: str) -> None:
    """Weights in few bits: one step of one thread of the plainest kernels, and all else that may run them."""
    path = make("llama", tmp_path, head_dim=16, **WIDE).path
    options = {
        "stored": {"int8": [], "all in turn": [*quant_formats(), "BF16"]}.get(width, [width]),
        "quantization": "int8" if width == "int8" else None,
        "activation_dtype": activation_dtype,
        "kv_cache_dtype": kv_cache_dtype,
    }
    tokens = prompt(70, seed=5)
    expected = NativePaged(load_native(path, isa="portable", fuse=False, **options)).logits(tokens)
    assert np.isfinite(expected).all()
    for isa, (num_threads, chunk) in zip(isas(), cycle([(2, 35), (1, 7), (3, 16)]), strict=False):
        paged = NativePaged(load_native(path, isa=isa, num_threads=num_threads, **options))
        paged.step({"mate": tokens[:41]})
        for first in range(0, 70, chunk):
            work = {"own": tokens[first : first + chunk], "mate": tokens[first : first + 1]}
            assert_same_bits(paged.step(work)["own"], expected[first : first + chunk])


def test_activations_and_widths_differ(tmp_path: Path) -> None:
    """Each flag does something: other bits, near each other."""
    path = make("llama", tmp_path, head_dim=16, **WIDE).path
    tokens = prompt(40, seed=6)
    exact, *others = (
        NativePaged(load_native(path, stored=["Q4_1"], **options)).logits(tokens)
        for options in (
            {"quantization": "none"},
            {},
            {"activation_dtype": "int16"},
            {"activation_dtype": "bfloat16"},
            {"quantization": "int8"},
        )
    )
    for i, found in enumerate(others):
        assert 0 < np.abs(found - exact).max() < 0.3 * exact.std()
        assert all((found != other).any() for other in others[:i])
