"""Stored formats as the native runtime reads them: the bits of weights/quants.py, which the gguf package checks."""

from __future__ import annotations

import numpy as np
import pytest

from octavo._native import kernels, stored_formats
from octavo.weights.quants import TYPES, dequantize

SCALES = ("d", "m", "dmin")
# Largest and smallest, subnormal, zeros of both signs, infinite
HALVES = np.array([0x7BFF, 0x0400, 0x8400, 0x03FF, 0x0001, 0x8001, 0x0000, 0x8000, 0x7C00, 0xFC00], np.uint16)


def blocks(name: str, count: int, seed: int) -> np.ndarray:
    """Random bytes, but for the scales: half of them ordinary, half special. [count, bytes of a block]"""
    rng = np.random.default_rng(seed)
    kind = TYPES[name]
    raw = rng.integers(0, 256, (count, kind.nbytes), np.uint8)
    fields = [field for field in SCALES if field in (kind.record.names or ())]
    records = raw.view(kind.record).reshape(-1)
    for field in fields:
        ordinary = rng.normal(0, 0.1, count).astype("<f2")
        records[field] = np.where(rng.random(count) < 0.5, ordinary, rng.choice(HALVES.view("<f2"), count))
    return raw


def bits(x: np.ndarray) -> np.ndarray:
    """Any NaN is as good as another: all become the same bfloat16."""
    return np.where(np.isnan(x), np.uint32(0x7FC00000), x.view(np.uint32))


@pytest.mark.parametrize("name", stored_formats())
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_same_bits_as_numpy(name: str) -> None:
    count = 65536 if TYPES[name].block == 1 else 500
    raw = blocks(name, count, seed=0)
    if TYPES[name].block == 1:  # all halves, and all bfloat16
        raw = np.arange(65536, dtype="<u2").view(np.uint8).reshape(-1, 2)
    found = np.full((count, TYPES[name].block), np.nan, np.float32)
    kernels.decode(name, raw, found)
    expected = dequantize(raw, name).reshape(found.shape)
    assert np.isfinite(expected).sum() > expected.size / 3
    np.testing.assert_array_equal(bits(found), bits(expected))


def test_formats_are_known_by_the_names_and_sizes_of_quants() -> None:
    assert set(stored_formats()) >= {"Q4_1", "Q8_0", "Q4_K", "Q6_K"}
    for name in stored_formats():
        kind = TYPES[name]
        kernels.decode(name, np.zeros((2, kind.nbytes), np.uint8), np.empty((2, kind.block), np.float32))
    with pytest.raises(ValueError, match="no stored format Q8_K"):
        kernels.decode("Q8_K", np.zeros((1, 292), np.uint8), np.empty((1, 256), np.float32))
