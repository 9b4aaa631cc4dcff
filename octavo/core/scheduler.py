"""The scheduler: one rule, no phases.

Each sequence has known tokens and computed tokens, and a step's token budget closes the gaps, in the policy's order.
Prefill, chunked prefill, prefix hits, decode and recompute after preemption are all the same thing: a gap of some size.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Collection
from dataclasses import asdict
from typing import Literal

from octavo.core.block_manager import BlockManager
from octavo.core.plan import NewSequence, StepPlan, StepResult
from octavo.core.policy import Policy
from octavo.core.sequence import Sequence, Status
from octavo.core.stats import KVSnapshot, SchedulerStats, SequenceBlocks, Totals
from octavo.core.waiting_queue import WaitingQueue
from octavo.errors import RequestError
from octavo.outputs import FinishReason

PreemptionReason = Literal["growth", "admission", "failure"]


class Scheduler:
    """Plans steps over a BlockManager.

    `running` is kept in the policy's order, and whoever waits comes in only at its place in that order. So the walk of
    `schedule` serves the first in the order first, and whoever loses its blocks is always the last: a sequence that the
    walk has not reached yet, or the very one that asked.

    A plan counts as done once it is made: its tokens as computed, the blocks that it fills as published. So a sequence
    finds what others compute in the same step, and a prefix is computed once even for requests that arrive together.
    That holds because every plan is executed; when a step fails, `fail` takes it back.
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
        self._to_void: list[int] = []  # preempted since the last plan, and known to the workers
        self._totals = Totals()
        self._slots_filled = 0  # summed over steps, as is the next
        self._slots_allocated = 0

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence.

        Raises:
            RequestError: even alone it could not be computed to its end in the whole pool, or it has nothing to compute
                or nothing to sample.
        """
        self._register(sequence, self.policy.key(sequence, self._arrivals))
        self.waiting.push(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Adds a sequence that shares all that a running one has computed, between two steps: a beam.

        The child's tokens begin with the parent's computed ones and have at least one more; its place in the order is
        behind the parent. Where no seat is left it waits, and computes what the prefix cache does not hold.

        Raises:
            RequestError: as for `add`.
        """
        shared = parent.num_computed
        if child.tokens[:shared] != parent.tokens[:shared] or len(child.tokens) == shared:
            raise ValueError(f"{child} does not go on from what {parent} has computed")
        self._register(child, (*parent.key[:2], self._arrivals))
        if parent.status is not Status.RUNNING or len(self.running) >= self.max_num_seqs:
            self.waiting.push(child)
            return
        self.blocks.fork(parent, child)
        self._totals.num_forks += 1
        child.num_cached_tokens = parent.num_cached_tokens
        child.status = Status.RUNNING
        insort(self.running, child, key=lambda sequence: sequence.key)

    def schedule(self) -> StepPlan:
        """Plans one step and takes the blocks that it needs. An empty plan: nothing can run."""
        plan = StepPlan()
        running, blocks = self.running, self.blocks
        blocks.published.clear()
        block_size = blocks.block_size
        budget = self.max_num_batched_tokens
        head = self.waiting.peek()
        index = 0
        while True:
            sequence = running[index] if index < len(running) else None
            if head is not None and (sequence is None or head.key < sequence.key):
                if not self._admit(head, index, budget, plan):
                    head = None  # nobody overtakes it
                    continue
                sequence = head
                head = self.waiting.peek()
            elif sequence is None or budget == 0:
                break
            start = sequence.num_computed
            count = min(len(sequence.tokens) - start, budget)
            end = start + count
            if end > sequence.room:
                num_running = len(running)
                if not self._make_room(sequence, end, plan):
                    break  # it is the last in the order: it keeps what it has and sits this step out
                if len(running) < num_running:
                    head = None  # nor does anybody take the place of those that had to leave
            sequence.num_computed = end
            if end % block_size < count:  # a block is full
                blocks.publish(sequence, start)
            plan.seq_ids.append(sequence.seq_id)
            plan.starts.append(start)
            plan.num_tokens.append(count)
            budget -= count
            index += 1
        if plan:
            blocks.num_filled_slots += self.max_num_batched_tokens - budget
            plan.finished, self._to_forget = self._to_forget, []
            plan.preempted = [seq_id for seq_id in self._to_void if seq_id in self.sequences] + plan.preempted
            self._to_void = []
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[Sequence]:
        """Takes the step's tokens in; returns the sequences that it finished."""
        now = self.clock()
        finished: list[Sequence] = []
        find = self.sequences.get
        for seq_id, token in zip(plan.seq_ids, result.token_ids, strict=True):
            sequence = find(seq_id)
            if sequence is None:
                continue  # aborted while the step ran
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
        self._account(plan)
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

    def fail(self, plan: StepPlan) -> None:
        """The step was not done, or not to its end: takes back that its tokens are computed and its blocks published.

        Who came in with it may have begun with blocks that it should have filled, or with a copy that was not made:
        these wait again. All others go on from where they were.
        """
        self.blocks.withdraw_latest()
        planned = zip(plan.seq_ids, plan.starts, plan.num_tokens, strict=True)
        alive = [(self.sequences[seq_id], start, count) for seq_id, start, count in planned if seq_id in self.sequences]
        for sequence, start, count in alive:
            came_in = len(plan.new_blocks.get(sequence.seq_id, ())) == len(sequence.block_table)
            if came_in or sequence.seq_id in plan.copies:
                self._preempt(sequence, "failure", self._to_void)
            else:
                sequence.num_computed = start
                self.blocks.num_filled_slots -= count
        self.running = [s for s in self.running if s.status is Status.RUNNING]

    def stats(self) -> SchedulerStats:
        pool, totals = self.blocks.pool, self._totals
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            num_used_blocks=pool.num_used,
            num_shared_blocks=pool.num_shared,
            peak_used_blocks=pool.peak_used,
            num_held_tokens=self.blocks.num_filled_slots,
            num_block_copies=self.blocks.num_copies,
            num_preemptions=totals.num_preemptions,
            slot_utilization=self._slots_filled / max(self._slots_allocated, 1),
            **asdict(totals),
        )

    def kv_snapshot(self) -> KVSnapshot:
        """Every block's state and owners. Costs O(blocks and sequences): to be looked at, not to be polled."""
        pool = self.blocks.pool
        snapshot = KVSnapshot(self.blocks.block_size, [pool.state(block) for block in range(pool.num_blocks)])
        for s in self.sequences.values():
            shared = sum(pool.ref_count(block) > 1 for block in s.block_table)
            snapshot.sequences.append(
                SequenceBlocks(
                    s.seq_id,
                    s.status.value,
                    len(s.tokens),
                    s.num_computed,
                    s.num_cached_tokens,
                    s.num_preemptions,
                    list(s.block_table),
                    shared,
                )
            )
        return snapshot

    def _register(self, sequence: Sequence, key: tuple[int, ...]) -> None:
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
        sequence.key = key
        self._arrivals += 1
        self.sequences[sequence.seq_id] = sequence

    def _admit(self, head: Sequence, index: int, budget: int, plan: StepPlan) -> bool:
        """Lets the first in line in at `running[index]` if it finds room, at the cost of those after it if need be.

        It must find room for all its known tokens, not only for its first chunk, and a block for each sequence before
        it that may still need one: else it would soon be the one that is preempted. A twin of the sequence before it
        costs no budget, and only the block that its first own token goes into.
        """
        running, pool = self.running, self.blocks.pool
        if len(running) == index and (index >= self.max_num_seqs or pool.num_available == 0):
            return False  # the usual answer, without a look at anything else
        twin = self._twin(head, index)
        if twin is not None:
            prefix, needed = twin.block_table, 1
        elif budget > 0:
            prefix = self.blocks.find_prefix(head)
            # Those that are in use cost nothing; those that are cached count among the blocks available, and are taken.
            needed = self.blocks.blocks_for(len(head.tokens)) - sum(pool.ref_count(block) > 0 for block in prefix)
        else:
            return False
        survivors = self._survivors(index, needed, prefix)
        if survivors is None:
            return False
        while len(running) > survivors:
            self._preempt(running.pop(), "admission", plan.preempted)
        self.waiting.pop()
        running.insert(index, head)
        if twin is not None:
            self.blocks.fork(twin, head)
            self._totals.num_forks += 1
            head.num_cached_tokens = twin.num_cached_tokens
        else:
            self.blocks.adopt(head, prefix)
            self._count_hits(head)
        head.status = Status.RUNNING
        self._introduce(head, plan)
        return True

    def _twin(self, head: Sequence, index: int) -> Sequence | None:
        """The sequence before it, if that has just been planned to the end of the prompt that is all the head has."""
        if head.group is None or index == 0 or len(head.tokens) != head.prompt_length:
            return None
        twin = self.running[index - 1]
        ends = twin.num_computed == len(twin.tokens) == head.prompt_length
        return twin if twin.group == head.group and ends else None

    def _survivors(self, index: int, needed: int, prefix: Collection[int]) -> int | None:
        """How many of those that run may stay when one comes in at `index` and takes `needed` blocks more than those of
        `prefix` that are in use; None when even giving up all from `index` on is not enough."""
        pool, running = self.blocks.pool, self.running
        free, survivors = pool.num_available, len(running)
        if survivors == index and needed > free:
            return None
        needed += sum(sequence.room < sequence.max_length - 1 for sequence in running[:index])
        kept = frozenset(prefix) if survivors > index else frozenset()
        holders: dict[int, int] = {}  # of the victims' blocks: how many tables of others hold them
        while needed > free or survivors >= self.max_num_seqs:
            if survivors == index:
                return None
            survivors -= 1
            for block in running[survivors].block_table:
                holders[block] = holders.get(block, pool.ref_count(block)) - 1
                free += holders[block] == 0 and block not in kept
        return survivors

    def _introduce(self, sequence: Sequence, plan: StepPlan) -> None:
        """Tells the workers of a sequence that comes in, and of the block table that it begins with."""
        if sequence.first_scheduled_time is None:
            sequence.first_scheduled_time = self.clock()
            plan.new.append(
                NewSequence(
                    sequence.seq_id,
                    list(sequence.tokens),
                    sequence.prompt_length,
                    sequence.params,
                    sequence.seed,
                    sequence.choice,
                    sequence.bans,
                )
            )
        if sequence.block_table:
            plan.new_blocks[sequence.seq_id] = list(sequence.block_table)

    def _make_room(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        """Grows the block table for `num_tokens`, preempting from the end of the order; False when that is itself."""
        blocks = self.blocks
        while blocks.missing(sequence, num_tokens) > blocks.pool.num_available:
            if self.running[-1] is sequence:
                return False
            self._preempt(self.running.pop(), "growth", plan.preempted)
        copy, new_blocks = blocks.grow(sequence, num_tokens)
        if copy is not None:
            plan.copies[sequence.seq_id] = copy
        if sequence.first_scheduled_time is None:  # it was forked between steps
            self._introduce(sequence, plan)
        elif new_blocks:
            plan.new_blocks[sequence.seq_id] = plan.new_blocks.get(sequence.seq_id, []) + new_blocks
        return True

    def _preempt(self, sequence: Sequence, reason: PreemptionReason, told: list[int]) -> None:
        """By recompute: its blocks go back, and it waits at its old place in the order."""
        totals = self._totals
        match reason:
            case "growth":
                totals.num_preemptions_growth += 1
            case "admission":
                totals.num_preemptions_admission += 1
            case "failure":
                totals.num_preemptions_failure += 1
        totals.num_preempted_tokens += sequence.num_computed
        sequence.num_preemptions += 1
        self.blocks.free(sequence)
        sequence.num_computed = sequence.room = 0
        sequence.status = Status.PREEMPTED
        self.waiting.push(sequence)
        if sequence.first_scheduled_time is not None:
            told.append(sequence.seq_id)

    def _finish(self, sequence: Sequence, now: float) -> None:
        # What a failed sequence has computed may be what failed: others are to compute it themselves.
        self.blocks.free(sequence, keep=sequence.finish_reason != "error")
        sequence.status = Status.FINISHED
        sequence.finish_time = now
        del self.sequences[sequence.seq_id]
        if sequence.first_scheduled_time is not None:
            self._to_forget.append(sequence.seq_id)

    def _count_hits(self, sequence: Sequence) -> None:
        """Of a sequence that has just begun with what the prefix cache holds of it."""
        totals = self._totals
        if sequence.num_preemptions > 0:
            totals.num_restored_tokens += sequence.num_computed
        elif self.blocks.caching:
            sequence.num_cached_tokens = min(sequence.num_computed, sequence.prompt_length)
            totals.prefix_cache_queries += len(sequence.tokens)
            totals.prefix_cache_hits += sequence.num_computed

    def _account(self, plan: StepPlan) -> None:
        self._totals.num_steps += 1
        self._totals.num_tokens += sum(plan.num_tokens)
        self._slots_filled += self.blocks.num_filled_slots
        self._slots_allocated += self.blocks.pool.num_used * self.blocks.block_size
