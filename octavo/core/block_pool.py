"""The pool of KV blocks: which are free, and how many block tables hold each of the others."""

from __future__ import annotations

from array import array


class BlockPool:
    """Block ids 0 to num_blocks - 1. Every operation costs O(blocks touched), whatever the size of the pool.

    A block is free or has a reference count of at least one, so `num_free + num_used == num_blocks` at any time::

        0 ... fresh - 1    handed out before; the free ones lie on the stack `_returned`
        fresh ... end      never handed out yet: free, and their memory not even committed

    Returned blocks are handed out again before fresh ones, the latest first: their memory is warm.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks}: a pool needs at least one block")
        self.num_blocks = num_blocks
        self._ref_counts = array("i", bytes(4 * num_blocks))
        self._returned: list[int] = []
        self._fresh = 0

    @property
    def num_free(self) -> int:
        return self.num_blocks - self._fresh + len(self._returned)

    @property
    def num_used(self) -> int:
        return self._fresh - len(self._returned)

    @property
    def peak_used(self) -> int:
        """The most blocks that were ever in use at once: a fresh block is taken only when none was returned."""
        return self._fresh

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def allocate(self) -> int:
        """A free block, with one reference.

        Raises:
            ValueError: no block is free; callers look at `num_free` first.
        """
        if self._returned:
            block = self._returned.pop()
        elif self._fresh < self.num_blocks:
            block = self._fresh
            self._fresh += 1
        else:
            raise ValueError(f"all {self.num_blocks} blocks are in use")
        self._ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more block table holds this block."""
        if self._ref_counts[block] < 1:
            raise ValueError(f"block {block} is free and cannot be shared")
        self._ref_counts[block] += 1

    def release(self, block: int) -> None:
        """One block table less holds this block; the last one frees it."""
        count = self._ref_counts[block]
        if count < 1:
            raise ValueError(f"block {block} is free already")
        self._ref_counts[block] = count - 1
        if count == 1:
            self._returned.append(block)
