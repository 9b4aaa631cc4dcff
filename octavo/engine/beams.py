"""Beam searches in the engine core: each beam is a sequence of the scheduler, and goes on as a fork of its parent."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from octavo.core import BeamGroup, Scheduler, Sequence, StepResult
from octavo.engine.messages import BeamOutput, BeamRequest
from octavo.errors import RequestError
from octavo.metrics import log_event
from octavo.outputs import FinishReason, RequestMetrics, TokenLogprobs
from octavo.sampling_params import SamplingParams


@dataclass(slots=True)
class _Search:
    """One request. Once all of its beams have their candidates, its group chooses who goes on."""

    request: BeamRequest
    group: BeamGroup
    first: Sequence  # computes the prompt
    beams: list[Sequence]  # those of `group.live`, in its order
    next_id: int
    candidates: dict[int, TokenLogprobs] = field(default_factory=dict)  # by seq_id, of the beams that have them
    first_token_time: float | None = None
    num_preemptions: int = 0  # of beams that are no more


class BeamSearches:
    """All beam searches of an engine, between the scheduler, which knows beams only as sequences that wait to be
    branched, and `BeamGroup`, which knows only tokens and logprobs.

    Beams of one search may be computed in different steps: some may be preempted while others have their candidates.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._search_of: dict[int, _Search] = {}  # by seq_id of a live beam
        self._searches: dict[int, _Search] = {}  # by seq_id of the request

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._search_of

    def add(self, request: BeamRequest) -> None:
        """Queues a search.

        Raises:
            RequestError: its beams could not all be computed to their end at once, with nothing else in the pool: the
                search could come to a point from where it cannot go on.
        """
        self._check_room(request)
        group = BeamGroup(request.params, max_tokens=request.max_tokens, stop_token_ids=request.stop_token_ids)
        first = self._sequence(request, group, request.seq_id, list(request.tokens))
        self._scheduler.add(first)
        search = _Search(request, group, first, [first], request.seq_id + 1)
        self._searches[request.seq_id] = self._search_of[request.seq_id] = search

    def take(self, result: StepResult) -> list[BeamOutput]:
        """Takes what a step found for beams, after `Scheduler.update`; returns the searches that are over."""
        outputs = []
        moved: dict[int, _Search] = {}
        for seq_id, entry in result.logprobs.items():
            search = self._search_of.get(seq_id)
            if search is not None:
                search.candidates[seq_id] = entry
                moved[search.request.seq_id] = search
        for seq_id, error in result.errors.items():
            search = self._search_of.get(seq_id)
            if search is not None:
                moved.pop(search.request.seq_id, None)
                outputs.append(self._close(search, "error", error))
        for search in moved.values():
            if len(search.candidates) == len(search.beams):
                self._branch(search)
                if not search.beams:
                    outputs.append(self._close(search, "stop"))
        return outputs

    def abort(self, seq_id: int, reason: FinishReason) -> BeamOutput | None:
        """Ends a request's search with the best that it has so far; None when there is none of that id."""
        search = self._searches.get(seq_id)
        return None if search is None else self._close(search, reason)

    def live_seq_ids(self, seq_id: int) -> list[int] | None:
        """Of a request's beams, the best first; None when it is no search."""
        search = self._searches.get(seq_id)
        return None if search is None else [beam.seq_id for beam in search.beams]

    def _check_room(self, request: BeamRequest) -> None:
        width, blocks, max_num_seqs = request.params.beam_width, self._scheduler.blocks, self._scheduler.max_num_seqs
        if width > max_num_seqs:
            raise RequestError(
                f"beam_width={width}: at most max_num_seqs={max_num_seqs} sequences run at once; ask for fewer beams"
            )
        each = blocks.most_blocks(request.max_length - 1)
        if width * each > blocks.pool.num_blocks:
            raise RequestError(
                f"beam_width={width} beams of up to {request.max_length} tokens need {each} KV blocks each, "
                f"{width * each} in all; the whole pool has {blocks.pool.num_blocks}: ask for fewer or shorter beams"
            )

    def _sequence(self, request: BeamRequest, group: BeamGroup, seq_id: int, tokens: list[int]) -> Sequence:
        return Sequence(
            seq_id,
            tokens,
            SamplingParams.reporting(group.num_candidates),
            max_length=request.max_length,
            priority=request.priority,
            arrival_time=request.arrival_time,
            prompt_length=len(request.tokens),
            cache_salt=request.cache_salt,
            is_beam=True,
        )

    def _branch(self, search: _Search) -> None:
        """All beams have their candidates: ends them, and goes on with those that the group chooses."""
        parents, group = search.beams, search.group
        if search.first_token_time is None:
            search.first_token_time = self._scheduler.clock()
        children = []
        for index, token in group.advance([search.candidates[beam.seq_id] for beam in parents]):
            parent = parents[index]
            child = self._sequence(search.request, group, search.next_id, [*parent.tokens, token])
            search.next_id += 1
            children.append((parent, child))
        self._scheduler.branch(parents, children)
        self._leave(search, parents)
        search.beams = [child for _, child in children]
        search.candidates.clear()
        for beam in search.beams:
            self._search_of[beam.seq_id] = search

    def _leave(self, search: _Search, beams: Iterable[Sequence]) -> None:
        for beam in beams:
            search.num_preemptions += beam.num_preemptions
            del self._search_of[beam.seq_id]

    def _close(self, search: _Search, reason: FinishReason, error: str | None = None) -> BeamOutput:
        seq_id = search.request.seq_id
        for beam in search.beams:
            self._scheduler.abort(beam.seq_id, reason)
        self._leave(search, search.beams)
        del self._searches[seq_id]
        if error is not None:
            log_event("request_failed", {"seq_id": seq_id, "error": error}, logging.WARNING)
        return BeamOutput(seq_id, search.group.best(reason), self._metrics(search), error)

    def _metrics(self, search: _Search) -> RequestMetrics:
        first, now = search.first, self._scheduler.clock()
        scheduled = now if first.first_scheduled_time is None else first.first_scheduled_time
        first_token = now if search.first_token_time is None else search.first_token_time
        return RequestMetrics(
            queue_time=scheduled - first.arrival_time,
            prefill_time=first_token - scheduled,
            decode_time=now - first_token,
            num_cached_tokens=first.num_cached_tokens,
            num_preemptions=search.num_preemptions,
        )
