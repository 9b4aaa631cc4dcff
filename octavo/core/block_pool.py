"""The pool of KV blocks: which are free, which are cached, and how many block tables hold each of the others."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal

BlockState = Literal["free", "cached", "used"]


class BlockPool:
    """Block ids 0 to num_blocks - 1. Every operation costs O(blocks touched), whatever the size of the pool.

    Each block is in one of three states, so `num_free + num_cached + num_used == num_blocks` at any time::

                  allocate                    release, without a key
        free    ------------>  used  (held by ref_count >= 1 tables)  ------------>  free
                                |  ^
          release, with a key   v  | share: found again by its key
                               cached  (held by none, oldest first)  ------------>  used, without its key
                                                                       allocate

    A key stands for what a full block holds. A cached block keeps its key until the block is needed for something else:
    free blocks are handed out first, those returned last before all others since their memory is warm, then those
    never handed out before, whose memory is not even committed, and only then the cached block that was released first.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int, bytes], None] = lambda block, key: None) -> None:
        """`on_evict`: called with a cached block and its key just before it is handed out for something else, unless it
        was released as not worth keeping."""
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks}: a pool needs at least one block")
        self.num_blocks = num_blocks
        self.peak_used = 0  # the most blocks that were ever in use at once
        self.num_shared = 0  # of the used ones, held by several tables
        self._ref_counts = array("i", bytes(4 * num_blocks))
        self._returned: list[int] = []  # free ones that were handed out before
        self._fresh = 0  # from here on blocks were never handed out
        self._on_evict = on_evict
        self._cached: OrderedDict[int, bool] = OrderedDict()  # and whether it is worth keeping elsewhere
        self._by_key: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return self.num_blocks - self._fresh + len(self._returned)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self._fresh - len(self._returned) - len(self._cached)

    @property
    def num_available(self) -> int:
        """How many blocks `allocate` can hand out."""
        return self.num_blocks - self._fresh + len(self._returned) + len(self._cached)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def state(self, block: int) -> BlockState:
        if self._ref_counts[block]:
            return "used"
        return "cached" if block in self._cached else "free"

    def allocate(self) -> int:
        """A block with one reference and no key.

        Raises:
            ValueError: all are in use; callers look at `num_available` first.
        """
        if self._returned:
            block = self._returned.pop()
        elif self._fresh < self.num_blocks:
            block = self._fresh
            self._fresh += 1
        elif self._cached:
            block, worth_keeping = self._cached.popitem(last=False)
            if worth_keeping:
                self._on_evict(block, self._key_of[block])
            self.withdraw(block)
        else:
            raise ValueError(f"all {self.num_blocks} blocks are in use")
        self._ref_counts[block] = 1
        self.peak_used = max(self.peak_used, self.num_used)
        return block

    def share(self, block: int) -> None:
        """One more block table holds this block, which is in use or cached."""
        if self._ref_counts[block] == 0:
            if block not in self._cached:
                raise ValueError(f"block {block} is free and cannot be shared")
            del self._cached[block]
        self._ref_counts[block] += 1
        self.num_shared += self._ref_counts[block] == 2
        self.peak_used = max(self.peak_used, self.num_used)

    def release(self, block: int, *, worth_keeping: bool = False) -> None:
        """One block table less holds this block; the last one leaves it cached if it has a key, else free."""
        count = self._ref_counts[block]
        if count < 1:
            raise ValueError(f"block {block} is not in use")
        self._ref_counts[block] = count - 1
        self.num_shared -= count == 2
        if count == 1:
            if block in self._key_of:
                self._cached[block] = worth_keeping
            else:
                self._returned.append(block)

    def publish(self, block: int, key: bytes) -> None:
        """From now on a block in use is found by `key`; if another one is already, that one stays."""
        if self._by_key.setdefault(key, block) == block:
            self._key_of[block] = key

    def find(self, key: bytes) -> int | None:
        """The block, used or cached, that holds what `key` stands for."""
        return self._by_key.get(key)

    def withdraw(self, block: int) -> bytes | None:
        """A block is no longer found by its key, if it has one: that is what it returns. If it was cached, it is
        free."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._by_key[key]
            if block in self._cached:
                del self._cached[block]
                self._returned.append(block)
        return key
