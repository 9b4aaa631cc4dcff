"""Between the callers of AsyncLLMEngine and the engine process: who waits for what, through all of its lives."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo.core import KVSnapshot, SchedulerStats
from octavo.engine import wire
from octavo.engine.ledger import Ledger
from octavo.engine.messages import Request, SequenceOutput
from octavo.engine.outputs import OutputProcessor
from octavo.engine.streams import RequestStream
from octavo.engine.supervisor import Death, Supervisor
from octavo.errors import OctavoError, QueueFullError, RequestError
from octavo.metrics import log_event
from octavo.outputs import FinishReason, RequestOutput
from octavo.tokenizer import Tokenizer
from octavo.worker import BootReport

RATE_OVER = 32  # finished sequences, by which it is foretold when there will be room
LONGEST_RETRY = 60  # seconds


@dataclass(frozen=True, slots=True)
class Submission:
    """A request that is checked and not queued yet."""

    request_id: str
    prompt: str | None
    request: Request


class Dispatcher:
    """Queues requests, tells the engine of them, and brings what it says to the streams. The supervisor's owner.

    What the front-end decides (a stop string, an abort) holds at once; the engine is told, and what it still says of
    such a sequence is dropped.
    """

    def __init__(self, max_unfinished: int) -> None:
        """`max_unfinished`: sequences; any more are refused."""
        self.max_unfinished = max_unfinished
        self.idle = asyncio.Event()  # nothing is unfinished
        self.idle.set()
        self.failure: asyncio.Future[OctavoError] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, weakref.ref[RequestStream]] = {}
        self._questions: dict[int, asyncio.Future[wire.Answer | None]] = {}
        self._num_questions = 0
        self._finish_times: deque[float] = deque(maxlen=RATE_OVER)  # of sequences, since there was last nothing to do
        self._busy_since = 0.0  # if it is

    def begin(self, tokenizer: Tokenizer, supervisor: Supervisor) -> None:
        """Once the model is known."""
        self.outputs = OutputProcessor(tokenizer)
        self.ledger = Ledger(self.outputs)
        self.supervisor = supervisor

    # For callers

    def check_room(self, count: int) -> None:
        """Whether so many sequences could be queued now; raises what `add` does if not."""
        if count > self.max_unfinished:
            raise RequestError(
                f"{count} sequences in one call; at most {self.max_unfinished} may be unfinished: send fewer at once"
            )
        excess = len(self.ledger) + count - self.max_unfinished
        if excess > 0:
            seconds = self._seconds_until(excess)
            raise QueueFullError(
                f"{len(self.ledger)} sequences are unfinished; at most {self.max_unfinished} may be: try again in "
                f"{seconds} s",
                seconds,
            )

    def add(self, submissions: Sequence[Submission]) -> list[RequestStream]:
        """Queues all of these, or none.

        Raises:
            RequestError: an id is that of an unfinished request, or is there twice; or these are more than may ever be
                unfinished.
            QueueFullError: they are more than may be unfinished now.
        """
        self._check_ids([submission.request_id for submission in submissions])
        self.check_room(sum(len(submission.request.sequences) for submission in submissions))
        streams = [self._add(submission) for submission in submissions]
        self._tell()
        return streams

    def abort(self, request_id: str) -> None:
        """Ends a request with what it has, if it is unfinished."""
        if request_id in self.ledger:
            self._end(self.ledger.seq_ids(request_id), "abort")
            self._tell()

    def end_all(self, reason: FinishReason, error: str | None = None) -> None:
        """Ends all requests, and leaves no question open."""
        self._close_questions()
        for request_id in self.ledger.request_ids():
            self._end(self.ledger.seq_ids(request_id), reason, error)

    async def stats(self) -> SchedulerStats | None:
        """The engine's; None while there is none."""
        answer = await self._ask("stats")
        return None if answer is None else answer.stats

    async def kv_snapshot(self) -> KVSnapshot | None:
        answer = await self._ask("kv_snapshot")
        if answer is None or answer.kv_snapshot is None:
            return None
        for sequence in answer.kv_snapshot.sequences:
            place = self.ledger.place(sequence.seq_id)
            if place is not None:  # else it has ended as the answer was on its way
                sequence.request_id, sequence.choice = place
        return answer.kv_snapshot

    # For the supervisor

    @property
    def has_work(self) -> bool:
        return self.ledger.in_engine or bool(self._questions)

    def engine_ready(self, boot_report: BootReport) -> None:
        self._tell()

    def engine_said(self, message: wire.Stepped | wire.Answer) -> int:
        if isinstance(message, wire.Answer):
            question = self._questions.pop(message.number, None)
            if question is not None and not question.done():
                question.set_result(message)
            return 0
        news = [update for update in message.outputs if self.ledger.accept(update)]
        self._deliver(news)
        self._tell()
        return sum(update.advances for update in news)

    def engine_died(self, death: Death) -> bool:
        self._close_questions()
        condemned = self.ledger.engine_died(death.in_step)
        if condemned is None:
            return False
        error = f"the engine died whenever it computed this request, at last when it computed no other: {death.reason}"
        log_event("request_failed", {"request_id": condemned, "error": error}, logging.ERROR)
        self._end(self.ledger.seq_ids(condemned), "error", error)
        return True

    def engine_given_up(self, error: OctavoError) -> None:
        self.end_all("error", str(error))
        self.failure.set_result(error)

    # Inside

    def _check_ids(self, request_ids: list[str]) -> None:
        seen = set()
        for request_id in request_ids:
            if not isinstance(request_id, str):
                raise RequestError(f"request_id={request_id!r}: expected text")
            if request_id in seen or request_id in self.ledger:
                raise RequestError(f"request_id={request_id!r} belongs to an unfinished request; give another")
            seen.add(request_id)

    def _seconds_until(self, count: int) -> int:
        """After which so many sequences are likely to have finished, by the last ones that did."""
        times = self._finish_times
        first = times[0] if len(times) == RATE_OVER else self._busy_since
        each = (time.monotonic() - first) / max(1, len(times))
        return max(1, min(math.ceil(count * each), LONGEST_RETRY))

    def _add(self, submission: Submission) -> RequestStream:
        request_id, request = submission.request_id, submission.request
        self.outputs.add(request_id, submission.prompt, request)
        self.ledger.add(request_id, request.sequences)
        if self.idle.is_set():
            self.idle.clear()
            self._finish_times.clear()
            self._busy_since = time.monotonic()
        stream = RequestStream(request_id, self.abort)

        def let_go(reader: weakref.ref[RequestStream]) -> None:  # in whatever thread collects the garbage
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._abort_unread, request_id, reader)

        self._streams[request_id] = weakref.ref(stream, let_go)
        return stream

    def _abort_unread(self, request_id: str, reader: weakref.ref[RequestStream]) -> None:
        if self._streams.get(request_id) is reader:
            self.abort(request_id)

    def _tell(self) -> None:
        if self.supervisor.is_ready:
            for message in self.ledger.due():
                self.supervisor.send(message)

    def _deliver(self, updates: Iterable[SequenceOutput]) -> None:
        moved, stopped = self.outputs.process(updates)
        for output in moved:
            self._show(output)
        if stopped:
            self._end(stopped, "stop")

    def _end(self, seq_ids: list[int], reason: FinishReason, error: str | None = None) -> None:
        """The front-end's own decision: it does not wait for the engine."""
        if self.supervisor.is_ready:
            self.supervisor.send(wire.Abort(seq_ids))
        moved, _ = self.outputs.process([self.ledger.end(seq_id, reason, error) for seq_id in seq_ids])
        for output in moved:
            self._show(output)

    def _show(self, output: RequestOutput) -> None:
        stream = self._streams[output.request_id]()
        if stream is not None:
            stream.put(output)
        if output.finished:
            del self._streams[output.request_id]
            self._finish_times.extend([time.monotonic()] * len(output.outputs))
            if not len(self.ledger):
                self.idle.set()

    async def _ask(self, what: wire.What) -> wire.Answer | None:
        if not self.supervisor.is_ready:
            return None
        self._num_questions += 1
        question: asyncio.Future[wire.Answer | None] = self._loop.create_future()
        self._questions[self._num_questions] = question
        self.supervisor.send(wire.Ask(self._num_questions, what))
        return await question

    def _close_questions(self) -> None:
        for question in self._questions.values():
            if not question.done():
                question.set_result(None)
        self._questions.clear()
