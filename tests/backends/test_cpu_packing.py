"""Loading on several threads: the same bits on any number of them, progress, and errors that come through."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.backends.cpu import CpuBackend, packing
from octavo.backends.cpu.native import stored_formats
from octavo.errors import ModelError
from octavo.weights import WeightTensor, open_checkpoint, quants
from tests.backends.checkpoints import make, prompt
from tests.backends.native import NativePaged, load_native, stored_at_random
from tests.backends.paged import graph


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("llama"), head_dim=16).path


def test_parts_and_threads_make_no_difference(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = NativePaged(load_native(path)).logits(prompt(20))
    monkeypatch.setattr(packing, "PART_BYTES", 1)  # a panel at a time
    for num_threads in (1, 2, 5):
        assert (
            NativePaged(load_native(path, num_threads=num_threads)).logits(prompt(20)).tobytes() == expected.tobytes()
        )


@pytest.mark.parametrize("dtype", stored_formats())
def test_stored_formats_pack_to_the_same_bits(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the program reads them, and expanded by numpy."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 1}
    wide = make("llama", tmp_path / "wide", head_dim=16, **sizes).path
    tensors = stored_at_random(open_checkpoint(wide).tensors, [dtype])
    packed = []
    for known in (stored_formats(), []):
        monkeypatch.setattr(packing, "stored_formats", lambda known=known: known)
        packed.append(NativePaged(load(tensors, wide, lambda share: None)).logits(prompt(20)))
    assert np.isfinite(packed[0]).all()
    assert packed[0].tobytes() == packed[1].tobytes()


def load(tensors: Mapping[str, WeightTensor], path: Path, on_load: Callable[[float], None]) -> CpuBackend:
    return CpuBackend(
        graph(path, "bfloat16"),
        tensors,
        quantization="none",
        kv_cache_dtype="bfloat16",
        block_size=16,
        num_threads=2,
        vocab_size=96,
        on_load=on_load,
    )


def test_progress_rises_to_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "PART_BYTES", 1)
    shares: list[float] = []
    load(open_checkpoint(path).tensors, path, shares.append)
    assert len(shares) > 50
    assert all(np.diff(shares) > 0)
    assert shares[-1] == 1.0


def test_an_error_in_a_thread_is_the_callers(path: Path) -> None:
    tensors = dict(open_checkpoint(path).tensors)
    down = tensors["layers.1.mlp.down.weight"]
    tensors[down.name] = replace(down, dtype="F8_E4M3", stored=down.stored[: down.shape[0] * down.shape[1]])
    with pytest.raises(ModelError, match="F8_E4M3 are not supported"):
        load(tensors, path, lambda share: None)


def test_an_interrupt_ends_the_load(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has not begun is not packed any more."""
    monkeypatch.setattr(packing, "PART_BYTES", 1)
    begun = []
    monkeypatch.setattr(packing, "stored_formats", list)  # none: numpy expands them all

    def dequantize(raw: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
        begun.append(dtype)
        return quants.dequantize(raw, dtype)

    def interrupt(share: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(packing, "dequantize", dequantize)
    with pytest.raises(KeyboardInterrupt):
        load(open_checkpoint(path).tensors, path, interrupt)
    assert 1 <= len(begun) <= 8
