"""What the engine asks of whatever places and drives the workers."""

from __future__ import annotations

from abc import ABC, abstractmethod

from octavo.core import StepPlan, StepResult
from octavo.metrics import Profiler
from octavo.worker import BootReport


class Executor(ABC):
    @property
    @abstractmethod
    def boot_report(self) -> BootReport:
        """What was loaded, and where the memory goes."""

    @abstractmethod
    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step to its end. When it raises, the differences that the plan tells count as told all the same."""

    @abstractmethod
    def profiler(self) -> Profiler:
        """See `Backend.profiler`."""

    @abstractmethod
    def close(self) -> None:
        """Gives the workers' memory back; no step may follow."""
