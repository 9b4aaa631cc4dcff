"""Sequences that do not run, first in the order on top."""

from __future__ import annotations

import heapq

from octavo.core.sequence import Sequence, Status


class WaitingQueue:
    """A heap by `Sequence.key`. Sequences that finish (abort) while they wait are dropped lazily.

    `push` and `pop` cost O(log n) and `peek` and `discard` O(1), amortised.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, ...], Sequence]] = []
        self._stale = 0  # entries of the heap that have been discarded

    def __len__(self) -> int:
        return len(self._heap) - self._stale

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (sequence.key, sequence))

    def peek(self) -> Sequence | None:
        heap = self._heap
        while heap and heap[0][1].status is Status.FINISHED:
            heapq.heappop(heap)
            self._stale -= 1
        return heap[0][1] if heap else None

    def pop(self) -> Sequence:
        sequence = self.peek()
        if sequence is None:
            raise IndexError("nothing waits")
        heapq.heappop(self._heap)
        return sequence

    def discard(self, sequence: Sequence) -> None:
        """Forgets a sequence that is in the queue and has just been marked as finished."""
        self._stale += 1
        if 2 * self._stale > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1].status is not Status.FINISHED]
            heapq.heapify(self._heap)
            self._stale = 0
