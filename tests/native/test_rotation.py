"""cos and sin of rotary embeddings: correctly rounded, from our own arithmetic."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest

from octavo._native import rotation


def angles(position: int, frequencies: np.ndarray) -> np.ndarray:
    return np.float32(position) * frequencies  # rounded to float32, as the graph's op says


@pytest.mark.parametrize("position", [0, 1, 2, 3, 100, 511, 8191, 131_071, 1_000_000])
def test_correctly_rounded(position: int) -> None:
    frequencies = np.concatenate(
        [np.float32(10_000) ** -np.linspace(0, 1, 60, dtype=np.float32), [0.7853982, 1.5707964]]
    )
    frequencies = frequencies.astype(np.float32)
    cos, sin = rotation(position, frequencies, 1.0)
    with mpmath.workdps(60):
        for i, angle in enumerate(angles(position, frequencies)):
            assert cos[i] == np.float32(float(mpmath.cos(float(angle))))
            assert sin[i] == np.float32(float(mpmath.sin(float(angle))))


def test_many_angles_against_float64() -> None:
    """numpy's float64 is off by less than 2^-52; only a tie of float32 could then round another way."""
    rng = np.random.default_rng(0)
    frequencies = rng.uniform(0, 1, 5000).astype(np.float32)
    for position in rng.integers(0, 1 << 20, 40).tolist():
        cos, sin = rotation(position, frequencies, 1.0)
        exact = angles(position, frequencies).astype(np.float64)
        for found, wanted in ((cos, np.cos(exact)), (sin, np.sin(exact))):
            off = np.flatnonzero(found != wanted.astype(np.float32))
            assert (np.abs(found[off] - wanted[off]) <= np.spacing(np.abs(found[off])) * (0.5 + 2**-20)).all()
            assert len(off) <= 1


def test_the_factor_multiplies_what_is_rounded() -> None:
    frequencies = np.array([1.0, 0.3], np.float32)
    cos, sin = rotation(77, frequencies, 1.0)
    scaled_cos, scaled_sin = rotation(77, frequencies, 1.2689)
    np.testing.assert_array_equal(scaled_cos, cos * np.float32(1.2689))
    np.testing.assert_array_equal(scaled_sin, sin * np.float32(1.2689))
