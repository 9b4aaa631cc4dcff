"""The torch backend's own promises: slices of logits, sampling, memory, devices, threads, errors."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.backends.host_memory import memory_limit
from octavo.backends.torch import TorchBackend, resolve_device
from octavo.backends.torch import backend as backend_module
from octavo.errors import ConfigError, ModelError
from octavo.sampling import Sampler, SamplingRows
from octavo.weights import open_checkpoint
from tests.backends.checkpoints import VOCAB, Reference, prompt
from tests.backends.paged import Paged, assert_close, graph, load

References = Callable[[str], Reference]


def greedy(count: int) -> SamplingRows:
    return SamplingRows(
        temperature=np.zeros(count),
        top_k=np.zeros(count, np.int32),
        top_p=np.ones(count),
        min_p=np.zeros(count),
        seed=np.zeros(count, np.uint64),
        choice=np.zeros(count, np.uint64),
        position=np.zeros(count, np.uint64),
        num_logprobs=np.full(count, 2, np.int32),
        target=np.full(count, -1, np.int32),
        shaping=[None] * count,
    )


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class TestSlices:
    def test_logits_come_in_bounded_slices(self, reference: References, monkeypatch: pytest.MonkeyPatch) -> None:
        tokens = prompt(30)
        monkeypatch.setattr(backend_module, "LOGITS_BYTES", 7 * VOCAB * 4 + 5)
        paged = Paged(load(reference("gemma3-variations").path))
        parts = list(paged.backend.forward(paged.batch({"a": tokens})))
        assert [(first, logits.shape) for first, logits in parts] == [
            (first, (min(7, 30 - first), VOCAB)) for first in range(0, 30, 7)
        ]
        found = np.concatenate([logits for _, logits in parts])
        assert found.dtype == np.float32
        assert_close(found, reference("gemma3-variations").logits(tokens))

    def test_one_row_when_not_even_that_fits(self, reference: References, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backend_module, "LOGITS_BYTES", 1)
        paged = Paged(load(reference("llama").path))
        assert len(list(paged.backend.forward(paged.batch({"a": prompt(5)})))) == 5

    def test_only_the_rows_asked_for(self, reference: References) -> None:
        tokens = {"a": prompt(9, seed=1), "b": prompt(6, seed=2)}
        paged = Paged(load(reference("llama").path))
        ((_, logits),) = paged.backend.forward(paged.batch(tokens, logit_rows=[2, 8, 14]))
        expected = [reference("llama").logits(part) for part in tokens.values()]
        assert_close(logits, np.stack([expected[0][2], expected[0][8], expected[1][5]]))

    def test_bfloat16_logits_are_not_rounded(self, reference: References) -> None:
        paged = Paged(load(reference("llama").path, dtype="bfloat16"))
        logits = paged.logits(prompt(9))
        assert (logits != torch.tensor(logits).bfloat16().float().numpy()).mean() > 0.9


class TestExecute:
    def test_greedy_tokens_are_the_best_of_each_row(
        self, reference: References, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(backend_module, "LOGITS_BYTES", 4 * VOCAB * 4)
        tokens = prompt(10)
        paged = Paged(load(reference("llama").path))
        sampled = paged.backend.execute(paged.batch({"a": tokens}), greedy(10))
        expected = reference("llama").logits(tokens)
        assert sampled.token_ids.tolist() == expected.argmax(1).tolist()
        best = torch.from_numpy(expected).double().log_softmax(-1).amax(1).numpy()
        np.testing.assert_allclose([entry.logprob for entry in sampled.logprobs if entry], best, atol=1e-4)

    def test_a_step_without_logit_rows_still_fills_the_cache(self, reference: References) -> None:
        tokens = prompt(20)
        paged = Paged(load(reference("llama").path))
        sampled = paged.backend.execute(paged.batch({"a": tokens[:15]}, logit_rows=[]), greedy(0))
        assert len(sampled.token_ids) == len(sampled.logprobs) == 0
        assert_close(paged.step({"a": tokens[15:]})["a"], reference("llama").logits(tokens)[15:])

    def test_results_are_ordinary_memory(self, reference: References) -> None:
        """No torch inference mode leaks out of a step that is left half-way."""
        paged = Paged(load(reference("llama").path))
        next(paged.backend.forward(paged.batch({"a": prompt(4)})))
        assert not torch.is_inference_mode_enabled()

    def test_threads_are_set_again_when_something_changed_them(self, reference: References) -> None:
        paged = Paged(load(reference("llama").path))
        torch.set_num_threads(2)
        paged.logits(prompt(2))
        assert torch.get_num_threads() == 1


class TestMemory:
    def test_sizes(self, reference: References) -> None:
        backend = load(reference("llama").path, dtype="bfloat16", kv_cache_dtype="float32")
        assert backend.kv_bytes_per_token == 3 * 2 * 2 * 12 * 4  # layers, K and V, KV heads, head_dim, bytes
        weights = graph(reference("llama").path, "bfloat16").weights.values()
        assert backend.weight_bytes == sum(
            int(np.prod(weight.shape)) * (2 if weight.dtype == "bfloat16" else 4) for weight in weights
        )
        assert backend.memory_limit() == memory_limit()
        assert "cpu" in backend.description
        assert "bfloat16" in backend.description

    def test_tied_embeddings_are_held_once(self, reference: References) -> None:
        tied, free = (load(reference(name).path).weight_bytes for name in ("llama-tied", "llama"))
        assert free - tied == VOCAB * 48 * 4

    def test_a_cache_that_cannot_be(self, reference: References) -> None:
        with pytest.raises(ConfigError, match=r"KV cache of 1000000000000000 blocks \(.* bytes\) does not fit on cpu"):
            load(reference("llama").path).allocate_kv_cache(10**15)

    def test_pages_of_the_cache_are_committed_when_written(self, reference: References) -> None:
        backend = load(reference("llama").path)
        before = resident_bytes()
        backend.allocate_kv_cache(2**32 // backend.block_bytes)
        assert sum(cache.keys.nbytes + cache.values.nbytes for cache in backend.kv_caches.values()) > 2**32 - 2**20
        assert resident_bytes() - before < 2**26

    def test_keys_and_values_are_read_as_stored(self, reference: References) -> None:
        """With a narrower cache even a chunk's own keys are rounded, so chunk sizes make no difference."""
        tokens = prompt(40)
        paths = [load(reference("llama").path, kv_cache_dtype="bfloat16") for _ in range(2)]
        whole, single = (Paged(backend).logits(tokens, size) for backend, size in zip(paths, (None, 1), strict=True))
        assert_close(single, whole)
        exact = reference("llama").logits(tokens)
        assert np.abs(whole - exact).max() > 1e-3 * np.abs(exact).max()


class TestErrors:
    @pytest.mark.parametrize("device", ["gpu", "cuda:x", "cuda:", "cpu:1:2", "", "meta", "cuda:-1"])
    def test_unknown_devices(self, device: str, reference: References) -> None:
        with pytest.raises(ConfigError, match="cannot be used here"):
            load(reference("llama").path, device=device)

    def test_a_device_that_is_not_there(self) -> None:
        for device in ("cuda:99", "mps", "no-such-device"):
            with pytest.raises(ConfigError, match=f"device='{device}' cannot be used here") as error:
                resolve_device(device)
            assert "\n" not in str(error.value)

    def test_devices_that_are_there(self) -> None:
        assert resolve_device("cpu") == "cpu"
        assert resolve_device("auto") == ("cuda:0" if torch.cuda.is_available() else "cpu")

    def test_a_checkpoint_of_another_model(self, reference: References) -> None:
        other = open_checkpoint(reference("llama-tied").path).tensors
        with pytest.raises(ModelError, match=r"lm_head.weight of shape \(96, 48\) is missing"):
            TorchBackend(
                graph(reference("llama").path, "float32"),
                other,
                device="cpu",
                dtype="float32",
                kv_cache_dtype="float32",
                block_size=4,
                num_threads=1,
                sampler=Sampler(VOCAB),
            )
