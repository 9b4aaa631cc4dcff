"""Workers as threads of one process: what torch.distributed does between processes, with barriers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import Queue
from typing import Any, TypeVar

import numpy as np

from octavo.collectives import Collectives

T = TypeVar("T")
_PATIENCE = 60.0  # seconds


class _Meeting:
    """Of the workers of one stage."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=_PATIENCE)
        self.table: list[Any] = [None] * size


class ThreadCollectives(Collectives):
    def __init__(
        self, index: int, size: int, num_stages: int, meetings: Sequence[_Meeting], lines: Sequence[Queue[Any]]
    ):
        super().__init__(index % size, size, index // size, num_stages)
        self._meeting = meetings[self.stage]
        self._lines = lines  # into each worker
        self._index = index

    def all_gather(self, mine: Any, everyone: Any) -> None:
        self._meeting.table[self.rank] = mine
        self._meeting.barrier.wait()
        for out, of in zip(everyone, self._meeting.table, strict=True):
            out[...] = of
        self._meeting.barrier.wait()

    def gather(self, mine: Any, others: Sequence[Any]) -> None:
        self._meeting.table[self.rank] = mine
        self._meeting.barrier.wait()
        assert len(others) == (self.size - 1 if self.rank == 0 else 0)
        for out, of in zip(others, self._meeting.table[1:], strict=False):
            assert out.shape == of.shape
            out[...] = of
        self._meeting.barrier.wait()

    def send(self, x: Any) -> None:
        self._lines[self._index + self.size].put(np.array(x))

    def recv(self, out: Any) -> None:
        x = self._lines[self._index].get(timeout=_PATIENCE)
        assert out.shape == x.shape
        out[...] = x


def workers(size: int, num_stages: int) -> list[ThreadCollectives]:
    meetings = [_Meeting(size) for _ in range(num_stages)]
    lines: list[Queue[Any]] = [Queue() for _ in range(size * num_stages)]
    return [ThreadCollectives(index, size, num_stages, meetings, lines) for index in range(size * num_stages)]


def run(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """All at once, each in a thread of its own; raises what the first of them raised."""
    results: list[Any] = [None] * len(tasks)
    errors: list[BaseException] = []

    def call(i: int, task: Callable[[], T]) -> None:
        try:
            results[i] = task()
        except BaseException as error:  # noqa: BLE001  it is raised below, in the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=call, args=(i, task), daemon=True) for i, task in enumerate(tasks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _PATIENCE)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a worker hangs"
    return results
