"""The host tier: blocks that were pushed out of the KV cache, and are found again by their keys."""

from __future__ import annotations

from collections import OrderedDict


class HostTier:
    """Slots 0 to num_blocks - 1 outside of the KV cache, one block each, the least recently used to be replaced first.

    It is a second level of the prefix cache: what a key stands for never changes, so a block that has come back into
    the KV cache stays here too, and need not be written again when it is pushed out the next time.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # by key; the least recently used first
        self._free: list[int] = []  # given back
        self._fresh = 0  # from here on slots were never used

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def put(self, key: bytes) -> int | None:
        """A slot to write what `key` stands for to; None when it is here already, or every slot is taken out."""
        if key in self._slots:
            self._slots.move_to_end(key)
            return None
        if self._free:
            slot = self._free.pop()
        elif self._fresh < self.num_blocks:
            slot = self._fresh
            self._fresh += 1
        elif self._slots:
            _, slot = self._slots.popitem(last=False)
        else:
            return None
        self._slots[key] = slot
        return slot

    def take_out(self, key: bytes) -> int:
        """The slot of `key`, which nothing can replace until it is put back."""
        return self._slots.pop(key)

    def put_back(self, key: bytes, slot: int) -> None:
        """As the most recently used; if `key` came in again meanwhile, the slot is free."""
        if key in self._slots:
            self._free.append(slot)
        else:
            self._slots[key] = slot

    def discard(self, key: bytes) -> None:
        """Forgets what `key` stands for, if it is here."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._free.append(slot)
