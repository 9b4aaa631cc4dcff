"""One worker, in this process."""

from __future__ import annotations

from collections.abc import Callable

from octavo.config import EngineConfig, ModelConfig
from octavo.core import StepPlan, StepResult
from octavo.errors import OctavoError
from octavo.executor.base import Executor
from octavo.metrics import Profiler
from octavo.weights import Checkpoint
from octavo.worker import BootReport, Worker


class LocalExecutor(Executor):
    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        checkpoint: Checkpoint,
        vocab_size: int,
        on_load: Callable[[float], None] | None = None,
    ) -> None:
        """See `Worker`."""
        self._worker: Worker | None = Worker(config, model, checkpoint, vocab_size, on_load)
        self._worker.allocate()
        self._boot_report = self._worker.boot_report
        self._plan = StepPlan()  # submitted

    @property
    def boot_report(self) -> BootReport:
        return self._boot_report

    def submit(self, plan: StepPlan) -> None:
        self._plan = plan

    def collect(self) -> StepResult:
        result = self._open_worker().execute(self._plan)
        assert result is not None, "the only worker samples"
        return result

    def profiler(self) -> Profiler:
        return self._open_worker().profiler()

    def close(self) -> None:
        self._worker = None

    def _open_worker(self) -> Worker:
        if self._worker is None:
            raise OctavoError("the engine is closed")
        return self._worker
