"""The order of sequences. The first in the order is served first; the last gives its blocks up first."""

from __future__ import annotations

from typing import Protocol

from octavo.core.sequence import Sequence
from octavo.errors import ConfigError


class Policy(Protocol):
    def key(self, sequence: Sequence, arrival: int) -> tuple[int, int]:
        """Place in the order, fixed when a sequence arrives. `arrival` counts up and makes every key different."""


class Fcfs:
    """First come, first served; priorities are ignored."""

    def key(self, sequence: Sequence, arrival: int) -> tuple[int, int]:
        return (0, arrival)


class Priority:
    """The smaller priority number first, then first come, first served."""

    def key(self, sequence: Sequence, arrival: int) -> tuple[int, int]:
        return (sequence.priority, arrival)


_POLICIES: dict[str, type[Policy]] = {"fcfs": Fcfs, "priority": Priority}


def make_policy(name: str) -> Policy:
    if name not in _POLICIES:
        raise ConfigError(f"scheduling_policy={name!r}: expected one of {', '.join(_POLICIES)}")
    return _POLICIES[name]()
