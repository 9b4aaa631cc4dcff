"""Counter-based random numbers: a draw depends on its key alone, never on how many were drawn before.

The key is (seed, choice, position). Each part is folded in with the finaliser of SplitMix64 (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", OOPSLA 2014; constants of variant 13 by Stafford), all in wrapping
64-bit integers, so that every backend and every machine draws the same bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

UInt64 = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd


def uniform(seed: UInt64, choice: UInt64, position: UInt64) -> NDArray[np.float64]:
    """One draw in [0, 1) a key, on the grid of 2^-53. All three arrays have one shape."""
    bits = _mix(seed + _GOLDEN)
    bits = _mix(bits + (choice + np.uint64(1)) * _GOLDEN)
    bits = _mix(bits + (position + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def request_seed(engine_seed: int, arrival: int) -> int:
    """The seed of the `arrival`-th request that brought none."""
    key = np.array([engine_seed % 2**64, arrival % 2**64], np.uint64)
    return int(_mix(_mix(key[:1] + _GOLDEN) + (key[1:] + np.uint64(1)) * _GOLDEN)[0])


def _mix(x: UInt64) -> UInt64:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
