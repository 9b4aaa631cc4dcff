"""Models divided among workers: together they compute what one does, and what rounding they add is bounded.

The bound is measured, not chosen: one worker's own distance from transformers' model in float64. Workers that divide a
layer round as often as one does, except that a product's sum is made in parts, each of fewer terms; so they may be as
far from the truth as one worker is, on the other side of it. Twice that distance, and as much for the few numbers
that a tiny model has (the worst of them is a random thing), is allowed between them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.backends.torch import backend as backend_module
from octavo.errors import ConfigError
from octavo.graph import DType
from tests.backends.checkpoints import VOCAB, Reference, make, prompt
from tests.backends.paged import Logits, Paged, load
from tests.backends.parallel import Parallel, load_parts
from tests.backends.test_torch_backend import greedy

References = Callable[[str], Reference]
PROMPT = prompt(45, seed=3)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Heads as of SmolLM2: nine that share three KV heads."""
    return make(
        "llama", tmp_path_factory.mktemp("uneven"), hidden_size=54, num_attention_heads=9, num_key_value_heads=3
    )


def true_logits(reference: Reference, tokens: list[int], dtype: DType) -> Logits:
    """In float64, of weights that are rounded as the backend rounds them."""
    model = copy.deepcopy(reference.model).double()
    if dtype == "bfloat16":
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" not in name:
                    parameter.copy_(parameter.bfloat16())
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].double().numpy()


@cache
def _ones(path: Path, dtype: DType) -> Logits:
    return Paged(load(path, dtype=dtype)).logits(PROMPT)


def assert_as_one(reference: Reference, found: Logits, dtype: DType) -> None:
    """Within the bound of one worker's, and the same tokens wherever their best two are further apart than that."""
    one, truth = _ones(reference.path, dtype), true_logits(reference, PROMPT, dtype)
    bound = 4 * np.abs(one - truth).max()
    assert bound < {"float32": 1e-3, "bfloat16": 0.5}[dtype] * np.abs(truth).max()
    assert found.shape == one.shape
    assert np.abs(found - one).max() <= bound
    best = np.sort(one, axis=1)[:, -2:]
    clear = best[:, 1] - best[:, 0] > 2 * bound
    assert dtype != "float32" or clear.mean() > 0.9
    np.testing.assert_array_equal(found.argmax(1)[clear], one.argmax(1)[clear])


DIVIDED = [
    ("llama", 2, 1),
    ("llama", 2, 2),
    ("llama", 2, 3),
    ("llama-tied", 2, 2),
    ("llama-biases", 2, 2),
    ("llama-one-kv-head", 2, 1),
    ("llama-one-kv-head", 3, 2),
    ("llama-all-kv-heads", 3, 1),
    ("llama-all-kv-heads", 3, 2),
    ("mistral-window", 2, 2),
    ("gemma3", 2, 1),
    ("gemma3", 2, 3),
    ("gemma3-variations", 2, 2),
]


class TestTensorParallel:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize(("name", "tensor", "pipeline"), DIVIDED)
    def test_logits_are_one_workers(
        self, reference: References, name: str, tensor: int, pipeline: int, dtype: DType
    ) -> None:
        parallel = Parallel(load_parts(reference(name).path, tensor, pipeline, dtype=dtype))
        assert_as_one(reference(name), parallel.logits(PROMPT), dtype)

    @pytest.mark.parametrize("size", [2, 3])
    def test_uneven_heads(self, uneven: Reference, size: int) -> None:
        parallel = Parallel(load_parts(uneven.path, size, 1))
        heads = [next(iter(backend._kv_shapes.values()))[0] for backend in parallel.backends]
        assert heads == {2: [2, 1], 3: [1, 1, 1]}[size]
        assert_as_one(uneven, parallel.logits(PROMPT), "float32")

    def test_heads_that_cannot_be_dealt_are_refused(self, reference: References) -> None:
        with pytest.raises(ConfigError, match="tensor_parallel_size=3: 2 KV heads"):
            load_parts(reference("llama").path, 3, 1)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_the_same_number_of_workers_gives_the_same_bits(self, reference: References, dtype: DType) -> None:
        path = reference("gemma3-variations").path
        first, second, cut = (Parallel(load_parts(path, 2, stages, dtype=dtype)).logits(PROMPT) for stages in (1, 1, 3))
        np.testing.assert_array_equal(first, second)
        np.testing.assert_array_equal(first, cut)

    def test_all_of_it_is_used(self, reference: References) -> None:
        """Another worker's part changes every logit: nobody computes alone."""
        backends = load_parts(reference("llama").path, 2, 1)
        right = Parallel(backends).logits(PROMPT)
        with torch.inference_mode():
            for name, weight in backends[1]._weights.items():
                if name.endswith("down.weight"):
                    weight.mul_(-1)
        wrong = Parallel(backends).logits(PROMPT)
        assert (right != wrong).mean() > 0.99

    def test_weights_are_divided(self, reference: References) -> None:
        whole = load(reference("llama-all-kv-heads").path).weight_bytes
        parts = [backend.weight_bytes for backend in load_parts(reference("llama-all-kv-heads").path, 3, 1)]
        norms = 7 * 48 * 4
        unit = 3 * 32 * 48 * 4  # 32 columns of gate, up and down, in each of three layers
        assert max(parts) <= (whole - norms) / 3 + norms + 3 * unit
        assert sum(parts) == whole + 2 * norms


class TestPipelineParallel:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("stages", [2, 3, 5])
    @pytest.mark.parametrize("name", ["llama", "llama-tied", "llama-biases", "mistral-window", "gemma3"])
    def test_the_bits_are_one_workers(self, reference: References, name: str, stages: int, dtype: DType) -> None:
        path = reference(name).path
        parallel = Parallel(load_parts(path, 1, stages, dtype=dtype))
        np.testing.assert_array_equal(parallel.logits(PROMPT), _ones(path, dtype))

    def test_groups_without_layers_in_a_stage(self, reference: References) -> None:
        """Of Gemma's four layers one sees all: its group is in one stage alone, and blocks fall out of windows."""
        path = reference("gemma3").path
        backends = load_parts(path, 1, 4)
        layers = [[len(group.layers) for group in backend.kv_groups] for backend in backends]
        assert all(0 in counts for counts in layers)
        parallel = Parallel(backends, release=True)
        one = Paged(load(path), release=True)
        for size in (20, 5, 1, 1, 30, 1):
            tokens = prompt(size, seed=size)
            np.testing.assert_array_equal(parallel.step({"a": tokens})["a"], one.step({"a": tokens})["a"])

    def test_a_stage_without_attention(self, reference: References) -> None:
        """Nine pieces of the model in eight stages: some have no KV cache at all, and their blocks no bytes."""
        path = reference("gemma3").path
        backends = load_parts(path, 1, 8)
        without = [backend for backend in backends if not any(group.layers for group in backend.kv_groups)]
        assert without
        assert {backend.block_bytes for backend in without} == {0}
        assert {len(backend.kv_groups) for backend in backends} == {len(load(path).kv_groups)}
        np.testing.assert_array_equal(Parallel(backends).logits(PROMPT), _ones(path, "float32"))
        for backend in without:
            backend.allocate_swap_space(3, None)
            backend.move_blocks([])

    def test_too_many_stages_are_refused(self, reference: References) -> None:
        with pytest.raises(ConfigError, match="pipeline_parallel_size=20"):
            load_parts(reference("llama").path, 1, 20)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)])
class TestSteps:
    def test_several_sequences_in_chunks(self, reference: References, tensor: int, pipeline: int) -> None:
        """As one worker does, in the same steps: then only the sums' order differs, if that."""
        path = reference("gemma3").path
        parallel, one = Parallel(load_parts(path, tensor, pipeline), release=True), Paged(load(path), release=True)
        a, b, c = (prompt(40, seed=seed) for seed in range(3))
        for work in (
            {"a": a[:13]},
            {"a": a[13:30], "b": b[:7]},
            {"b": b[7:8], "c": c[:20], "a": a[30:31]},
            {"a": a[31:32], "b": b[8:9], "c": c[20:21]},
            {"c": c[21:40]},
        ):
            found, expected = parallel.step(work), one.step(work)
            assert found.keys() == expected.keys()
            for name in work:
                scale = np.abs(expected[name]).max()
                assert np.abs(found[name] - expected[name]).max() <= (1e-5 * scale if tensor > 1 else 0)

    def test_one_worker_samples(
        self, reference: References, tensor: int, pipeline: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In slices of three rows; prompt tokens are scored in rows of their own."""
        monkeypatch.setattr(backend_module, "LOGITS_BYTES", 3 * VOCAB * 4)
        path = reference("llama").path
        work = {"a": PROMPT[:8], "b": PROMPT[20:29]}
        rows, logit_rows = greedy(5), [3, 7, 12, 15, 16]
        rows.target[0], rows.target[3] = PROMPT[4], 77
        found = Parallel(load_parts(path, tensor, pipeline)).execute(work, rows, logit_rows)
        one = Paged(load(path))
        expected = one.backend.execute(one.batch(work, logit_rows), rows)
        assert expected is not None
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        for mine, theirs in zip(found.logprobs, expected.logprobs, strict=True):
            assert mine is not None
            assert theirs is not None
            assert (mine.token_id, mine.rank, mine.top_ids) == (theirs.token_id, theirs.rank, theirs.top_ids)
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert mine.top_logprobs == pytest.approx(theirs.top_logprobs, abs=1e-4)

    def test_a_step_that_samples_nothing(self, reference: References, tensor: int, pipeline: int) -> None:
        path = reference("llama").path
        parallel = Parallel(load_parts(path, tensor, pipeline))
        sampled = parallel.execute({"a": PROMPT[:30]}, greedy(0), [])
        assert len(sampled.token_ids) == 0
        found = parallel.step({"a": PROMPT[30:]})["a"]
        assert np.abs(found - _ones(path, "float32")[30:]).max() < 1e-4
