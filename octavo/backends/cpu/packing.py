"""Weights on their way from the file into the program: expanded a few rows at a time, so that memory peaks stay low."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from octavo.backends.cpu.steps import PANEL
from octavo.weights import WeightTensor
from octavo.weights.quants import dequantize

Float32 = NDArray[np.float32]

PART_BYTES = 8 << 20  # of float32 rows expanded at a time


def rows_in_parts(tensor: WeightTensor) -> Iterator[tuple[int, Float32]]:
    """The rows of a matrix as float32, whole panels of them at a time, each time with the number of the first."""
    raw = tensor.raw
    n, k = tensor.shape
    size = max(1, PART_BYTES // (4 * k * PANEL)) * PANEL
    for first in range(0, n, size):
        rows = dequantize(raw[first : first + size], tensor.dtype).reshape(-1, k)
        yield first, np.ascontiguousarray(rows)


def round_to_bfloat16(x: Float32) -> Float32:
    """Rounded to the nearest bfloat16, ties to even, and still float32; x must be finite."""
    bits = x.view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) & np.uint32(0xFFFF0000)).view(
        np.float32
    )
