"""What the engine asks of whatever places and drives the workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from octavo.core import StepPlan, StepResult
from octavo.metrics import Profiler
from octavo.worker import BootReport


class Executor(ABC):
    @property
    @abstractmethod
    def boot_report(self) -> BootReport:
        """What was loaded, and where the memory goes."""

    @property
    def depth(self) -> int:
        """How many steps may be in flight, submitted and not collected: as many as a pipeline has stages."""
        return 1

    @abstractmethod
    def submit(self, plan: StepPlan) -> None:
        """Has the workers run a step after those submitted before."""

    @abstractmethod
    def collect(self) -> StepResult:
        """Waits for the end of the oldest step in flight. When it raises, the differences that its plan tells count as
        told all the same; of several in flight, the later ones are lost too, and no step may follow."""

    def watch(self, sign: Callable[[], None]) -> None:  # noqa: B027  one that computes itself needs no sign
        """Has `sign` called now and then while this process only waits for workers that get on."""

    def look(self) -> None:  # noqa: B027  one that computes itself is there
        """Raises if a worker is gone. Called now and then while there is nothing to do."""

    @abstractmethod
    def profiler(self) -> Profiler:
        """See `Backend.profiler`."""

    @abstractmethod
    def close(self) -> None:
        """Gives the workers' memory back; no step may follow."""
