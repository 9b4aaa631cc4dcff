"""The order of sequences. The first in the order is served first; the last gives its blocks up first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from octavo.core.block_manager import BlockManager
from octavo.core.sequence import Sequence
from octavo.errors import ConfigError

Place = tuple[int, ...]


class Policy(ABC):
    """Where a sequence stands in the order: from its arrival on, or once the policy has chosen it.

    Those that run, and those that did, have a place that never changes. A policy may keep newcomers undecided, and
    `choose` one of them when there is a seat; that one then stands behind all that have a place.
    """

    # Called for every sequence of a step with the number of tokens that it is to compute; None: nobody asks.
    charge: Callable[[Sequence, int], None] | None = None

    @abstractmethod
    def place(self, sequence: Sequence, arrival: int) -> Place | None:
        """A newcomer's place, or None: it is one of those to choose from. `arrival` counts up."""

    def choose(self, blocks: BlockManager) -> Sequence | None:
        """Takes the next of those that are undecided; None when there are none."""
        return None

    def discard(self, sequence: Sequence) -> None:
        """An undecided sequence has ended."""
        raise KeyError(sequence.seq_id)

    def __len__(self) -> int:
        """How many are undecided."""
        return 0


class Fcfs(Policy):
    """First come, first served; priorities are ignored."""

    def place(self, sequence: Sequence, arrival: int) -> Place:
        return (0, arrival)


class Priority(Policy):
    """The smaller priority number first, then first come, first served."""

    def place(self, sequence: Sequence, arrival: int) -> Place:
        return (sequence.priority, arrival)


_POLICIES: dict[str, type[Policy]] = {"fcfs": Fcfs, "priority": Priority}


def make_policy(name: str) -> Policy:
    if name not in _POLICIES:
        raise ConfigError(f"scheduling_policy={name!r}: expected one of {', '.join(_POLICIES)}")
    return _POLICIES[name]()
