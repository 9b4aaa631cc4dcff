"""Keeps an engine process up: starts it, watches that it lives and gets on, and starts it again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import zmq
import zmq.asyncio

from octavo.config import EngineConfig
from octavo.engine import wire
from octavo.engine.life import ENGINE_MODULE, Life
from octavo.engine.progress import Progress
from octavo.errors import ConfigError, ModelError, OctavoError
from octavo.metrics import log_event
from octavo.worker import BootReport, MemoryPlan

Phase = Literal["loading", "ready", "restarting", "failed", "closed"]

LOOKS = 10  # at the process, per hang_timeout
MOST_SECONDS_BETWEEN_LOOKS = 1.0
LASTING = 60.0  # seconds: who was ready for that long has not failed even if there was nothing to do
RICH = 64  # tokens, of all requests together: fewer are not worth a start again and again
LONGEST_DELAY = 30.0  # seconds before another start


@dataclass(frozen=True, slots=True)
class SupervisorOptions:
    step_timeout: float = 1800.0  # seconds that one step may take, though the process computes all the time
    max_failures: int = 5  # lives in a row that brought nothing; then the supervisor gives up
    max_poor_lives: int = 20  # lives in a row that brought fewer than RICH tokens; likewise
    restart_delay: float = 0.25  # seconds before the start that follows such a life; four times as long after each
    module: str = ENGINE_MODULE  # for tests: an engine that fails


@dataclass(frozen=True, slots=True)
class Health:
    """What is true at the moment at which it was asked for."""

    ready: bool  # the model is loaded and the process runs
    alive: bool  # it is, or will be again: it is being started. False: it is closed, or was given up
    reason: str  # for people
    num_restarts: int
    pid: int | None  # of the engine process, while there is one


@dataclass(frozen=True, slots=True)
class Death:
    """How a life ended."""

    reason: str
    in_step: list[int]  # the seq_ids of the step that it died in, if it did


class Owner(Protocol):
    """Who the supervisor works for. None of these may raise."""

    def engine_ready(self, boot_report: BootReport) -> None:
        """A new engine is there, and knows nothing."""

    def engine_said(self, message: wire.Stepped | wire.Answer) -> int:
        """By how many tokens, or ends, requests got on."""

    def engine_died(self, death: Death) -> bool:
        """Whether it is known what it died of, so that it may well live without that."""

    def engine_given_up(self, error: OctavoError) -> None:
        """There will be no other."""

    @property
    def has_work(self) -> bool:
        """Whether steps are to be expected of an engine that is ready."""


class Supervisor:
    """One life after the other.

    ::

        loading ──► ready ──► (dies, or hangs and is killed) ──► restarting ──► loading ──► ...
           └── refused at the first start: the error is raised        └── too many in vain: failed
    """

    def __init__(
        self,
        owner: Owner,
        start: Callable[[], Awaitable[wire.Start]],
        *,
        max_num_seqs: int,
        hang_timeout: float,
        options: SupervisorOptions,
    ) -> None:
        """
        Args:
            hang_timeout: seconds without a sign of progress after which an engine is killed.
            start: makes the first message to an engine; called when the process is there, so that it may take its time
                while that one comes up.
        """
        self.hang_timeout = hang_timeout
        self.options = options
        self.num_restarts = 0
        self._owner = owner
        self._start = start
        self._max_num_seqs = max_num_seqs
        self._phase: Phase = "loading"
        self._why = "the engine process is being started"
        self._context = zmq.asyncio.Context()
        self._context.socket(zmq.PAIR).close()  # so that all is there that it needs for those to come
        self._life: Life | None = None
        self._progress = Progress(hang_timeout, options.step_timeout)
        self._num_tokens = 0  # that this life brought, or ends
        self._lasted = False  # this life did
        self._ready_since = 0.0  # if it is
        self._last_words: str | None = None  # of this life
        self._first_ready: asyncio.Future[BootReport] = asyncio.get_running_loop().create_future()
        self._first_ready.add_done_callback(lambda future: future.exception())  # perhaps nobody waits for it any more
        self._task = asyncio.create_task(self._run(), name="octavo engine supervisor")
        self._task.add_done_callback(self._stopped)

    async def ready(self) -> BootReport:
        """Waits for the first engine.

        Raises:
            ModelError, ConfigError: it cannot load the model.
            OctavoError: it died as it tried.
        """
        return await asyncio.shield(self._first_ready)

    def send(self, message: wire.ToEngine) -> None:
        """To the engine, which `is_ready`. If it dies before it has read this, its successor has to be told."""
        assert self._life is not None
        self._life.send(message)

    @property
    def is_ready(self) -> bool:
        """As far as it has been noticed; `health` looks."""
        return self._phase == "ready"

    @property
    def health(self) -> Health:
        alive, ready, why = self._phase in ("loading", "ready", "restarting"), self._phase == "ready", self._why
        pid = None if self._life is None else self._life.pid
        if ready and self._life is not None:
            now = self._life.vitals()
            if now.dead:
                ready, why = False, "the engine process has just died"
            elif now.stopped:
                ready, why = False, "the engine process is stopped"
            elif self._progress.late:
                ready, why = False, self._progress.describe()
        return Health(ready, alive, why, self.num_restarts, pid)

    async def close(self) -> None:
        """Ends the engine, always by SIGKILL: it keeps nothing that could be lost. Safe to call twice."""
        self._enter("closed", "the engine was closed")
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)

    # Inside

    def _enter(self, phase: Phase, why: str) -> None:
        if self._phase != "closed":
            self._phase, self._why = phase, why

    async def _run(self) -> None:
        barren = poor = 0  # lives in a row
        while True:
            death = await self._live()
            self._enter("restarting", f"the engine died ({death.reason}) and is started again")
            log_event("engine_died", {"reason": death.reason, "running": len(death.in_step)}, logging.ERROR)
            if not self._first_ready.done():
                raise OctavoError(f"the engine process ended as it loaded the model: {death.reason}")
            self._first_ready.result()
            if self._owner.engine_died(death) or self._lasted or self._num_tokens >= RICH:
                barren = poor = 0
            else:
                poor += 1
                barren = 0 if self._num_tokens else barren + 1
            self._check_worth(barren, poor, death)
            self.num_restarts += 1
            if barren:
                await asyncio.sleep(min(self.options.restart_delay * 4 ** (barren - 1), LONGEST_DELAY))

    def _check_worth(self, barren: int, poor: int, death: Death) -> None:
        """Whether another start is worth while, after so many lives in a row that brought nothing, or little."""
        if barren >= self.options.max_failures:
            times, what = barren, "without having done anything"
        elif poor >= self.options.max_poor_lives:
            times, what = poor, f"each time before it had done {RICH} tokens"
        else:
            return
        raise OctavoError(
            f"the engine died {times} times in a row {what}, the last time: {death.reason}; see what it wrote on stderr"
        )

    def _stopped(self, task: asyncio.Task[None]) -> None:
        """There will be no other life."""
        if task.cancelled():
            return
        cause = task.exception()
        error = cause if isinstance(cause, OctavoError) else OctavoError(f"the engine's supervisor failed: {cause!r}")
        error.__cause__ = cause if error is not cause else None
        self._enter("failed", str(error))
        if not self._first_ready.done():
            self._first_ready.set_exception(error)
        elif self._first_ready.exception() is None:
            log_event("engine_given_up", {"reason": str(error)}, logging.ERROR)
            self._owner.engine_given_up(error)

    async def _live(self) -> Death:
        """One life, from its start to its end."""
        self._num_tokens, self._lasted, self._last_words = 0, False, None
        self._progress = Progress(self.hang_timeout, self.options.step_timeout)
        try:
            life = self._life = Life(self.options.module, self._max_num_seqs, self._context)
        except (OSError, zmq.ZMQError) as error:  # no memory, processes or file descriptors: that may pass
            return Death(f"it cannot be started: {error}", [])
        ended = asyncio.create_task(life.ended())
        helpers = [asyncio.create_task(self._listen(life)), asyncio.create_task(self._watch(life))]
        try:
            done, _ = await asyncio.wait([ended, *helpers], return_when=asyncio.FIRST_COMPLETED)
            if ended not in done:
                await done.pop()  # it raises: a helper never returns
            await _cancel(helpers)
            for message in life.left_over():
                self._hear(message)
            return Death(self._progress.verdict or self._last_words or ended.result(), life.recorder.in_step)
        finally:
            life.kill()
            try:
                await _cancel(helpers)
                await ended
            finally:  # even if this task is cancelled meanwhile
                life.close()
                self._life = None

    async def _listen(self, life: Life) -> None:
        start = await self._start()
        if self._first_ready.done():
            config = _same_pool(start.config, self._first_ready.result().memory)
            start = wire.Start(config, start.vocab_size, start.log_level)
        life.send(start)
        while True:
            self._hear(await life.receive())

    def _hear(self, message: wire.FromEngine) -> None:
        self._progress.heard()
        match message:
            case wire.Stepped() | wire.Answer():
                self._num_tokens += self._owner.engine_said(message)
            case wire.Loading(share):
                self._enter("loading", f"the model is being loaded: {share:.0%}")
            case wire.Ready(boot_report):
                self._enter("ready", "the engine is ready")
                self._ready_since = time.monotonic()
                log_event("engine_ready", {**boot_report.fields(), "num_restarts": self.num_restarts})
                self._owner.engine_ready(boot_report)
                if not self._first_ready.done():
                    self._first_ready.set_result(boot_report)
            case wire.Refused(kind, text):
                self._last_words = text
                if not self._first_ready.done():
                    self._first_ready.set_exception((ModelError if kind == "ModelError" else ConfigError)(text))

    async def _watch(self, life: Life) -> None:
        """Kills the engine when it hangs."""
        interval = min(self.hang_timeout / LOOKS, MOST_SECONDS_BETWEEN_LOOKS)
        while True:
            await asyncio.sleep(interval)
            ready, has_work = self._phase == "ready", self._owner.has_work
            self._lasted |= ready and time.monotonic() - self._ready_since > LASTING
            signs = life.vitals(), life.recorder.num_steps, life.recorder.num_beats
            if self._progress.look(*signs, at_work=ready and has_work, idle=ready and not has_work):
                life.kill()


def _same_pool(config: EngineConfig, memory: MemoryPlan) -> EngineConfig:
    """What fitted into the first engine's pool is to fit into those of its successors."""
    return replace(
        config, num_kv_blocks=memory.num_blocks, kv_cache_memory_bytes=None, max_model_len=memory.max_model_len
    )


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
