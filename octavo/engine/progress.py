"""Whether an engine process gets on, as seen from outside."""

from __future__ import annotations

import time

from octavo.engine.life import Vitals

BUSY_SHARE = 0.05  # of one core: a process that takes less than that does not compute


class Progress:
    """Whether an engine gets on.

    Signs of that: a message, a finished step, or that the process computes (a long prefill) or waits for a disk (which
    no signal could end). A process that is stopped, or waits for what never comes, shows none of them; one that has
    nothing to do need not.
    """

    def __init__(self, hang_timeout: float, step_timeout: float) -> None:
        """Seconds: without any sign of progress; and that one step may take, though the process computes."""
        self._hang_timeout = hang_timeout
        self._step_timeout = step_timeout
        now = time.monotonic()
        self._sign = now  # when there was one
        self._step_begun = now  # at the latest; if it is at work
        self._looked = now
        self._num_steps = self._num_beats = 0
        self._vitals = Vitals("R", 0, 0.0)
        self.verdict: str | None = None  # why it was to be killed

    def heard(self) -> None:
        """A message came."""
        self._sign = time.monotonic()

    def look(self, vitals: Vitals, num_steps: int, num_beats: int, *, at_work: bool, idle: bool) -> bool:
        """Takes in how the process is; whether it hangs.

        Args:
            num_beats: how often it has said that workers get on for which it waits.
            at_work: it is ready, and steps are to be expected: what it does between two of them counts with the next.
            idle: it is ready, and they are not. Neither: it is loading.
        """
        now = time.monotonic()
        stepped = num_steps > self._num_steps
        beats = num_beats > self._num_beats
        busy = vitals.cpu_seconds - self._vitals.cpu_seconds > BUSY_SHARE * (now - self._looked)
        reads = vitals.state == "D" or vitals.major_faults > self._vitals.major_faults
        held_up = now - self._looked > self._hang_timeout / 2  # this process was: it cannot tell
        if stepped or beats or busy or reads or held_up or (idle and not vitals.stopped):
            self._sign = now
        if stepped or not at_work:
            self._step_begun = now
        self._looked, self._vitals, self._num_steps, self._num_beats = now, vitals, num_steps, num_beats
        if now - self._sign > self._hang_timeout:
            self.verdict = f"it hung: {self.describe()}"
        elif now - self._step_begun > self._step_timeout:
            self.verdict = f"it hung: one step has taken more than {self._step_timeout:g} s"
        return self.verdict is not None

    @property
    def late(self) -> bool:
        """Half of the time has passed."""
        return time.monotonic() - self._sign > self._hang_timeout / 2

    def describe(self) -> str:
        return f"no sign of progress for {time.monotonic() - self._sign:.1f} s"
