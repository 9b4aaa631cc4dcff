"""The native backend against transformers and torch, and its own promises: sampling, memory, threads, errors."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo import SamplingParams
from octavo.backends.base import Batch
from octavo.backends.cpu import CpuBackend, isas
from octavo.backends.cpu import backend as backend_module
from octavo.backends.cpu.cores import Cores
from octavo.backends.torch.step import KVCache
from octavo.errors import ConfigError, ModelError
from octavo.sampling import NOT_FINITE, NOTHING_LEFT, Sampled, Sampler, SamplingRows
from octavo.sampling.features import History, Shaping, features_of
from octavo.sampling_params import Bans
from octavo.weights import open_checkpoint
from tests.backends.checkpoints import CHECKPOINTS, VOCAB, WINDOW, Reference, make, prompt
from tests.backends.native import NativePaged, load_native
from tests.backends.paged import Paged, graph, load
from tests.sampling.reference import make_rows

References = Callable[[str], Reference]
LENGTH = 100


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> References:
    """The tiny checkpoints with heads of 16, which is what the native kernels take."""
    return cache(lambda name: make(name, tmp_path_factory.mktemp(name), head_dim=16))


def error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).mean())


class TestAgainstTransformers:
    """Both backends round every edge to bfloat16, so both are about as far from float32: which of two roundings is
    the luckier differs by a few per cent, a wrong kernel by far more."""

    @pytest.mark.parametrize("name", CHECKPOINTS)
    def test_logits(self, wide: References, name: str) -> None:
        tokens = prompt(LENGTH)
        expected = wide(name).logits(tokens)
        native = NativePaged(load_native(wide(name).path)).logits(tokens, 17)
        oracle = Paged(load(wide(name).path, dtype="bfloat16")).logits(tokens, 17)
        assert error(native, expected) <= 1.2 * error(oracle, expected)
        assert error(native, oracle) <= 1.6 * error(oracle, expected)  # two independent errors: sqrt(2) times one

    @pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW])
    @pytest.mark.parametrize("name", ["mistral-window", "gemma3"])
    def test_windows_are_crossed_exactly(self, wide: References, name: str, length: int) -> None:
        tokens = prompt(length, seed=length)
        expected = wide(name).logits(tokens)
        oracle = Paged(load(wide(name).path, dtype="bfloat16")).logits(tokens)
        for chunk in (1, 5, None):
            native = NativePaged(load_native(wide(name).path)).logits(tokens, chunk)
            assert error(native[-3:], expected[-3:]) <= 1.5 * error(oracle[-3:], expected[-3:]) + 0.01

    def test_logits_are_not_rounded(self, wide: References) -> None:
        logits = NativePaged(load_native(wide("llama").path)).logits(prompt(9))
        assert (logits != torch.tensor(logits).bfloat16().float().numpy()).mean() > 0.9


class TestInt8KV:
    @pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3-variations"])
    def test_logits(self, wide: References, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """As near to a float32 oracle that rounds what it stores to int8 as bfloat16 KV is to the plain oracle."""
        path, tokens = wide(name).path, prompt(LENGTH)
        exact = Paged(load(path)).logits(tokens, 17)
        native = NativePaged(load_native(path)).logits(tokens, 17)
        in_int8 = NativePaged(load_native(path, kv_cache_dtype="int8")).logits(tokens, 17)
        store = KVCache.store

        def store_rounded(self: KVCache, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
            store(self, rows, in_int8_and_back(k, self.keys.shape[3]), in_int8_and_back(v, self.keys.shape[3]))

        monkeypatch.setattr(KVCache, "store", store_rounded)
        oracle = Paged(load(path)).logits(tokens, 17)
        assert error(in_int8, oracle) <= 2 * error(native, exact)
        assert error(in_int8, exact) <= error(native, exact) + 1.5 * error(oracle, exact)

    def test_sizes(self, wide: References) -> None:
        for name in ("llama", "gemma3"):
            plain, small = (load_native(wide(name).path, kv_cache_dtype=dtype) for dtype in ("bfloat16", "int8"))
            assert small.kv_bytes_per_token / plain.kv_bytes_per_token == (16 + 4) / 32  # a code each, and a scale
            assert small.block_bytes / plain.block_bytes == (16 + 4) / 32
            small.allocate_kv_cache(3)
            for part in (part for parts in small.kv_caches() for part in parts):
                assert (part.dtype, part.shape[0], part.shape[2:]) == (np.uint8, 3, (1, 16 * (16 + 4)))
            assert small.description.endswith("KV cache int8")

    def test_a_token_is_stored_once_and_read_as_stored(self, wide: References) -> None:
        """Codes within +-127, one of which is reached in each head; scales are largest / 127 of what was stored."""
        paged = NativePaged(load_native(wide("llama").path, kv_cache_dtype="int8"))
        paged.step({"a": prompt(20)})
        before = [part.copy() for parts in paged.native.kv_caches() for part in parts]
        for part in before:
            for token in range(20):
                block = part[paged._tables["a"][0][token // 16], :, 0]
                scales = block[:, 16 * 16 :].copy().view(np.float32)[:, token % 16]
                assert (scales > 0).all()
        # keys [dim / 4][token][4], values [token / 4][dim][4]
        for part, dims in zip(before[:2], ((1, 3), 2), strict=True):
            quads = part[paged._tables["a"][0][0], :, 0, : 16 * 16].reshape(-1, 4, 16, 4).astype(int) - 128
            assert (np.abs(quads).max(dims) == 127).all()
        paged.step({"a": prompt(3, seed=2)})
        after = [part for parts in paged.native.kv_caches() for part in parts]
        first = paged._tables["a"][0][0]
        assert all((new[first] == old[first]).all() for new, old in zip(after, before, strict=True))


def in_int8_and_back(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Turned by a Hadamard matrix, here by its definition, and turned back."""
    signs = torch.ones(1, 1)
    while len(signs) < head_dim:
        signs = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), signs)
    heads = x.view(len(x), -1, head_dim) @ signs
    scale = heads.abs().amax(-1, keepdim=True) / 127
    return (torch.where(scale > 0, (heads / scale).round() * scale, heads) @ signs / head_dim).view_as(x)


def sampled_by_numpy(logits: np.ndarray, rows: SamplingRows) -> Sampled:
    return Sampler(VOCAB)(logits, rows)


class TestSampling:
    @pytest.fixture
    def paged(self, wide: References) -> NativePaged:
        return NativePaged(load_native(wide("gemma3-variations").path, num_threads=2))

    PARAMS = (
        SamplingParams(temperature=0, logprobs=3),
        SamplingParams(temperature=0.9, seed=5),
        SamplingParams(temperature=1.3, seed=6, top_k=7, logprobs=0),
        SamplingParams(temperature=1.0, seed=7, top_p=0.8, logprobs=5),
        SamplingParams(temperature=1.0, seed=8, min_p=0.05, logprobs=1),
    )

    def compare(self, paged: NativePaged, rows: SamplingRows, tokens: list[int]) -> Sampled:
        batch = paged.batch({"a": tokens})
        found = paged.native.execute(batch, rows)
        expected = sampled_by_numpy(paged.native.logits(batch), rows)
        np.testing.assert_array_equal(found.token_ids, expected.token_ids)
        for own, other in zip(found.logprobs, expected.logprobs, strict=True):
            assert (own is None) == (other is None)
            if own is not None and other is not None:
                assert (own.token_id, own.rank, own.top_ids) == (other.token_id, other.rank, other.top_ids)
                assert [own.logprob, *own.top_logprobs] == pytest.approx(
                    [other.logprob, *other.top_logprobs], abs=1e-12
                )
        return found

    def test_equals_the_numpy_sampler(self, paged: NativePaged) -> None:
        self.compare(paged, make_rows(list(self.PARAMS) * 6, position=list(range(30))), prompt(30))

    def test_targets(self, paged: NativePaged) -> None:
        rows = make_rows(list(self.PARAMS) * 4)
        target = np.where(np.arange(20) % 3 == 0, -1, np.arange(20)).astype(np.int32)
        found = self.compare(paged, replace(rows, target=target), prompt(20))
        assert (found.token_ids[target >= 0] == target[target >= 0]).all()

    def test_rows_that_python_changes_first(self, paged: NativePaged) -> None:
        tokens = prompt(12)
        asks = [
            SamplingParams(temperature=0, logit_bias={4: 100.0}, logprobs=2),
            SamplingParams(temperature=1.0, seed=3, repetition_penalty=1.8, presence_penalty=1.0, logprobs=0),
            SamplingParams(temperature=0, allowed_token_ids=[9, 11]),
        ]
        everyone = [asks[i // 2 % 3] if i % 2 else self.PARAMS[1] for i in range(12)]
        history = History(np.array(tokens, np.int32), 3)
        shaping = [Shaping(features, history) if (features := features_of(own, Bans())) else None for own in everyone]
        found = self.compare(paged, replace(make_rows(everyone), shaping=shaping), tokens)
        assert found.token_ids[1] == 4
        assert found.token_ids[5] in (9, 11)

    def test_nothing_left(self, paged: NativePaged) -> None:
        ban = SamplingParams(temperature=0, allowed_token_ids=[3], min_tokens=2, logprobs=1)
        shaping = Shaping(features_of(ban, Bans(ends=(3,))), History(np.array(prompt(4), np.int32), 4))
        rows = replace(make_rows([ban] * 4), shaping=[None, shaping, None, None])
        found = self.compare(paged, rows, prompt(4))
        assert found.token_ids[1] == NOTHING_LEFT
        assert found.logprobs[1] is None

    def test_ids_past_the_tokenisers_are_never_sampled(self, wide: References) -> None:
        traced = graph(wide("llama").path, "bfloat16")
        backend = CpuBackend(
            traced, open_checkpoint(wide("llama").path).tensors, kv_cache_dtype="bfloat16", block_size=16,
            num_threads=1, vocab_size=5,
        )  # fmt: skip
        paged = NativePaged(backend)
        rows = make_rows([SamplingParams(temperature=2.0, seed=i) for i in range(40)])
        assert backend.execute(paged.batch({"a": prompt(40)}), rows).token_ids.max() < 5

    def test_logits_that_are_not_finite(self, wide: References) -> None:
        """A NaN that belongs to the sequence is told; its neighbour goes on."""
        paged = NativePaged(load_native(wide("llama").path))
        paged.step({"a": prompt(5), "b": prompt(5, seed=1)})
        for keys, values in paged.native.kv_caches():
            block = paged._tables["a"][0][0]
            keys[block], values[block] = 0x7FC0, 0x7FC0
        batch = paged.batch({"a": [7], "b": [7]})
        found = paged.native.execute(batch, make_rows([SamplingParams(temperature=0, logprobs=1)] * 2))
        assert found.token_ids[0] == NOT_FINITE
        assert found.token_ids[1] >= 0
        assert found.logprobs[0] is None

    def test_a_step_without_logit_rows_still_fills_the_cache(self, wide: References) -> None:
        tokens = prompt(20)
        whole = NativePaged(load_native(wide("llama").path)).logits(tokens)
        paged = NativePaged(load_native(wide("llama").path))
        sampled = paged.native.execute(paged.batch({"a": tokens[:15]}, logit_rows=[]), make_rows([]))
        assert len(sampled.token_ids) == len(sampled.logprobs) == 0
        np.testing.assert_array_equal(paged.step({"a": tokens[15:]})["a"], whole[15:])


class TestMemory:
    def test_sizes(self, wide: References) -> None:
        backend = load_native(wide("llama-tied").path)
        assert backend.kv_bytes_per_token == 3 * 2 * 2 * 16 * 2  # layers, K and V, heads, width, bytes
        tied = backend.weight_bytes
        assert load_native(wide("llama").path).weight_bytes == tied + VOCAB * 64 * 2  # 48 columns padded to 64

    def test_pages_are_committed_when_they_are_written(self, wide: References) -> None:
        backend = load_native(wide("llama").path)
        before = resident_bytes()
        backend.allocate_kv_cache((4 << 30) // backend.block_bytes)
        assert resident_bytes() - before < 1 << 20

    def test_too_much_is_a_clear_error(self, wide: References) -> None:
        backend = load_native(wide("llama").path)
        for num_blocks in (1 << 40, (1 << 63) - 1):  # beyond the address space; beyond 64 bits of bytes
            with pytest.raises(ConfigError, match=rf"a KV cache of {num_blocks} blocks .* does not fit into memory"):
                backend.allocate_kv_cache(num_blocks)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class TestThreads:
    def test_the_callers_float_mode_comes_back(self, wide: References) -> None:
        """Kernels flush subnormals; numpy must not."""
        NativePaged(load_native(wide("llama").path)).logits(prompt(3))
        assert np.float32(1e-40) * np.float32(0.5) != 0

    def test_a_child_of_fork_is_told(self, wide: References) -> None:
        paged = NativePaged(load_native(wide("llama").path, num_threads=2))
        batch = paged.batch({"a": prompt(3)})
        child = os.fork()
        if child == 0:
            try:
                paged.native.logits(batch)
            except RuntimeError as told:
                os._exit(7 if "fork" in str(told) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert np.isfinite(paged.native.logits(batch)).all()

    def test_description(self, wide: References) -> None:
        path = wide("llama").path
        assert load_native(path, num_threads=2).description == f"cpu ({isas()[-1]}, 2 threads: as asked), bfloat16"
        assert load_native(path, isa="portable").description == "cpu (portable, 1 thread: as asked), bfloat16"

    def test_description_and_bytes_of_weights_in_few_bits(self, tmp_path: Path) -> None:
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 1}
        path = make("llama", tmp_path, head_dim=16, **sizes).path

        def held(**options: object) -> tuple[str, int]:
            backend = load_native(path, **options)
            return backend.description.partition("asked), ")[2], backend.weight_bytes

        plain, plain_bytes = held()
        kept, kept_bytes = held(stored=["Q4_1"])
        made, made_bytes = held(quantization="int8", activation_dtype="int16")
        assert plain == held(stored=["Q4_1"], quantization="none")[0] == "bfloat16"
        # o is 64 wide, less than a super-block, and stays as it is.
        assert kept == "bfloat16; matrices 4-bit (Q4_1) 8, 16-bit (bfloat16) 1; int8 activations"
        assert made == "bfloat16; matrices 8-bit (int8) 9; int16 activations"
        assert kept_bytes < made_bytes < plain_bytes
        panels = (
            -(-VOCAB // 16) * 2 + (64 + 32 + 32 + 512 + 512) // 16
        )  # embedding and head; q, k, v, gate, up: 256 deep
        floats = (3 * 256) * 4  # norms
        down = 256 // 16 * (512 // 32) * 320
        assert kept_bytes == panels * (256 // 32) * 320 + down + 2 * 64 * 256 + floats

    def test_environment_names_the_kernels(self, wide: References, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OCTAVO_ISA", "portable")
        assert "portable" in load_native(wide("llama").path).description
        monkeypatch.setenv("OCTAVO_ISA", "sse9")
        with pytest.raises(ConfigError, match=r"OCTAVO_ISA='sse9': this machine has portable"):
            load_native(wide("llama").path)

    def test_threads_default_to_the_usable_cores(self, wide: References, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backend_module, "usable_cores", lambda: Cores(3, "a quota of 2.5 of 8 cores"))
        assert "3 threads: a quota of 2.5 of 8 cores" in load_native(wide("llama").path, num_threads=None).description


class TestRefusals:
    def test_width_of_heads(self, reference: References) -> None:
        with pytest.raises(ConfigError, match=r"heads of this model are 12 wide.* use backend='torch'"):
            load_native(reference("llama").path)

    @pytest.mark.parametrize("size", [1, 8, 24])
    def test_block_size(self, wide: References, size: int) -> None:
        with pytest.raises(ConfigError, match=rf"block_size={size}: .* multiple of 16"):
            load_native(wide("llama").path, block_size=size)

    def test_float32(self, wide: References) -> None:
        path = wide("llama").path
        tensors = open_checkpoint(path).tensors
        common = {"block_size": 16, "num_threads": 1, "vocab_size": VOCAB}
        with pytest.raises(ConfigError, match="use backend='torch'"):
            CpuBackend(graph(path, "float32"), tensors, kv_cache_dtype="bfloat16", **common)
        with pytest.raises(ConfigError, match=r"kv_cache_dtype='float32': .* backend='torch'"):
            CpuBackend(graph(path, "bfloat16"), tensors, kv_cache_dtype="float32", **common)

    def test_too_many_threads(self, wide: References) -> None:
        with pytest.raises(ConfigError, match=r"num_threads=1000: .* at most 256"):
            load_native(wide("llama").path, num_threads=1000)

    def test_a_missing_tensor(self, wide: References) -> None:
        path = wide("llama").path
        tensors = dict(open_checkpoint(path).tensors)
        del tensors["layers.1.attn.k.weight"]
        with pytest.raises(ModelError, match=r"layers\.1\.attn\.k\.weight"):
            CpuBackend(
                graph(path, "bfloat16"), tensors, kv_cache_dtype="bfloat16", block_size=16, num_threads=1, vocab_size=9
            )

    @pytest.mark.parametrize(("field", "value", "message"), [
        ("token_ids", [0, VOCAB], "token id outside the vocabulary"),
        ("token_ids", [-1, 0], "token id outside the vocabulary"),
        ("slot_mapping", [[0, 64 * 16]], "slot outside the KV cache, in group 0"),
        ("slot_mapping", [[0, 1], [0, 1]], "differ in length"),
        ("block_tables", [[[64]]], "block outside the KV cache, in group 0"),
        ("positions", [15, 16], "block table is shorter"),
        ("positions", [0, 2], "positions of a sequence have gaps"),
        ("positions", [-1, 0], "negative position"),
        ("query_starts", [0, 1], "query_starts do not span the tokens"),
        ("logit_rows", [2], "logit row outside the step"),
        ("slot_mapping", [[0]], "differ in length"),
    ])  # fmt: skip
    def test_a_step_never_leaves_its_memory(self, wide: References, field: str, value: list[int], message: str) -> None:
        paged = NativePaged(load_native(wide("llama").path))
        batch: Batch = paged.batch({"a": [5, 6]})
        array = np.array(value, getattr(batch, field).dtype)
        with pytest.raises(ValueError, match=message):
            paged.native.logits(replace(batch, **{field: array}))
