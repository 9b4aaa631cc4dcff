"""The scheduler: one rule, no phases.

Each sequence has known tokens and computed tokens, and a step's token budget closes the gaps, in the policy's order.
Prefill, chunked prefill, prefix hits, decode and recompute after preemption are all the same thing: a gap of some size.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Literal

from octavo.core.block_manager import BlockManager, BlockTables
from octavo.core.plan import NOTHING, NewSequence, StepPlan, StepResult
from octavo.core.policy import Policy
from octavo.core.sequence import Sequence, Status
from octavo.core.stats import KVSnapshot, SchedulerStats, SequenceBlocks, Totals
from octavo.core.step_cost import StepCost
from octavo.core.waiting_queue import WaitingQueue
from octavo.errors import RequestError
from octavo.outputs import FinishReason

PreemptionReason = Literal["growth", "admission", "failure"]
PreemptionMode = Literal["auto", "recompute", "swap"]


class Scheduler:
    """Plans steps over a BlockManager.

    `running` is kept in the policy's order, and whoever waits comes in only at its place in that order. So the walk of
    `schedule` serves the first in the order first, and whoever loses its blocks is always the last: a sequence that the
    walk has not reached yet, or the very one that asked.

    A plan counts as done once it is made: its tokens as computed, the blocks that it fills as published. So a sequence
    finds what others compute in the same step, and a prefix is computed once even for requests that arrive together.
    That holds because every plan is executed; when a step fails, `fail` takes it back.

    With a pipeline of workers several plans are in flight, and each worker executes them in order: what one gives up or
    fills, the next may take or read. Only a token that is still to come holds a sequence up. A plan then takes no more
    than its share of the sequences, so that every stage has something to do::

        running     a b c d e f g h        depth 2
        plans       a b c d                in flight
                            e f g h        made meanwhile: a to d have no token to compute yet
    """

    def __init__(
        self,
        blocks: BlockManager,
        policy: Policy,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        preemption_mode: PreemptionMode = "auto",
        depth: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.blocks = blocks
        self.policy = policy
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.preemption_mode = preemption_mode
        self.depth = depth  # most plans that are made and not yet taken in by `update`
        self.clock = clock
        self.sequences: dict[int, Sequence] = {}  # all that are not finished
        self.running: list[Sequence] = []
        self.waiting = WaitingQueue()
        self._arrivals = 0
        self._to_forget: list[int] = []  # finished since the last plan, and known to the workers
        self._to_void: list[int] = []  # preempted since the last plan, and known to the workers
        self._totals = Totals()
        self._cost = StepCost()
        self._in_flight: deque[StepPlan] = deque()
        self._head_waits = False  # who was first in line when somebody last asked found no room
        self._planned_at = 0.0  # when the oldest plan in flight could begin
        self._slots_filled = 0  # summed over steps, as is the next
        self._slots_allocated = 0

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence.

        Raises:
            RequestError: even alone it could not be computed to its end in the whole pool, or it has nothing to compute
                or nothing to sample.
        """
        arrival = self._arrivals
        self._register(sequence, ())
        place = self.policy.place(sequence, arrival)
        if place is not None:
            sequence.key = place
            self.waiting.push(sequence)

    def branch(self, parents: list[Sequence], children: list[tuple[Sequence, Sequence]]) -> None:
        """Between two steps, ends the beams of one group and goes on with those that come of them.

        Args:
            parents: the group's beams; all of their tokens are computed.
            children: (parent, child): the child's tokens are the parent's and one more. It shares all blocks of the
                parent and stands at its place in the order. Where no seat is left, or the parent has lost its blocks,
                the child waits, and computes what it does not find.

        Raises:
            RequestError: as for `add`.
        """
        for parent, child in children:
            if child.tokens[:-1] != parent.tokens:
                raise ValueError(f"{child} does not go on from {parent}")
            self._register(child, (*parent.key[:2], self._arrivals))
            if parent.status is Status.RUNNING:
                self.blocks.fork(parent, child)
                child.num_cached_tokens = parent.num_cached_tokens
                self._totals.num_forks += 1
        for parent in parents:
            waited = parent.status is not Status.RUNNING
            self._leave(parent)
            if waited:
                self.waiting.discard(parent)
        self.running = [s for s in self.running if s.status is Status.RUNNING]
        for _, child in children:
            if child.block_tables and len(self.running) < self.max_num_seqs:
                child.status = Status.RUNNING
                insort(self.running, child, key=lambda sequence: sequence.key)
            else:
                self.blocks.free(child)
                child.num_computed = child.room = 0
                self.waiting.push(child)

    def schedule(self) -> StepPlan:
        """Plans one step and takes the blocks that it needs. An empty plan: nothing can run."""
        plan = StepPlan()
        running, blocks = self.running, self.blocks
        blocks.begin_plan()
        block_size = blocks.block_size
        budget = self.max_num_batched_tokens
        charge = self.policy.charge
        share = self._share()
        head = self._first_in_line()
        index = 0
        seq_ids = plan.seq_ids
        while len(seq_ids) < share:
            sequence = running[index] if index < len(running) else None
            if head is not None and (sequence is None or head.key < sequence.key):
                self._head_waits = not self._admit(head, index, budget, plan)
                if self._head_waits:
                    head = None  # nobody overtakes it
                    continue
                sequence, admitted = head, True
                head = self._first_in_line()
            elif sequence is None or budget == 0:
                break
            else:
                admitted = False
            start = sequence.num_computed
            count = min(len(sequence.tokens) - start, budget)
            if count == 0 and (sequence.is_beam or not admitted):
                index += 1  # it waits for the others of its group, or for its token
                continue
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
            seq_ids.append(sequence.seq_id)
            plan.starts.append(start)
            plan.num_tokens.append(count)
            budget -= count
            index += 1
            if charge is not None:
                charge(sequence, count)
        if plan:
            blocks.num_filled_slots += (self.max_num_batched_tokens - budget) * len(blocks.windows)
            plan.moves = blocks.take_moves()
            plan.finished, self._to_forget = self._to_forget, []
            plan.preempted = [seq_id for seq_id in self._to_void if seq_id in self.sequences] + plan.preempted
            self._to_void = []
            if not self._in_flight:
                self._planned_at = self.clock()
            self._in_flight.append(plan)
        else:
            self._to_void += plan.preempted
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[Sequence]:
        """Takes the tokens of the oldest plan in flight in; returns the sequences that it finished."""
        now = self.clock()
        self._in_flight.popleft()
        self._measure(plan, result, now)
        finished: list[Sequence] = []
        find = self.in_plan
        for seq_id, token in zip(plan.seq_ids, result.token_ids, strict=True):
            sequence = find(seq_id)
            if sequence is None:
                continue
            if token < 0:  # by now, a later plan in flight may have taken more of its tokens
                i = plan.seq_ids.index(seq_id)
                ended = plan.starts[i] + plan.num_tokens[i] == len(sequence.tokens)
                if ended and seq_id not in result.errors:
                    raise ValueError(f"the step sampled no token for sequence {seq_id}, and says no error")
                continue
            if sequence.is_beam:
                continue  # its group chooses
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
            waited = sequence.status is not Status.RUNNING  # preempted while its last token was in flight
            self._finish(sequence, now)
            if waited:
                self.waiting.discard(sequence)
        if finished:
            self.running = [s for s in self.running if s.status is Status.RUNNING]
        return finished

    def in_plan(self, seq_id: int) -> Sequence | None:
        """The sequence that a plan which is taken in means; None when that was aborted while the plan was in flight,
        though one of its number may have come again since: such a one is not admitted before."""
        sequence = self.sequences.get(seq_id)
        return None if sequence is None or sequence.first_scheduled_time is None else sequence

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
        elif sequence.key:
            self.waiting.discard(sequence)
        else:
            self.policy.discard(sequence)
        return sequence

    def fail(self, plan: StepPlan) -> None:
        """The only step in flight was not done, or not to its end: takes back that its tokens are computed, and its
        blocks published.

        Who came in with it may have begun with blocks that it should have filled, or with a copy that was not made:
        these wait again. All others go on from where they were.
        """
        self._in_flight.clear()
        self.blocks.withdraw_latest()
        planned = zip(plan.seq_ids, plan.starts, plan.num_tokens, strict=True)
        alive = [(self.sequences[seq_id], start, count) for seq_id, start, count in planned if seq_id in self.sequences]
        for sequence, start, count in alive:
            appended = plan.new_blocks.get(sequence.seq_id, [[]])[0]
            came_in = len(appended) == len(sequence.block_tables[0])
            if came_in or sequence.seq_id in plan.tails:
                self._preempt(sequence, "failure", self._to_void)
            else:
                sequence.num_computed = start
                self.blocks.num_filled_slots -= count * len(self.blocks.windows)
        self.running = [s for s in self.running if s.status is Status.RUNNING]

    def stats(self) -> SchedulerStats:
        pool, totals = self.blocks.pool, self._totals
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting) + len(self.policy),
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            num_used_blocks=pool.num_used,
            num_shared_blocks=pool.num_shared,
            peak_used_blocks=pool.peak_used,
            num_host_blocks=self.blocks.host.num_blocks,
            num_used_host_blocks=len(self.blocks.host),
            num_swapped_out_blocks=self.blocks.num_swapped_out,
            num_swapped_in_blocks=self.blocks.num_swapped_in,
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
            held = [block for table in s.block_tables for block in table if block != NOTHING]
            snapshot.sequences.append(
                SequenceBlocks(
                    s.seq_id,
                    s.status.value,
                    len(s.tokens),
                    s.num_computed,
                    s.num_cached_tokens,
                    s.num_preemptions,
                    [list(table) for table in s.block_tables],
                    sum(pool.ref_count(block) > 1 for block in held),
                )
            )
        return snapshot

    def _share(self) -> int:
        """How many sequences a plan takes at most."""
        if self.depth == 1:
            return self.max_num_seqs
        line = len(self.waiting) + len(self.policy)
        if self._head_waits:
            line = min(line, 1)  # so that the walk comes to it
        return -(-min(len(self.running) + line, self.max_num_seqs) // self.depth)

    def _first_in_line(self) -> Sequence | None:
        """The first of those that wait; where nobody has a place and there is a seat, the policy names one."""
        head = self.waiting.peek()
        if head is None and len(self.policy) and len(self.running) < self.max_num_seqs:
            head = self.policy.choose(self.blocks)
            if head is not None:
                head.key = (0, self._arrivals)
                self._arrivals += 1
                self.waiting.push(head)
        return head

    def _register(self, sequence: Sequence, key: tuple[int, ...]) -> None:
        if not 1 <= len(sequence.tokens) < sequence.max_length:
            raise RequestError(
                f"the request has {len(sequence.tokens)} known tokens; it needs at least 1, and fewer than its maximum "
                f"length of {sequence.max_length}"
            )
        needed = self.blocks.most_blocks(sequence.max_length - 1)
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

        It must find room for all its known tokens, not only for its first chunk, and for what the sequences before it
        may take until these are computed, a block each at least: else it would be preempted before it has got anywhere.
        A twin of the sequence before it costs no budget, and only the block that its first own token goes into.
        """
        running, pool, groups = self.running, self.blocks.pool, len(self.blocks.windows)
        if any(head.seq_id in before.seq_ids for before in self._in_flight):
            return False  # its next token may be on its way, or that of an aborted one that it is sent again for
        if len(running) == index and (index >= self.max_num_seqs or pool.num_available == 0):
            return False  # the usual answer, without a look at anything else
        twin = self._twin(head, index, plan)
        if twin is not None:
            prefix, needed, steps = twin.block_tables, groups * (len(head.tokens) < head.max_length - 1), 1
        elif budget > 0:
            prefix = self.blocks.find_prefix(head)
            # Those that are in use cost nothing; those that are cached count among the blocks available, and are taken.
            needed = self.blocks.most_blocks(len(head.tokens))
            gap = len(head.tokens) - len(prefix[0]) * self.blocks.block_size
            steps = -(-gap // max(self.max_num_batched_tokens - index, 1))
            needed -= sum(block >= 0 and pool.ref_count(block) > 0 for table in prefix for block in table)
        else:
            return False
        survivors = self._survivors(index, needed, prefix, steps)
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

    def _twin(self, head: Sequence, index: int, plan: StepPlan) -> Sequence | None:
        """The sequence before it, if that has just been planned to the end of the prompt that is all the head has."""
        if head.group is None or index == 0 or len(head.tokens) != head.prompt_length:
            return None
        twin = self.running[index - 1]
        ends = twin.num_computed == len(twin.tokens) == head.prompt_length and plan.seq_ids[-1:] == [twin.seq_id]
        return twin if twin.group == head.group and ends else None

    def _survivors(self, index: int, needed: int, prefix: BlockTables, steps: int) -> int | None:
        """How many of those that run may stay when one comes in at `index` and takes `needed` blocks more than those of
        `prefix` that are in use, in so many steps; None when even giving up all from `index` on is not enough."""
        pool, running = self.blocks.pool, self.running
        free, survivors = pool.num_available, len(running)
        if survivors == index and needed > free:
            return None
        if survivors < self.max_num_seqs and needed + index * self.blocks.growth_bound(steps) <= free:
            return survivors  # the usual answer, without a look at each of them
        needed += sum(self.blocks.most_growth(s, steps) for s in running[:index] if s.room < s.max_length - 1)
        kept = {block for table in prefix for block in table} if survivors > index else ()
        holders: dict[int, int] = {}  # of the victims' blocks: how many tables of others hold them
        while needed > free or survivors >= self.max_num_seqs:
            if survivors == index:
                return None
            survivors -= 1
            for table in running[survivors].block_tables:
                for block in table:
                    if block != NOTHING:
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
                    sequence.is_beam,
                )
            )
        if sequence.block_tables[0]:
            plan.new_blocks[sequence.seq_id] = [list(table) for table in sequence.block_tables]

    def _make_room(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        """Grows the block table for `num_tokens`, preempting from the end of the order; False when that is itself."""
        blocks = self.blocks
        blocks.release_unseen(sequence)
        while blocks.missing(sequence, num_tokens) > blocks.pool.num_available:
            if self.running[-1] is sequence:
                return False
            self._preempt(self.running.pop(), "growth", plan.preempted)
        tails, new_blocks = blocks.grow(sequence, num_tokens)
        if tails is not None:
            plan.tails[sequence.seq_id] = tails
        if sequence.first_scheduled_time is None:  # it was forked between steps
            self._introduce(sequence, plan)
        elif new_blocks is not None:
            told = plan.new_blocks.get(sequence.seq_id)
            merged = new_blocks if told is None else [a + b for a, b in zip(told, new_blocks, strict=True)]
            plan.new_blocks[sequence.seq_id] = merged
        return True

    def _preempt(self, sequence: Sequence, reason: PreemptionReason, told: list[int]) -> None:
        """Its blocks go back, by recompute or by swap, and it waits at its old place in the order."""
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
        swap = reason != "failure" and self._swaps(sequence)
        totals.num_preemptions_swap += swap
        self.blocks.free(sequence, swap=swap)
        sequence.num_computed = sequence.room = 0
        sequence.status = Status.PREEMPTED
        self.waiting.push(sequence)
        if sequence.first_scheduled_time is not None:
            told.append(sequence.seq_id)

    def _swaps(self, sequence: Sequence) -> bool:
        """Whether a victim's blocks are worth a place in the host tier."""
        if self.blocks.host.num_blocks == 0 or self.preemption_mode == "recompute":
            return False
        if self.preemption_mode == "swap":
            return True
        num_blocks = sum(block != NOTHING for table in sequence.block_tables for block in table)
        return self._cost.swap_pays(sequence.num_computed, num_blocks)

    def _finish(self, sequence: Sequence, now: float) -> None:
        sequence.finish_time = now
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        # What a failed sequence has computed may be what failed: others are to compute it themselves.
        self.blocks.free(sequence, keep=sequence.finish_reason != "error", swap=True)
        sequence.status = Status.FINISHED
        del self.sequences[sequence.seq_id]
        if sequence.first_scheduled_time is not None:
            self._to_forget.append(sequence.seq_id)

    def _measure(self, plan: StepPlan, result: StepResult, now: float) -> None:
        num_swaps = sum(move.kind != "copy" for move in plan.moves)
        if num_swaps:
            self._cost.add_moves(num_swaps, result.move_seconds)
        self._cost.add_step(sum(plan.num_tokens), now - self._planned_at - result.move_seconds)
        self._planned_at = now

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
