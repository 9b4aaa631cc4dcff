"""What a backend asks of whatever connects the workers of one model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from octavo.errors import OctavoError

Buffer = Any  # a contiguous numpy array, or a torch tensor: on any device that the connection reaches


class CollectiveError(OctavoError):
    """A worker is gone, or did not answer before the deadline. The workers have to be started anew, all of them."""


class Collectives(ABC):
    """One worker's end: `rank` of the `size` that divide each layer, in `stage` of `num_stages` of a pipeline.

    All workers of a stage call the same methods in the same order. Every method may raise CollectiveError.
    """

    def __init__(self, rank: int, size: int, stage: int, num_stages: int) -> None:
        self.rank = rank
        self.size = size
        self.stage = stage
        self.num_stages = num_stages
        self.num_messages = 0  # sent by this worker so far
        self.num_bytes = 0

    @property
    def samples(self) -> bool:
        """Whether this is the worker that gets the logits."""
        return self.rank == 0 and self.stage == self.num_stages - 1

    @abstractmethod
    def all_gather(self, mine: Buffer, everyone: Buffer) -> None:
        """Fills everyone [size, ...] with what the workers of the stage have, in rank order, each shaped as `mine`."""

    @abstractmethod
    def gather(self, mine: Buffer, others: Sequence[Buffer]) -> None:
        """Brings the `mine` of all workers of the stage to rank 0.

        Args:
            others: of rank 0: where that of ranks 1, 2, ... goes, shaped as theirs. Else empty.
        """

    @abstractmethod
    def send(self, x: Buffer) -> None:
        """Hands x to the worker of the same rank in the next stage."""

    @abstractmethod
    def recv(self, out: Buffer) -> None:
        """Waits for what the worker of the same rank in the previous stage sends, shaped as `out`."""

    def _count(self, messages: int, nbytes: int) -> None:
        self.num_messages += messages
        self.num_bytes += messages * nbytes
