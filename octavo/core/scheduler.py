"""The scheduler: one rule, no phases.

Each sequence has known tokens and computed tokens, and a step's token budget closes the gaps, in the policy's order.
Prefill, chunked prefill, decode and recompute after preemption are all the same thing: a gap of some size.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from octavo.core.block_manager import BlockManager
from octavo.core.plan import NewSequence, StepPlan, StepResult
from octavo.core.policy import Policy
from octavo.core.sequence import Sequence, Status
from octavo.core.waiting_queue import WaitingQueue
from octavo.errors import RequestError
from octavo.outputs import FinishReason


class SchedulerStats(NamedTuple):
    """What the scheduler holds now, and totals since it was made."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    peak_used_blocks: int
    num_held_tokens: int  # in the cache, over all running sequences
    num_steps: int
    num_tokens: int  # computed, prompt tokens and recomputed ones included
    num_preemptions: int
    slot_utilization: float  # share of the slots in allocated blocks that held a token, over all steps; 0 before any


class Scheduler:
    """Plans steps over a BlockManager.

    `running` is kept in the policy's order, and whoever waits comes in only at its place in that order. So the walk of
    `schedule` serves the first in the order first, and whoever loses its blocks is always the last: a sequence that the
    walk has not reached yet, or the very one that asked.
    """

    def __init__(
        self,
        blocks: BlockManager,
        policy: Policy,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.blocks = blocks
        self.policy = policy
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.clock = clock
        self.sequences: dict[int, Sequence] = {}  # all that are not finished
        self.running: list[Sequence] = []
        self.waiting = WaitingQueue()
        self._arrivals = 0
        self._to_forget: list[int] = []  # finished since the last plan, and known to the workers
        self._tokens_held = 0  # tokens in the cache, over all running sequences
        self._num_steps = 0
        self._num_tokens = 0
        self._num_preemptions = 0
        self._slots_held = 0  # summed over steps, as is the next
        self._slots_allocated = 0

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence.

        Raises:
            RequestError: even alone it could not be computed to its end in the whole pool, or it has nothing to compute
                or nothing to sample.
        """
        if not 1 <= len(sequence.tokens) < sequence.max_length:
            raise RequestError(
                f"the request has {len(sequence.tokens)} known tokens; it needs at least 1, and fewer than its maximum "
                f"length of {sequence.max_length}"
            )
        needed = self.blocks.blocks_for(sequence.max_length - 1)
        if needed > self.blocks.pool.num_blocks:
            raise RequestError(
                f"the request needs {needed} KV blocks for {sequence.max_length} tokens ({len(sequence.tokens)} of "
                f"them known, {self.blocks.block_size} a block); the whole pool has {self.blocks.pool.num_blocks}"
            )
        if sequence.seq_id in self.sequences:
            raise ValueError(f"sequence {sequence.seq_id} is already here")
        sequence.key = self.policy.key(sequence, self._arrivals)
        self._arrivals += 1
        self.sequences[sequence.seq_id] = sequence
        self.waiting.push(sequence)

    def schedule(self) -> StepPlan:
        """Plans one step and takes the blocks that it needs. An empty plan: nothing can run."""
        plan = StepPlan()
        running = self.running
        block_size = self.blocks.block_size
        budget = self.max_num_batched_tokens
        head = self.waiting.peek()
        index = 0
        while budget > 0:
            sequence = running[index] if index < len(running) else None
            if head is not None and (sequence is None or head.key < sequence.key):
                if not self._admit(head, index, plan):
                    head = None  # nobody overtakes it
                    continue
                sequence = head
                head = self.waiting.peek()
            elif sequence is None:
                break
            start = sequence.num_computed
            count = min(len(sequence.tokens) - start, budget)
            if start + count > len(sequence.block_table) * block_size:
                if not self._make_room(sequence, start + count, plan):
                    break  # it is the last in the order: it keeps what it has and sits this step out
                if plan.preempted:
                    head = None
            plan.seq_ids.append(sequence.seq_id)
            plan.starts.append(start)
            plan.num_tokens.append(count)
            budget -= count
            index += 1
        if plan:
            plan.finished, self._to_forget = self._to_forget, []
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[Sequence]:
        """Takes the step's tokens in; returns the sequences that it finished."""
        now = self.clock()
        computed = 0
        finished: list[Sequence] = []
        find = self.sequences.get
        for seq_id, count, token in zip(plan.seq_ids, plan.num_tokens, result.token_ids, strict=True):
            sequence = find(seq_id)
            if sequence is None:
                continue  # aborted while the step ran
            sequence.num_computed += count
            computed += count
            if token < 0:
                if sequence.num_computed == len(sequence.tokens) and seq_id not in result.errors:
                    raise ValueError(f"the step sampled no token for sequence {seq_id}, and says no error")
                continue
            sequence.tokens.append(token)
            if sequence.first_token_time is None:
                sequence.first_token_time = now
            if token in sequence.stop_token_ids:
                sequence.finish_reason = "stop"
                finished.append(sequence)
            elif len(sequence.tokens) >= sequence.max_length:
                sequence.finish_reason = "length"
                finished.append(sequence)
        for seq_id in result.errors:
            sequence = find(seq_id)
            if sequence is not None:
                if sequence.finish_reason is None:  # else its token has just ended it, and it is in the list
                    finished.append(sequence)
                sequence.finish_reason = "error"
        self._account(computed)
        for sequence in finished:
            self._finish(sequence, now)
        if finished:
            self.running = [s for s in self.running if s.status is Status.RUNNING]
        return finished

    def abort(self, seq_id: int, reason: FinishReason = "abort") -> Sequence | None:
        """Ends a sequence at any moment and gives its blocks back; None when it is not here (any more)."""
        sequence = self.sequences.get(seq_id)
        if sequence is None:
            return None
        was_running = sequence.status is Status.RUNNING
        sequence.finish_reason = reason
        self._finish(sequence, self.clock())
        if was_running:
            self.running.remove(sequence)
        else:
            self.waiting.discard(sequence)
        return sequence

    def stats(self) -> SchedulerStats:
        pool = self.blocks.pool
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            peak_used_blocks=pool.peak_used,
            num_held_tokens=self._tokens_held,
            num_steps=self._num_steps,
            num_tokens=self._num_tokens,
            num_preemptions=self._num_preemptions,
            slot_utilization=self._slots_held / max(self._slots_allocated, 1),
        )

    def _admit(self, head: Sequence, index: int, plan: StepPlan) -> bool:
        """Lets the first in line in at `running[index]` if it finds room, at the cost of those after it if need be.

        It must find room for all its known tokens, not only for its first chunk, and a block for each sequence before
        it that may still need one: else it would soon be the one that is preempted.
        """
        running, pool = self.running, self.blocks.pool
        needed = self.blocks.blocks_for(len(head.tokens))
        free, survivors = pool.num_free, len(running)
        if survivors == index and (survivors >= self.max_num_seqs or needed > free):
            return False  # the usual answer, without a look at those that run
        needed += sum(map(self._may_grow, running[:index]))
        while needed > free or survivors >= self.max_num_seqs:
            if survivors == index:
                return False
            survivors -= 1
            free += sum(pool.ref_count(block) == 1 for block in running[survivors].block_table)
        while len(running) > survivors:
            self._preempt(running.pop(), plan)
        self.waiting.pop()
        running.insert(index, head)
        if head.first_scheduled_time is None:
            head.first_scheduled_time = self.clock()
            plan.new.append(
                NewSequence(
                    head.seq_id,
                    list(head.tokens),
                    head.prompt_length,
                    head.params,
                    head.seed,
                    head.choice,
                    head.bans,
                )
            )
        head.status = Status.RUNNING
        return True

    def _may_grow(self, sequence: Sequence) -> bool:
        return self.blocks.missing(sequence, sequence.max_length - 1) > 0

    def _make_room(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        """Grows the block table for `num_tokens`, preempting from the end of the order; False when that is itself."""
        missing = self.blocks.missing(sequence, num_tokens)
        while missing > self.blocks.pool.num_free:
            if self.running[-1] is sequence:
                return False
            self._preempt(self.running.pop(), plan)
        plan.new_blocks[sequence.seq_id] = self.blocks.grow(sequence, missing)
        return True

    def _preempt(self, sequence: Sequence, plan: StepPlan) -> None:
        """By recompute: its blocks go back, and it waits at its old place in the order."""
        self._release(sequence)
        sequence.num_computed = 0
        sequence.status = Status.PREEMPTED
        sequence.num_preemptions += 1
        self._num_preemptions += 1
        self.waiting.push(sequence)
        plan.preempted.append(sequence.seq_id)

    def _finish(self, sequence: Sequence, now: float) -> None:
        self._release(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_time = now
        del self.sequences[sequence.seq_id]
        if sequence.first_scheduled_time is not None:
            self._to_forget.append(sequence.seq_id)

    def _release(self, sequence: Sequence) -> None:
        self._tokens_held -= sequence.num_computed
        self.blocks.free(sequence)

    def _account(self, computed: int) -> None:
        self._num_steps += 1
        self._num_tokens += computed
        self._tokens_held += computed
        self._slots_held += self._tokens_held
        self._slots_allocated += self.blocks.pool.num_used * self.blocks.block_size
