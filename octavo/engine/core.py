"""The engine core: scheduler and executor, in one loop. It knows token ids and nothing of text."""

from __future__ import annotations

import logging
from collections import deque

from octavo.config import EngineConfig
from octavo.core import BlockManager, KVSnapshot, Scheduler, SchedulerStats, Sequence, StepPlan, make_policy
from octavo.engine.beams import BeamSearches
from octavo.engine.messages import BeamOutput, BeamRequest, SequenceOutput, SequenceRequest
from octavo.errors import OctavoError
from octavo.executor import Executor
from octavo.metrics import log_event
from octavo.outputs import FinishReason, RequestMetrics


class EngineCore:
    """Add sequences, step until nothing is left, abort at any moment between steps."""

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        self.executor = executor
        memory = executor.boot_report.memory
        self.scheduler = Scheduler(
            BlockManager(
                memory.num_blocks,
                config.block_size,
                caching=config.enable_prefix_caching,
                windows=memory.windows,
                max_chunk=config.max_num_batched_tokens,
                num_host_blocks=memory.num_swap_blocks,
            ),
            make_policy(config.scheduling_policy),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            preemption_mode=config.preemption_mode,
            depth=executor.depth,
        )
        self._beams = BeamSearches(self.scheduler)
        self._in_flight: deque[StepPlan] = deque()
        self._lost: BaseException | None = None  # what ended several steps in flight
        self._told: dict[int, int] = {}  # by seq_id: preemptions that the metrics last sent know of

    def add(self, request: SequenceRequest) -> None:
        """Queues a sequence.

        Raises:
            RequestError: it can never fit into the KV pool.
        """
        self.scheduler.add(
            Sequence(
                request.seq_id,
                request.tokens + request.sampled,
                request.params,
                max_length=request.max_length,
                stop_token_ids=request.stop_token_ids,
                bans=request.bans,
                seed=request.seed,
                choice=request.choice,
                priority=request.priority,
                arrival_time=request.arrival_time,
                prompt_length=len(request.tokens),
                cache_salt=request.cache_salt,
                group=request.seq_id - request.choice,
            )
        )

    def add_beams(self, request: BeamRequest) -> None:
        """Queues a beam search.

        Raises:
            RequestError: its beams can never fit into the KV pool together.
        """
        self._beams.add(request)

    def step(self) -> list[SequenceOutput | BeamOutput]:
        """Submits as many steps as may be in flight, and waits for the oldest; empty when nothing is left.

        When the executor raises, no sequence is lost: the next step does what this one should have done. With several
        in flight that cannot be told: no step may follow.
        """
        if self._lost is not None:
            raise OctavoError("steps were lost, and with them what the workers know; make a new engine") from self._lost
        while len(self._in_flight) < self.executor.depth and (plan := self.scheduler.schedule()):
            self._in_flight.append(plan)
            self.executor.submit(plan)
        if not self._in_flight:
            return []
        plan = self._in_flight.popleft()
        try:
            result = self.executor.collect()
        except BaseException as error:
            if self._in_flight or self.executor.depth > 1:
                self._lost = error
            else:
                self.scheduler.fail(plan)
            raise
        finished = {sequence.seq_id: sequence for sequence in self.scheduler.update(plan, result)}
        outputs: list[SequenceOutput | BeamOutput] = []
        for i, (seq_id, token) in enumerate(zip(plan.seq_ids, result.token_ids, strict=True)):
            if seq_id in self._beams:
                continue
            prompt_logprobs = result.prompt_logprobs.get(seq_id, [])
            sequence = finished.get(seq_id)
            known = sequence or self.scheduler.in_plan(seq_id)
            if known is None or (sequence is None and token < 0 and not prompt_logprobs):
                continue  # aborted while the step was in flight, or nothing to tell
            output = SequenceOutput(seq_id, token if token >= 0 else None, result.logprobs.get(seq_id), prompt_logprobs)
            if token >= 0:
                output.position = len(known.tokens) - known.prompt_length - 1
            if prompt_logprobs:
                end = min(plan.starts[i] + plan.num_tokens[i], known.prompt_length - 1)
                output.prompt_position = end - len(prompt_logprobs)
            if sequence is not None:
                self._close(output, sequence, result.errors.get(seq_id))
            elif token >= 0:
                output.metrics = self._new_metrics(seq_id)
            outputs.append(output)
        return outputs + self._beams.take(result)

    def abort(self, seq_id: int, reason: FinishReason = "abort") -> SequenceOutput | BeamOutput | None:
        """Ends a sequence, or a beam search; None when it has ended already."""
        search = self._beams.abort(seq_id, reason)
        if search is not None:
            return search
        sequence = self.scheduler.abort(seq_id, reason)
        if sequence is None:
            return None
        output = SequenceOutput(seq_id)
        self._close(output, sequence, None)
        return output

    def live_seq_ids(self, seq_id: int) -> list[int]:
        """What a sequence, or a beam search, is known as to the scheduler: of a search, its live beams, best first."""
        return self._beams.live_seq_ids(seq_id) or [seq_id]

    @property
    def has_unfinished(self) -> bool:
        return bool(self.scheduler.sequences)

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()

    def kv_snapshot(self) -> KVSnapshot:
        return self.scheduler.kv_snapshot()

    def close(self) -> None:
        self.executor.close()

    def _new_metrics(self, seq_id: int) -> RequestMetrics | None:
        """Of a sequence that goes on, what its first token or its latest preemption has changed."""
        sequence = self.scheduler.sequences[seq_id]
        if self._told.get(seq_id) == sequence.num_preemptions:
            return None
        self._told[seq_id] = sequence.num_preemptions
        return _metrics(sequence)

    def _close(self, output: SequenceOutput, sequence: Sequence, error: str | None) -> None:
        self._told.pop(sequence.seq_id, None)
        output.finish_reason = sequence.finish_reason
        output.metrics = _metrics(sequence)
        output.error = error
        if error is not None:
            log_event("request_failed", {"seq_id": sequence.seq_id, "error": error}, logging.WARNING)


def _metrics(sequence: Sequence) -> RequestMetrics:
    """Of one that goes on, up to its first token."""
    end = sequence.finish_time or sequence.first_token_time or sequence.arrival_time
    scheduled = end if sequence.first_scheduled_time is None else sequence.first_scheduled_time
    first_token = end if sequence.first_token_time is None else sequence.first_token_time
    return RequestMetrics(
        queue_time=scheduled - sequence.arrival_time,
        prefill_time=first_token - scheduled,
        decode_time=end - first_token,
        num_cached_tokens=sequence.num_cached_tokens,
        num_preemptions=sequence.num_preemptions,
    )
