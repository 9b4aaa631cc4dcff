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
from octavo.core import StepPlan, StepResult
from octavo.engine import process
from octavo.executor import LocalExecutor

MODULE = "tests.engine.failing_engine"
FAULTS = "faults.json"
POISON = 310  # a token


class FailingExecutor(LocalExecutor):
    """Faults, by name:

    - dies_at_load: is killed as it loads
    - step_seconds: each step takes so long, asleep
    - burn_seconds: each step takes so long, computing
    - poison: what happens ("die", "raise", "wait") in a step with a sequence that has POISON in its prompt
    - poison_length: and so many tokens
    """

    def __init__(self, config: EngineConfig, *args: Any) -> None:
        super().__init__(config, *args)
        file = Path(config.model) / FAULTS
        self._faults = json.loads(file.read_text()) if file.exists() else {}
        self._lengths: dict[int, int] = {}  # of poisoned sequences
        if self._faults.get("dies_at_load"):
            os.kill(os.getpid(), signal.SIGKILL)

    def execute(self, plan: StepPlan) -> StepResult:
        self._lengths |= {new.seq_id: len(new.tokens) for new in plan.new if POISON in new.tokens[: new.prompt_length]}
        poisoned = [seq_id for seq_id in plan.seq_ids if seq_id in self._lengths]
        if any(self._lengths[seq_id] >= self._faults.get("poison_length", 0) for seq_id in poisoned):
            self._fail()
        time.sleep(self._faults.get("step_seconds", 0))
        end = time.monotonic() + self._faults.get("burn_seconds", 0)
        while time.monotonic() < end:
            pass
        result = super().execute(plan)
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


def main(address: str, parent: int, recorder: int) -> None:
    process.main(address, parent, recorder, FailingExecutor)


def faulty(model: Path, directory: Path, **faults: Any) -> Path:
    """A copy of a model, with faults."""
    shutil.copytree(model, directory)
    (directory / FAULTS).write_text(json.dumps(faults))
    return directory
