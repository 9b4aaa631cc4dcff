"""Collectives over torch.distributed: gloo between CPUs, NCCL between CUDA devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from octavo.collectives.base import Buffer, CollectiveError, Collectives


class TorchCollectives(Collectives):
    """Connects this process with those of the other workers; there can be one such connection in a process.

    Worker `index` is rank `index % size` of stage `index // size`::

        index    0 1 | 2 3 | 4 5      size 2, three stages: 0 and 1 divide each layer of the first,
        stage     0     1     2       and hand the residual stream on to 2 and 3
    """

    def __init__(
        self, address: tuple[str, int], index: int, size: int, num_stages: int, *, deadline: float, device: str = "cpu"
    ) -> None:
        """
        Args:
            address: host and free port of worker 0, where all meet.
            deadline: seconds after which a worker that does not answer is given up, here and in every method.
            device: what tensors are on: "cpu", or the CUDA device that is this worker's.

        Raises:
            CollectiveError: not all workers came.
        """
        super().__init__(index % size, size, index // size, num_stages)
        self._index = index
        timeout = timedelta(seconds=deadline)
        world = size * num_stages
        with _as_collective_error("meeting the other workers"):
            dist.init_process_group(
                "gloo" if device == "cpu" else "nccl",
                init_method=f"tcp://{address[0]}:{address[1]}",
                rank=index,
                world_size=world,
                timeout=timeout,
            )
            groups = [
                dist.new_group([stage * size + rank for rank in range(size)], timeout=timeout)
                for stage in range(num_stages)
            ]
        self._group = groups[self.stage]

    def all_gather(self, mine: Buffer, everyone: Buffer) -> None:
        tensor = _tensor(mine)
        with _as_collective_error("all_gather"):
            dist.all_gather(list(_tensor(everyone).unbind(0)), tensor, group=self._group)
        self._count(self.size - 1, tensor.nbytes)

    def gather(self, mine: Buffer, others: Sequence[Buffer]) -> None:
        first = self._index - self.rank
        with _as_collective_error("gather"):
            if self.rank > 0:
                dist.send(_tensor(mine), first)
                self._count(1, _tensor(mine).nbytes)
                return
            work = [dist.irecv(_tensor(other), first + rank) for rank, other in enumerate(others, start=1)]
            for one in work:
                assert one is not None  # this process is in the group
                one.wait()

    def send(self, x: Buffer) -> None:
        with _as_collective_error("send"):
            dist.send(_tensor(x), self._index + self.size)
        self._count(1, _tensor(x).nbytes)

    def recv(self, out: Buffer) -> None:
        with _as_collective_error("recv"):
            dist.recv(_tensor(out), self._index - self.size)

    def close(self) -> None:
        dist.destroy_process_group()


def _tensor(buffer: Buffer) -> torch.Tensor:
    """Of the same memory."""
    return buffer if isinstance(buffer, torch.Tensor) else torch.from_numpy(buffer)


@contextmanager
def _as_collective_error(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # of which torch's own errors are subclasses
        reason = str(error).strip().partition("\n")[0][:200]
        raise CollectiveError(f"{what} failed: {reason}") from error
