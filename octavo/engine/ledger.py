"""The unfinished requests: what an engine is to be told, and what its successor is to be told again."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from octavo.engine import wire
from octavo.engine.messages import SequenceOutput, SequenceRequest
from octavo.engine.outputs import OutputProcessor
from octavo.outputs import FinishReason, RequestMetrics

SUSPECTED = 2  # deaths in a row that hit a request, without progress of it
CONDEMNED = 3  # likewise, if the last one met it alone


@dataclass(slots=True, eq=False)
class _Entry:
    """A request."""

    request_id: str
    number: int  # in the order of arrival
    sequences: dict[int, _Progress]  # the unfinished ones, by seq_id
    strikes: int = 0  # deaths of engines that it may be to blame for, since it last made progress


@dataclass(slots=True, eq=False)
class _Progress:
    """A sequence: what was asked, and what it has cost so far. What it has brought is the OutputProcessor's."""

    entry: _Entry
    request: SequenceRequest
    metrics: RequestMetrics | None = None  # up to its first token, once that is known
    earlier_preemptions: int = 0  # in engines that have died

    def add(self, news: RequestMetrics) -> RequestMetrics:
        """The metrics of one life put together with those of the lives before: the first token came once."""
        if self.metrics is None:
            self.metrics = news
            return news
        end = news.queue_time + news.prefill_time + news.decode_time
        preemptions = self.earlier_preemptions + news.num_preemptions
        self.metrics = self._until(end, preemptions)
        return self.metrics

    def until_now(self) -> RequestMetrics:
        """When the front-end ends it."""
        age = time.monotonic() - self.request.arrival_time
        if self.metrics is None:
            return RequestMetrics(queue_time=age)
        return self._until(age, self.metrics.num_preemptions)

    def _until(self, end: float, preemptions: int) -> RequestMetrics:
        assert self.metrics is not None
        first_token = self.metrics.queue_time + self.metrics.prefill_time
        return replace(self.metrics, decode_time=end - first_token, num_preemptions=preemptions)


class Ledger:
    """Who is unfinished, what the engine knows of it, and who is suspected of killing engines.

    ::

                 add                due: Add                     finished, ended
        caller ───────► waiting ───────────────► in the engine ──────────────────► (gone)
                           ▲                          │
                           └──────────────────────────┘  the engine died; or (due: Abort) another one is on trial

    A death counts against the requests of the step that the engine died in; between two steps, against all that it
    knew. One that was hit twice and made no progress in between is suspected. As long as there are suspects, the engine
    gets one request at a time, suspects first, until each of them has made progress or has died with the engine, alone.
    """

    def __init__(self, outputs: OutputProcessor) -> None:
        self._outputs = outputs
        self._waiting: dict[str, _Entry] = {}  # by request_id, as the next two
        self._in_engine: dict[str, _Entry] = {}
        self._suspects: dict[str, _Entry] = {}
        self._sequences: dict[int, _Progress] = {}
        self._count = 0

    def __len__(self) -> int:
        """Unfinished sequences."""
        return len(self._sequences)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting or request_id in self._in_engine

    @property
    def num_requests(self) -> int:
        return len(self._waiting) + len(self._in_engine)

    @property
    def in_engine(self) -> bool:
        """Whether the engine has been told of any."""
        return bool(self._in_engine)

    def add(self, request_id: str, sequences: Iterable[SequenceRequest]) -> None:
        entry = _Entry(request_id, self._count, {})
        self._count += 1
        for request in sequences:
            entry.sequences[request.seq_id] = self._sequences[request.seq_id] = _Progress(entry, request)
        self._waiting[request_id] = entry

    def due(self) -> list[wire.ToEngine]:
        """What a ready engine is to be told now."""
        if not self._suspects:
            return [self._tell(list(self._waiting.values()))] if self._waiting else []
        cleared = [entry for entry in self._in_engine.values() if entry.request_id not in self._suspects]
        if len(cleared) < len(self._in_engine):
            return []  # one is on trial
        aborts: list[wire.ToEngine] = [self._withdraw(entry) for entry in cleared]
        return [*aborts, self._tell([next(iter(self._suspects.values()))])]

    def accept(self, update: SequenceOutput) -> bool:
        """Takes note of what an engine says, and takes out what is here already; False: nobody waits for the rest."""
        progress = self._sequences.get(update.seq_id)
        if progress is None:
            return False
        entry = progress.entry
        if update.metrics is not None:
            update.metrics = progress.add(update.metrics)
        self._outputs.strike_out_held(update)
        if update.advances:
            entry.strikes = 0
            self._suspects.pop(entry.request_id, None)
        if update.finish_reason is not None:
            self._forget(update.seq_id)
        return update.advances or bool(update.prompt_logprobs)

    def end(self, seq_id: int, reason: FinishReason, error: str | None = None) -> SequenceOutput:
        """The front-end ends a sequence; the engine is to be told so if it knows of it."""
        progress = self._forget(seq_id)
        return SequenceOutput(seq_id, finish_reason=reason, metrics=progress.until_now(), error=error)

    def seq_ids(self, request_id: str) -> list[int]:
        """Of a request's unfinished sequences."""
        entry = self._waiting.get(request_id) or self._in_engine.get(request_id)
        return [] if entry is None else list(entry.sequences)

    def request_ids(self) -> list[str]:
        return [*self._in_engine, *self._waiting]

    def place(self, seq_id: int) -> tuple[str, int] | None:
        """The request and the choice that a sequence is."""
        progress = self._sequences.get(seq_id)
        return None if progress is None else (progress.entry.request_id, progress.request.choice)

    def engine_died(self, in_step: Collection[int]) -> str | None:
        """All that the engine knew is to be told again.

        Args:
            in_step: the seq_ids of the step that it died in; empty: it died between steps, of any that it knew.

        Returns:
            The request that is condemned: it has killed its engine while nothing else ran.
        """
        entries = {p.entry.request_id: p.entry for p in map(self._sequences.get, in_step) if p is not None}
        hit = entries if in_step else self._in_engine
        alone = len(self._in_engine) == 1
        condemned = None
        for entry in hit.values():
            entry.strikes += 1
            if entry.strikes >= SUSPECTED:
                self._suspects[entry.request_id] = entry
            if entry.strikes >= CONDEMNED and alone:
                condemned = entry.request_id
        for entry in list(self._in_engine.values()):
            self._return(entry)
        self._waiting = dict(sorted(self._waiting.items(), key=lambda item: item[1].number))
        return condemned

    # Inside

    def _tell(self, entries: list[_Entry]) -> wire.Add:
        requests = []
        for entry in entries:
            del self._waiting[entry.request_id]
            self._in_engine[entry.request_id] = entry
            sequences = [self._outputs.resume(progress.request) for progress in entry.sequences.values()]
            requests.append(wire.Group.of(sequences))
        return wire.Add(requests)

    def _withdraw(self, entry: _Entry) -> wire.Abort:
        """What is still on its way from the engine comes before anything of who takes its place."""
        self._return(entry)
        return wire.Abort(list(entry.sequences))

    def _return(self, entry: _Entry) -> None:
        del self._in_engine[entry.request_id]
        self._waiting[entry.request_id] = entry
        for progress in entry.sequences.values():
            if progress.metrics is not None:
                progress.earlier_preemptions = progress.metrics.num_preemptions

    def _forget(self, seq_id: int) -> _Progress:
        progress = self._sequences.pop(seq_id)
        entry = progress.entry
        del entry.sequences[seq_id]
        if not entry.sequences:
            for entries in (self._waiting, self._in_engine, self._suspects):
                entries.pop(entry.request_id, None)
        return progress
