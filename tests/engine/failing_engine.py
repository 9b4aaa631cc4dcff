"""Engine processes that go wrong, for tests: modules to be named in `SupervisorOptions(module=...)`.

What goes wrong is told by the model's directory: a file `faults.json` beside the weights, which no caller of an API can
write.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig
from octavo.core import StepResult
from octavo.engine import process
from octavo.engine.core import EngineCore
from octavo.engine.messages import SequenceRequest
from octavo.executor import Executor, LocalExecutor

MODULE = "tests.engine.failing_engine"
FAULTS = "faults.json"
POISON = 310  # a token


class FailingExecutor(LocalExecutor):
    """Faults, by name:

    - dies_at_load: is killed as it loads
    - load_seconds: loading takes so much longer, asleep
    - step_seconds: each step takes so long, asleep
    - burn_seconds: each step takes so long, computing
    - dies_after: is killed in the step that follows so many
    - poison: what happens ("die", "raise", "wait") in a step with a sequence that has POISON in its prompt
    - poison_length: and so many tokens
    - poison_start: and that many tokens are computed already
    - poison_taken_in: what happens ("die", "burn") as a sequence that has POISON in its prompt is added, between steps
    """

    def __init__(self, config: EngineConfig, *args: Any) -> None:
        super().__init__(config, *args)
        file = Path(config.model) / FAULTS
        self._faults = json.loads(file.read_text()) if file.exists() else {}
        self._lengths: dict[int, int] = {}  # of poisoned sequences
        self._num_steps = 0
        time.sleep(self._faults.get("load_seconds", 0))
        if self._faults.get("dies_at_load"):
            os.kill(os.getpid(), signal.SIGKILL)

    def collect(self) -> StepResult:
        plan = self._plan
        self._lengths |= {new.seq_id: len(new.tokens) for new in plan.new if POISON in new.tokens[: new.prompt_length]}
        poisoned = [seq_id for seq_id in plan.seq_ids if seq_id in self._lengths]
        time.sleep(self._faults.get("step_seconds", 0))  # before any death: what came before has arrived by then
        starts = dict(zip(plan.seq_ids, plan.starts, strict=True))
        length, start = self._faults.get("poison_length", 0), self._faults.get("poison_start", 0)
        if any(self._lengths[seq_id] >= length and starts[seq_id] >= start for seq_id in poisoned):
            self._fail()
        if self._num_steps == self._faults.get("dies_after"):
            os.kill(os.getpid(), signal.SIGKILL)
        self._num_steps += 1
        end = time.monotonic() + self._faults.get("burn_seconds", 0)
        while time.monotonic() < end:
            pass
        result = super().collect()
        for seq_id in poisoned:
            self._lengths[seq_id] += 1
        return result

    def _fail(self) -> None:
        match self._faults.get("poison"):
            case "die":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "raise":
                raise ValueError("this step cannot be done")
            case "wait":
                threading.Event().wait()


class FailingCore(EngineCore):
    """See above."""

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        super().__init__(config, executor)
        file = Path(config.model) / FAULTS
        self._fault = json.loads(file.read_text()).get("poison_taken_in") if file.exists() else None

    def add(self, request: SequenceRequest) -> None:
        if self._fault is not None and POISON in request.tokens:
            if self._fault == "die":
                os.kill(os.getpid(), signal.SIGSEGV)
            while True:
                pass
        super().add(request)


def main(address: str, parent: int, recorder: int) -> None:
    process.EngineCore = FailingCore  # type: ignore[misc]
    process.main(address, parent, recorder, FailingExecutor)


def faulty(model: Path, directory: Path, **faults: Any) -> Path:
    """A copy of a model, with faults."""
    shutil.copytree(model, directory)
    (directory / FAULTS).write_text(json.dumps(faults))
    return directory
