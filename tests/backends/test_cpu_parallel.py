"""Models divided among cpu backends: a pipeline keeps one worker's bits; ranks of one layer keep bits of their own.

Each worker is a thread of this process. For what a row-parallel product is, see tests/native/test_exchange.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.backends.base import Batch
from octavo.backends.cpu import CpuBackend, PackedCache, isas
from octavo.outputs import TokenLogprobs
from octavo.sampling import SamplingRows
from octavo.weights import open_checkpoint
from octavo.worker.parts import Place, part_of
from tests.backends.checkpoints import Reference, make, prompt
from tests.backends.native import BLOCK, NativePaged, load_native, stored_at_random
from tests.backends.paged import Logits, graph
from tests.backends.test_torch_backend import greedy
from tests.backends.test_torch_parallel import true_logits
from tests.collectives_in_threads import run, workers

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = ("llama-biases", "mistral-window", "gemma3-variations", "smol", "llama-one-kv-head")
TOKENS = prompt(80, seed=3)
LAYOUTS = [(2, 1), (2, 2)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    def make_one(name: str) -> Reference:
        path = tmp_path_factory.mktemp(name)
        if name == "smol":  # nine query heads that share three KV heads, tied embeddings
            return make("llama-tied", path, head_dim=32, num_attention_heads=9, num_key_value_heads=3, hidden_size=144)
        if name == "wide":  # a rank has two heads of 256: whole super-blocks
            return make("llama-biases", path, head_dim=256, **WIDE)
        return make(name, path, head_dim=16)

    return cache(make_one)


class Parallel:
    """Sequences on the backends of all workers: T that divide each layer of each of P stages."""

    def __init__(
        self,
        path: Path,
        tensor: int,
        pipeline: int,
        *,
        stored: Sequence[str] = (),
        num_threads: int = 1,
        packed_cache: Path | None = None,
        kv_cache_dtype: str = "bfloat16",
        **options: Any,
    ) -> None:
        whole, checkpoint = graph(path, "bfloat16"), open_checkpoint(path)
        tensors = stored_at_random(checkpoint.tensors, stored) if stored else checkpoint.tensors
        self.backends: list[CpuBackend] = []
        for index, collectives in enumerate(workers(tensor, pipeline)):
            part, own = part_of(whole, tensors, Place(index, tensor, pipeline))
            self.backends.append(
                CpuBackend(
                    part,
                    own,
                    kv_cache_dtype=kv_cache_dtype,
                    block_size=BLOCK,
                    num_threads=num_threads,
                    vocab_size=whole.output.width or 0,
                    collectives=collectives,
                    packed_cache=None if packed_cache is None else PackedCache(packed_cache, checkpoint.sources),
                    **options,
                )
            )
        self._paged = [NativePaged(backend) for backend in self.backends]
        self._sampler = tensor * (pipeline - 1)

    def _on_all(self, task: Callable[[CpuBackend, Batch], Any], work: dict[str, Sequence[int]], rows: Any) -> list[Any]:
        batches = [paged.batch(work, rows) for paged in self._paged]
        return run(
            [
                lambda backend=backend, batch=batch: task(backend, batch)
                for backend, batch in zip(self.backends, batches, strict=True)
            ]
        )

    def step(self, work: dict[str, Sequence[int]]) -> dict[str, Logits]:
        results = self._on_all(CpuBackend.logits, work, None)
        logits = results.pop(self._sampler)
        assert all(len(other) == 0 for other in results)
        ends = np.cumsum([len(tokens) for tokens in work.values()])[:-1]
        return dict(zip(work, np.split(logits, ends), strict=True))

    def logits(self, tokens: Sequence[int], chunk: int | None = None) -> Logits:
        size = chunk or len(tokens)
        return np.concatenate([self.step({"a": tokens[i : i + size]})["a"] for i in range(0, len(tokens), size)])

    def execute(
        self, work: dict[str, Sequence[int]], rows: SamplingRows, logit_rows: Sequence[int]
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        results = self._on_all(lambda backend, batch: backend.execute(batch, rows), work, logit_rows)
        sampled = results.pop(self._sampler)
        assert results == [None] * len(results)
        return sampled.token_ids.tolist(), sampled.logprobs


def assert_same_bits(found: Logits, expected: Logits) -> None:
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


WEIGHTS: list[dict[str, Any]] = [
    {},
    {"stored": ["Q4_1"]},
    {"stored": ["Q8_0"], "kv_cache_dtype": "int8"},
    {"stored": ["Q4_K"]},
    {"stored": ["Q4_K", "Q6_K", "BF16"], "activation_dtype": "int16"},
    {"quantization": "int8", "kv_cache_dtype": "int8"},
]


class TestPipeline:
    @pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "int8"])
    @pytest.mark.parametrize("stages", [2, 3])
    @pytest.mark.parametrize("name", MODELS)
    def test_the_bits_are_one_workers(
        self, reference: Callable[[str], Reference], name: str, stages: int, kv_cache_dtype: str
    ) -> None:
        path = reference(name).path
        found = Parallel(path, 1, stages, kv_cache_dtype=kv_cache_dtype).logits(TOKENS, 31)
        assert_same_bits(found, NativePaged(load_native(path, kv_cache_dtype=kv_cache_dtype)).logits(TOKENS))

    @pytest.mark.parametrize("options", WEIGHTS, ids=str)
    def test_weights_in_few_bits(self, reference: Callable[[str], Reference], options: dict[str, Any]) -> None:
        path = reference("wide").path
        found = Parallel(path, 1, 3, **options).logits(TOKENS, 31)
        assert_same_bits(found, NativePaged(load_native(path, **options)).logits(TOKENS))

    def test_a_stage_without_attention(self, reference: Callable[[str], Reference], tmp_path: Path) -> None:
        """Its blocks have no bytes; a host tier in a file has none then, too."""
        path = reference("gemma3-variations").path
        parallel = Parallel(path, 1, 8)
        without = [backend for backend in parallel.backends if backend.block_bytes == 0]
        assert without
        one = NativePaged(load_native(path))
        assert_same_bits(parallel.logits(TOKENS), one.logits(TOKENS))
        for backend in without:
            backend.allocate_swap_space(3, tmp_path)
            backend.move_blocks([("swap_out", 0, 1), ("swap_in", 1, 2), ("copy", 2, 3)])


class TestTensorParallel:
    @pytest.mark.parametrize(("tensor", "pipeline"), LAYOUTS)
    @pytest.mark.parametrize("name", MODELS)
    def test_however_it_is_run_the_bits_are_the_same(
        self, reference: Callable[[str], Reference], name: str, tensor: int, pipeline: int
    ) -> None:
        """Against one step of the plainest kernels on one thread: chunks, mates, threads, tables, fusion, stages."""
        path = reference(name).path
        expected = Parallel(path, tensor, 1, isa="portable", fuse=False).logits(TOKENS)
        for isa, (num_threads, chunk) in zip(isas(), cycle([(2, 35), (1, 7), (3, 16)]), strict=False):
            parallel = Parallel(path, tensor, pipeline, isa=isa, num_threads=num_threads)
            parallel.step({"mate": TOKENS[:41]})
            for first in range(0, 80, chunk):
                work = {"mate": TOKENS[first : first + 1], "own": TOKENS[first : first + chunk]}
                assert_same_bits(parallel.step(work)["own"], expected[first : first + chunk])

    @pytest.mark.parametrize("options", WEIGHTS, ids=str)
    def test_weights_in_few_bits(self, reference: Callable[[str], Reference], options: dict[str, Any]) -> None:
        path = reference("wide").path
        expected = Parallel(path, 2, 1, isa="portable", fuse=False, **options).logits(TOKENS[:40])
        for isa in isas():
            found = Parallel(path, 2, 2, isa=isa, num_threads=2, **options).logits(TOKENS[:40], 11)
            assert_same_bits(found, expected)
        one = NativePaged(load_native(path, **options)).logits(TOKENS[:40])
        assert np.abs(found - one).max() < 0.2 * one.std()

    @pytest.mark.parametrize("name", MODELS)
    def test_as_near_to_the_truth_as_one_worker(self, reference: Callable[[str], Reference], name: str) -> None:
        """The bound of test_torch_parallel.py: four times one worker's distance from transformers in float64."""
        path = reference(name).path
        one, found = NativePaged(load_native(path)).logits(TOKENS), Parallel(path, 2, 1).logits(TOKENS)
        truth = true_logits(reference(name), TOKENS, "bfloat16")
        assert np.abs(found - one).max() <= 4 * np.abs(one - truth).max() < 0.5 * np.abs(truth).max()

    def test_weights_are_divided(self, reference: Callable[[str], Reference]) -> None:
        path = reference("wide").path
        whole = load_native(path).weight_bytes
        parts = [backend.weight_bytes for backend in Parallel(path, 2, 1).backends]
        assert max(parts) < 0.51 * whole  # norms and biases of o and down are whole
        assert sum(parts) < 1.01 * whole


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 3), *LAYOUTS])
def test_one_worker_samples(reference: Callable[[str], Reference], tensor: int, pipeline: int) -> None:
    """Tokens and logprobs are those of the logits; rows that are scored, and rows whose logits Python changes."""
    path = reference("gemma3-variations").path
    work, logit_rows = {"a": TOKENS[:8], "b": TOKENS[20:29]}, [3, 7, 12, 16]
    logits = np.concatenate(list(Parallel(path, tensor, pipeline).step(work).values()))[logit_rows]
    best = logits.argmax(1)
    rows = greedy(4)
    rows.target[0] = TOKENS[4]

    def without_the_best(row: Logits) -> Logits:
        shaped = row.copy()
        shaped[best[3]] = -np.inf
        return shaped

    rows.shaping[3] = without_the_best
    tokens, logprobs = Parallel(path, tensor, pipeline).execute(work, rows, logit_rows)
    assert tokens[1:3] == best[1:3].tolist()
    assert tokens[3] == np.argsort(logits[3])[-2]
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
    for i, token in enumerate([TOKENS[4], *tokens[1:]]):
        entry = logprobs[i]
        assert entry is not None
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(exact[i, token], abs=1e-5)
        assert entry.top_ids == np.argsort(-logits[i])[:2].tolist()
    if tensor == 1:
        one = NativePaged(load_native(path))
        expected = one.native.execute(one.batch(work, logit_rows), rows)
        assert expected is not None
        assert (tokens, logprobs) == (expected.token_ids.tolist(), expected.logprobs)


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 2), *LAYOUTS])
def test_a_step_that_samples_nothing(reference: Callable[[str], Reference], tensor: int, pipeline: int) -> None:
    path = reference("smol").path
    parallel = Parallel(path, tensor, pipeline)
    assert parallel.execute({"a": TOKENS[:30]}, greedy(0), []) == ([], [])
    assert_same_bits(parallel.step({"a": TOKENS[30:]})["a"], Parallel(path, tensor, pipeline).logits(TOKENS)[30:])


def test_each_worker_keeps_packed_weights_of_its_own(reference: Callable[[str], Reference], tmp_path: Path) -> None:
    """Ranks hold other parts of tensors of the same name, and of the same shape."""
    path = reference("wide").path
    written = Parallel(path, 2, 2, stored=["Q4_1"], packed_cache=tmp_path)
    assert [backend.packed_cache for backend in written.backends] == ["written"] * 4
    mapped = Parallel(path, 2, 2, stored=["Q4_1"], packed_cache=tmp_path)
    assert [backend.packed_cache for backend in mapped.backends] == ["hit"] * 4
    assert_same_bits(mapped.logits(TOKENS), Parallel(path, 2, 2, stored=["Q4_1"]).logits(TOKENS))
