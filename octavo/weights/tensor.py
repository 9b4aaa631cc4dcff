"""One named weight, still in the bytes of its file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelError
from octavo.weights.quants import TYPES, dequantize


@dataclass(frozen=True, slots=True, eq=False)
class WeightTensor:
    """A weight that is read from its mapped file only when `raw` or `to_float32` is asked for."""

    name: str
    shape: tuple[int, ...]  # row-major: [out_features, in_features] for a matrix
    dtype: str  # a row of `quants.TYPES`, such as "Q4_1"
    stored: NDArray[np.uint8]  # as in the file: [nbytes], or [rows, bytes] of some columns of it
    interleaved_heads: int | None = None  # set by `deinterleaved`
    place: tuple[int, int, int] | None = None  # set by `part`: axis, begin, end

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes

    @property
    def raw(self) -> NDArray[np.uint8]:
        """The rows at their stored width: uint8 [*shape[:-1], bytes per row].

        A read-only view of the file, except where rows are reordered (`deinterleaved`): then a new array every time.
        Of a `part` with some of the columns, its rows are not side by side.
        """
        kind = TYPES[self.dtype]
        row_nbytes = self.shape[-1] // kind.block * kind.nbytes if self.shape else kind.nbytes
        stored = self.stored
        if self.interleaved_heads is not None:
            stored = np.ascontiguousarray(
                stored.reshape(self.interleaved_heads, self.shape[0] // self.interleaved_heads // 2, 2, -1).swapaxes(
                    1, 2
                )
            )
        return stored.reshape(*self.shape[:-1], row_nbytes)

    def to_float32(self) -> NDArray[np.float32]:
        """The numbers: float32 of `shape`. A read-only view of the file where it holds float32 itself.

        Raises:
            ModelError: octavo cannot read this `dtype`.
        """
        return dequantize(self.raw, self.dtype).reshape(self.shape)

    def part(self, axis: int, begin: int, end: int) -> WeightTensor:
        """Rows (axis 0) or columns (the last axis) [begin, end) of this weight; nothing is read yet.

        Raises:
            ModelError: the part begins or ends within a block of the file, or within a head of reordered rows.
        """
        kind = TYPES[self.dtype]
        shape = list(self.shape)
        shape[axis] = end - begin
        if axis == 0 and (len(shape) > 1 or kind.block == 1):
            rows = self.stored.reshape(self.shape[0], -1)[begin:end]
            heads = self._heads_in(begin, end)
            return replace(self, shape=tuple(shape), stored=rows, interleaved_heads=heads, place=(axis, begin, end))
        if begin % kind.block or end % kind.block:
            raise ModelError(
                f"tensor {self.name}: columns {begin} to {end} do not begin and end with {self.dtype}'s blocks of "
                f"{kind.block}"
            )
        first, last = (place // kind.block * kind.nbytes for place in (begin, end))
        columns = self.stored.reshape(-1, self.shape[-1] // kind.block * kind.nbytes)[:, first:last]
        return replace(self, shape=tuple(shape), stored=columns, place=(axis, begin, end))

    def _heads_in(self, begin: int, end: int) -> int | None:
        """How many heads of reordered rows are in a part."""
        if self.interleaved_heads is None:
            return None
        head = self.shape[0] // self.interleaved_heads
        if begin % head or end % head:
            raise ModelError(f"tensor {self.name}: rows {begin} to {end} divide a head of {head} rows")
        return (end - begin) // head

    def deinterleaved(self, heads: int) -> WeightTensor:
        """The same weight with the rows of each head reordered from interleaved to half-split RoPE.

        llama.cpp stores the q and k projections of the architecture "llama" so that RoPE turns rows (2i, 2i + 1) of a
        head; octavo, like Hugging Face, turns rows (i, i + d/2):

            stored    0 h 1 h+1 2 h+2 ...      (h = d / 2)
            here      0 1 2 ...  h h+1 h+2 ...

        Whole rows move, so quantised blocks stay as they are. Works on [rows, columns] weights and [rows] biases.

        Raises:
            ModelError: the rows do not divide into `heads` heads of even width.
        """
        if self.shape[0] % (2 * heads):
            raise ModelError(
                f"tensor {self.name}: {self.shape[0]} rows do not divide into {heads} heads of an even width"
            )
        if len(self.shape) == 1 and TYPES[self.dtype].block != 1:
            raise ModelError(f"tensor {self.name}: the elements of a {self.dtype} vector cannot be reordered")
        return replace(self, interleaved_heads=heads)


def expected_nbytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a tensor of this shape and type (exact, without overflow); rows must be whole numbers of blocks."""
    kind = TYPES[dtype]
    return prod(shape) // kind.block * kind.nbytes
