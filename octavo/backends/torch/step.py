"""One step's batch on the device, with the tables that all layers share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.backends.base import Batch
from octavo.collectives import Collectives

GATHER_BYTES = 32 << 20  # of the keys of one piece; its values take as much
SCORE_BYTES = 64 << 20  # of the float32 scores of one piece
QUERY_ROWS = 256  # of a chunk at most: a piece reads keys up to its last row, so smaller pieces skip more


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of one layer: [num_blocks, block_size, num_kv_heads, head_dim] each, views of the pool.

    All layers of a group have their part of a block, so that blocks are moved as a whole::

        pool [num_blocks, elements]    block of group 0 | keys of layer 5 | values of layer 5 | keys of layer 11 | ...
                                       block of group 1 | keys of layer 0 | values of layer 0 | keys of layer 1 | ...

    Memory that was never written is never read, so it needs no clearing, and on a CPU no pages.
    """

    keys: torch.Tensor
    values: torch.Tensor
    group: int

    @property
    def rows_per_block(self) -> int:
        """Tokens that would fit between the beginnings of two blocks, were there nothing but this layer's keys."""
        return self.keys.stride(0) // self.keys.stride(1)

    def store(self, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v [T, num_kv_heads * head_dim], rounded to the cache's dtype, to rows [T]: `Step.rows`."""
        for cache, new in ((self.keys, k), (self.values, v)):
            rows_of(cache, new.shape[1]).index_copy_(0, rows, new.to(cache.dtype))


def rows_of(cache: torch.Tensor, width: int) -> torch.Tensor:
    """The pool from a layer's keys or values on, cut into rows of `width`: what lies between its blocks too."""
    reach = (cache.shape[0] - 1) * cache.stride(0) + cache[0].numel()
    return cache.as_strided((reach // width, width), (width, 1))


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What the cost of attention depends on, and what its tables look like."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    group: int  # whose block tables
    rows_per_block: int  # KVCache.rows_per_block


@dataclass(frozen=True, slots=True)
class Piece:
    """n sequences with m query rows each, and the L cache slots that they attend to.

    Either one sequence and some rows of its chunk, or one row each of several sequences. Where a sequence has fewer
    than L tokens to see, the rest repeat its last one and are masked: a slot that holds no token of the sequence is
    never read, so whatever it holds (a NaN, say) cannot reach a result.
    """

    rows: slice | torch.Tensor  # which rows of T: n * m of them, sequence by sequence
    num_sequences: int
    slots: torch.Tensor  # int64 [n * num_kv_heads * L], rows of the cache as `rows_of(cache, head_dim)` cuts it
    hidden: torch.Tensor | None  # bool [n, 1, 1, m, L]: True is not seen; None: all are


class Step:
    """A batch as tensors, and tables made once and used by every layer: cos and sin, and attention pieces."""

    def __init__(
        self,
        batch: Batch,
        caches: Mapping[int, KVCache],
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
        collectives: Collectives | None = None,
    ) -> None:
        self.dtype = dtype  # of activations
        self.collectives = collectives
        self.caches = caches  # by layer
        self._batch = batch
        self._block_size = block_size
        self._device = device
        self.token_ids = self._tensor(batch.token_ids)
        self.positions = self._tensor(batch.positions)
        self.logit_rows = self._tensor(batch.logit_rows)
        self._rows: dict[tuple[int, int], torch.Tensor] = {}
        self._rotations: dict[tuple[tuple[float, ...], float], tuple[torch.Tensor, torch.Tensor]] = {}
        self._pieces: dict[AttentionShape, list[Piece]] = {}

    def rows(self, cache: KVCache) -> torch.Tensor:
        """Where the step stores keys and values: int64 [T], rows of the cache, all heads in one."""
        key = (cache.group, cache.rows_per_block)
        if key not in self._rows:
            block, slot = np.divmod(self._batch.slot_mapping[cache.group], self._block_size)
            self._rows[key] = self._tensor(block * cache.rows_per_block + slot)
        return self._rows[key]

    def rotation(self, inv_freq: tuple[float, ...], attention_factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of every token's angles: float32 [T, 1, len(inv_freq)]."""
        key = (inv_freq, attention_factor)
        if key not in self._rotations:
            frequencies = torch.tensor(inv_freq, dtype=torch.float32, device=self._device)
            angles = (self.positions.float()[:, None] * frequencies)[:, None, :]
            self._rotations[key] = (angles.cos() * attention_factor, angles.sin() * attention_factor)
        return self._rotations[key]

    def pieces(self, shape: AttentionShape) -> list[Piece]:
        """The step's attention, cut so that what one piece gathers and scores stays bounded."""
        if shape not in self._pieces:
            lengths = np.diff(self._batch.query_starts)
            chunks = [piece for r in np.flatnonzero(lengths > 1) for piece in self._chunk(int(r), shape)]
            self._pieces[shape] = self._single_rows(np.flatnonzero(lengths == 1), shape) + chunks
        return self._pieces[shape]

    def _single_rows(self, sequences: NDArray[np.int64], shape: AttentionShape) -> list[Piece]:
        """Sequences with one query row, those of like length together: padding at most doubles what is gathered."""
        rows = self._batch.query_starts[sequences]
        last = self._batch.positions[rows].astype(np.int64)
        first = np.zeros_like(last) if shape.window is None else np.maximum(last - shape.window + 1, 0)
        order = np.argsort(first - last, kind="stable")  # longest first, so that a piece is as wide as its first
        width = last - first + 1
        pieces = []
        while len(order):
            longest = int(width[order[0]])
            like = int(np.count_nonzero(2 * width[order] >= longest))
            fit = GATHER_BYTES // (longest * shape.num_kv_heads * shape.head_dim * 4)
            taken, order = np.split(order, [max(1, min(like, fit))])
            seen = first[taken, None] + np.arange(longest)
            hidden = seen > last[taken, None]
            slots = self._slots(sequences[taken, None], np.minimum(seen, last[taken, None]), shape)
            pieces.append(self._piece(self._tensor(rows[taken].astype(np.int64)), slots, hidden[:, None, :], shape))
        return pieces

    def _chunk(self, r: int, shape: AttentionShape) -> list[Piece]:
        """The rows of one sequence, in slices; each gathers exactly the positions that some row of it sees."""
        start, stop = (int(row) for row in self._batch.query_starts[r : r + 2])
        context = int(self._batch.context_lens[r])
        size = min(QUERY_ROWS, max(1, SCORE_BYTES // (context * shape.num_heads * 4)))
        pieces = []
        for a in range(start, stop, size):
            b = min(a + size, stop)
            positions = self._batch.positions[a:b].astype(np.int64)[:, None]
            first = 0 if shape.window is None else max(int(positions[0, 0]) - shape.window + 1, 0)
            seen = np.arange(first, int(positions[-1, 0]) + 1)
            hidden = seen > positions
            if shape.window is not None:
                hidden |= seen <= positions - shape.window
            slots = self._slots(np.array([[r]]), seen[None], shape)
            pieces.append(self._piece(slice(a, b), slots, hidden[None], shape))
        return pieces

    def _slots(
        self, sequences: NDArray[np.int64], positions: NDArray[np.int64], shape: AttentionShape
    ) -> NDArray[np.int64]:
        """Rows, of all heads, of the cache that hold positions [n, L] of the sequences [n, 1]."""
        table = self._batch.block_tables[shape.group]
        blocks: NDArray[np.int64] = table[sequences, positions // self._block_size].astype(np.int64)
        return blocks * shape.rows_per_block + positions % self._block_size

    def _piece(
        self, rows: slice | torch.Tensor, slots: NDArray[np.int64], hidden: NDArray[np.bool_], shape: AttentionShape
    ) -> Piece:
        """`slots` [n, L] and `hidden` [n, m, L], spread over the KV heads."""
        by_head = slots[:, None, :] * shape.num_kv_heads + np.arange(shape.num_kv_heads)[:, None]
        mask = self._tensor(hidden[:, None, None]) if hidden.any() else None
        return Piece(rows, len(slots), self._tensor(by_head.reshape(-1)), mask)

    def _tensor(self, array: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)
