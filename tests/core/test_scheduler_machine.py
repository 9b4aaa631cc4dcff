"""Hypothesis drives the scheduler through additions, steps and aborts in any order, and every rule is checked.

Nothing is compared with the scheduler's own idea of right: the tokens and tables come from a worker that sees the plans
alone, and the order of service is derived here from arrivals and priorities.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from octavo.core import Scheduler, Sequence, Status, StepPlan
from octavo.errors import RequestError
from tests.core.helpers import PARAMS, ShadowWorker, make_scheduler

SEEDS = st.integers(0, 2**32 - 1)


class Request(NamedTuple):
    prompt: int
    generated: int  # a replayed request brings tokens that it generated before
    new_tokens: int
    priority: int
    stop: tuple[int, ...]


REQUESTS = st.builds(
    Request,
    prompt=st.integers(0, 12),
    generated=st.sampled_from([0, 0, 0, 1, 5]),
    new_tokens=st.integers(1, 12),
    priority=st.integers(-2, 2),
    stop=st.sampled_from([(), (), (0,), (0, 1)]),
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(["fcfs", "priority"]),
        blocks=st.integers(1, 20),
        block_size=st.integers(1, 5),
        seqs=st.sampled_from([1, 2, 3, 4, 6]),
        budget=st.one_of(st.integers(1, 4), st.integers(4, 40)),
        requests=st.lists(REQUESTS, min_size=2, max_size=6),
    )
    def make(self, policy: str, blocks: int, block_size: int, seqs: int, budget: int, requests: list[Request]) -> None:
        self.scheduler = make_scheduler(policy=policy, blocks=blocks, block_size=block_size, seqs=seqs, budget=budget)
        self.worker = ShadowWorker(blocks, block_size)
        self.policy = policy
        self.max_num_seqs = seqs
        self.budget = budget
        self.capacity = blocks * block_size
        self.plan: StepPlan | None = None  # in flight
        self.order: dict[int, tuple[int, int]] = {}  # of all sequences ever accepted
        self.all: dict[int, Sequence] = {}
        self.announced: set[int] = set()
        self.forgotten: set[int] = set()
        self.ended: Counter[int] = Counter()
        self.slots_held = self.slots_allocated = self.steps = self.computed = self.preemptions = 0
        self.add(requests)

    # -- rules

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=5))
    def add(self, requests: list[Request]) -> None:
        for request in requests:
            self.add_one(request)

    def add_one(self, request: Request) -> None:
        seq_id = len(self.order) + 100
        prompt = 1 + request.prompt % self.capacity  # most requests should fit into the pool
        known = prompt + request.generated
        sequence = Sequence(
            seq_id,
            [5 + i % 3 for i in range(known)],
            PARAMS,
            max_length=known + request.new_tokens,
            stop_token_ids=request.stop,
            priority=request.priority,
            prompt_length=prompt,
        )
        if sequence.max_length - 1 > self.capacity:
            with pytest.raises(RequestError):
                self.scheduler.add(sequence)
            return
        self.scheduler.add(sequence)
        self.order[seq_id] = (request.priority if self.policy == "priority" else 0, len(self.order))
        self.all[seq_id] = sequence

    @rule(pick=SEEDS)
    def abort(self, pick: int) -> None:
        if not self.scheduler.sequences:
            assert self.scheduler.abort(-1) is None
            return
        seq_id = sorted(self.scheduler.sequences)[pick % len(self.scheduler.sequences)]
        sequence = self.scheduler.abort(seq_id)
        assert sequence is self.all[seq_id]
        assert sequence.finish_reason == "abort"
        self.ended[seq_id] += 1
        assert self.scheduler.abort(seq_id) is None

    @rule(seed=SEEDS, fails=st.sampled_from([False, False, False, True]))
    def half_step(self, seed: int, fails: bool) -> None:
        """So that anything can come between schedule() and update()."""
        if self.plan is None:
            self.schedule()
        else:
            self.update(seed, fails)

    @rule(steps=st.integers(2, 8), seed=SEEDS)
    def run(self, steps: int, seed: int) -> None:
        for i in range(steps):
            self.half_step(seed + i, False)
            if self.plan is not None:
                self.half_step(seed + i, False)
            self.check_blocks()
            self.check_sets()
            self.check_worker()
            self.check_stats()

    def schedule(self) -> None:
        before = Before(self)
        plan = self.scheduler.schedule()
        check_plan(self, before, plan)
        check_order(self, before, plan)
        self.announced |= {new.seq_id for new in plan.new}
        self.forgotten |= set(plan.finished)
        self.preemptions += len(plan.preempted)
        self.plan = plan if plan else None

    def update(self, seed: int, fails: bool) -> None:
        plan, self.plan = self.plan, None
        assert plan is not None
        rng = random.Random(seed)
        failing = rng.choice(plan.seq_ids) if fails else None
        result = self.worker.execute(plan, lambda *_: rng.randrange(8), failing)
        sampled = {i for i, token in zip(plan.seq_ids, result.token_ids, strict=True) if token >= 0}
        counts = dict(zip(plan.seq_ids, plan.num_tokens, strict=True))
        self.steps += 1
        self.computed += sum(count for seq_id, count in counts.items() if seq_id in self.scheduler.sequences)
        self.slots_held += sum(s.num_computed + counts.get(s.seq_id, 0) for s in self.scheduler.running)
        self.slots_allocated += self.scheduler.blocks.pool.num_used * self.scheduler.blocks.block_size
        alive = set(self.scheduler.sequences)
        for sequence in self.scheduler.update(plan, result):
            assert sequence.seq_id in alive & (sampled | set(result.errors))
            assert sequence.status is Status.FINISHED
            assert (sequence.finish_reason == "error") == (sequence.seq_id in result.errors)
            self.ended[sequence.seq_id] += 1

    # -- what always holds

    @invariant()
    def check_blocks(self) -> None:
        scheduler, manager = self.scheduler, self.scheduler.blocks
        pool = manager.pool
        assert pool.num_free + pool.num_used == pool.num_blocks
        holders = Counter(block for s in scheduler.sequences.values() for block in s.block_table)
        assert [pool.ref_count(block) for block in range(pool.num_blocks)] == [
            holders[block] for block in range(pool.num_blocks)
        ]
        assert all(count == 1 for count in holders.values())
        assert pool.num_used == len(holders) <= pool.peak_used
        in_flight = dict(zip(self.plan.seq_ids, self.plan.num_tokens, strict=True)) if self.plan else {}
        for sequence in self.all.values():
            covered = sequence.num_computed + in_flight.get(sequence.seq_id, 0)
            blocks = manager.blocks_for(covered) if sequence.status is Status.RUNNING else 0
            assert len(sequence.block_table) == blocks

    @invariant()
    def check_sets(self) -> None:
        scheduler = self.scheduler
        running = [s.seq_id for s in scheduler.running]
        assert running == sorted(running, key=self.order.__getitem__)
        assert len(running) <= self.max_num_seqs
        assert set(running) == {i for i, s in self.all.items() if s.status is Status.RUNNING}
        waiting = {i for i, s in self.all.items() if s.status in (Status.WAITING, Status.PREEMPTED)}
        assert len(scheduler.waiting) == len(waiting)
        first = scheduler.waiting.peek()
        assert (first.seq_id if first else None) == min(waiting, key=self.order.__getitem__, default=None)
        assert set(scheduler.sequences) == set(running) | waiting
        for seq_id, sequence in self.all.items():
            assert self.ended[seq_id] == (sequence.status is Status.FINISHED)
            assert (sequence.status is Status.FINISHED) == (sequence.finish_reason is not None)
            if sequence.status is not Status.FINISHED:
                assert sequence.num_computed <= len(sequence.tokens) < sequence.max_length

    @invariant()
    def check_worker(self) -> None:
        if self.plan is None:
            for seq_id in self.scheduler.sequences.keys() & self.announced:
                sequence = self.all[seq_id]
                assert self.worker.tokens[seq_id] == sequence.tokens
                if sequence.status is Status.RUNNING:  # a preemption is reported with the plan that caused it
                    assert self.worker.tables[seq_id] == sequence.block_table
                    assert self.worker.computed[seq_id] == sequence.num_computed

    @invariant()
    def check_stats(self) -> None:
        stats = self.scheduler.stats()
        assert (stats.num_steps, stats.num_tokens, stats.num_preemptions) == (
            self.steps,
            self.computed,
            self.preemptions,
        )
        expected = self.slots_held / self.slots_allocated if self.slots_allocated else 0.0
        assert stats.slot_utilization == expected <= 1.0
        assert self.preemptions == sum(s.num_preemptions for s in self.all.values())

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        # The first in the order never loses its blocks and computes at least one of its tokens a step.
        bound = sum(s.max_length - 1 for s in self.scheduler.sequences.values()) + (self.plan is not None)
        steps = 0
        while self.scheduler.sequences or self.plan is not None:
            assert steps <= bound
            self.run(1, steps)
            steps += 1
        for sequence in self.all.values():
            check_ending(sequence)
        assert self.scheduler.running == []
        assert len(self.scheduler.waiting) == 0
        assert self.scheduler.blocks.pool.num_used == 0
        self.add_one(Request(prompt=0, generated=0, new_tokens=1, priority=0, stop=()))
        self.run(1, 0)
        assert self.forgotten == self.announced - {max(self.all)}
        assert set(self.worker.tokens) == {max(self.all)}


class Before:
    """What the order of service is judged by: the state before a plan is made."""

    def __init__(self, machine: SchedulerMachine) -> None:
        scheduler = machine.scheduler
        self.running = [s.seq_id for s in scheduler.running]
        self.waiting = sorted(scheduler.sequences.keys() - set(self.running), key=machine.order.__getitem__)
        self.free = scheduler.blocks.pool.num_free
        self.tables = {s.seq_id: list(s.block_table) for s in scheduler.sequences.values()}
        self.computed = {s.seq_id: s.num_computed for s in scheduler.sequences.values()}
        self.gaps = {s.seq_id: len(s.tokens) - s.num_computed for s in scheduler.sequences.values()}


def check_plan(machine: SchedulerMachine, before: Before, plan: StepPlan) -> None:
    """The plan is possible, complete, and says everything exactly once."""
    sequences = machine.scheduler.sequences
    assert bool(plan) == bool(sequences)
    assert len(set(plan.seq_ids)) == len(plan.seq_ids) == len(plan.starts) == len(plan.num_tokens)
    assert sum(plan.num_tokens) <= machine.budget
    assert all(count > 0 for count in plan.num_tokens)
    assert plan.starts == [sequences[i].num_computed for i in plan.seq_ids]
    assert {new.seq_id for new in plan.new} == set(plan.seq_ids) - machine.announced
    assert len(plan.new) == len({new.seq_id for new in plan.new})
    for new in plan.new:
        sequence = sequences[new.seq_id]
        assert (new.tokens, new.prompt_length) == (sequence.tokens, sequence.prompt_length)
        assert new.tokens is not sequence.tokens  # plain data, not a view of what goes on changing
    assert not set(plan.preempted) & set(plan.seq_ids)
    assert len(set(plan.preempted)) == len(plan.preempted)
    assert set(plan.preempted) <= set(before.running)
    assert set(plan.new_blocks) <= set(plan.seq_ids)
    for seq_id in plan.seq_ids:
        assert before.tables[seq_id] + plan.new_blocks.get(seq_id, []) == sequences[seq_id].block_table
    if plan:
        done = {i for i in machine.announced if machine.ended[i]} - machine.forgotten
        assert sorted(plan.finished) == sorted(done)
    else:
        assert plan == StepPlan()


def check_order(machine: SchedulerMachine, before: Before, plan: StepPlan) -> None:
    """Nobody is served before someone earlier in the order who could have been served."""
    order, scheduler = machine.order, machine.scheduler
    running = [s.seq_id for s in scheduler.running]
    assert plan.seq_ids == running[: len(plan.seq_ids)]  # the first of them, without a gap
    if not plan:
        return
    assert plan.seq_ids[0] == min(order.keys() & scheduler.sequences.keys(), key=order.__getitem__)
    gaps = [before.gaps[i] if i in before.running else len(scheduler.sequences[i].tokens) for i in plan.seq_ids]
    left = machine.budget - sum(plan.num_tokens)
    assert plan.num_tokens[:-1] == gaps[:-1]
    assert plan.num_tokens[-1] == gaps[-1] or left == 0
    if len(plan.seq_ids) < len(running) and left > 0:
        check_last_had_no_room(machine, running[len(plan.seq_ids) :], left)

    admitted = [i for i in running if i not in before.running]
    assert admitted == before.waiting[: len(admitted)]
    for seq_id in admitted:
        check_admitted_with_room(machine, before, plan, seq_id)
    assert all(order[victim] > order[running[-1]] for victim in plan.preempted)
    if plan.preempted:
        check_victims_were_needed(machine, before, plan, admitted)
    elif len(admitted) < len(before.waiting):
        check_head_had_no_room(machine, before, plan, before.waiting[len(admitted)])


def check_last_had_no_room(machine: SchedulerMachine, left_out: list[int], budget: int) -> None:
    """Only the very last sits a step out, for want of a block, and it keeps those that it has."""
    scheduler = machine.scheduler
    (last,) = (scheduler.sequences[i] for i in left_out)
    wanted = last.num_computed + min(len(last.tokens) - last.num_computed, budget)
    assert scheduler.blocks.missing(last, wanted) > scheduler.blocks.pool.num_free
    assert len(last.block_table) == scheduler.blocks.blocks_for(last.num_computed)


def check_admitted_with_room(machine: SchedulerMachine, before: Before, plan: StepPlan, admitted: int) -> None:
    """Whoever came in found room for all its known tokens, and a block for each before it that may need one."""
    scheduler = machine.scheduler
    others = [s.seq_id for s in scheduler.running if s.seq_id != admitted]
    earlier = {i for i in others if machine.order[i] < machine.order[admitted]}
    free = before.free - sum(len(plan.new_blocks.get(i, [])) for i in earlier)
    free += sum(len(before.tables[i]) for i in plan.preempted)
    growing = {i for i in earlier if may_grow(scheduler, i, before.tables.get(i, []), plan)}
    assert scheduler.blocks.blocks_for(len(scheduler.sequences[admitted].tokens)) + len(growing) <= free


def may_grow(scheduler: Scheduler, seq_id: int, table: list[int], plan: StepPlan) -> bool:
    """Whether a sequence may still need a block, with what the plan has given it."""
    held = len(table) + len(plan.new_blocks.get(seq_id, []))
    return scheduler.blocks.blocks_for(scheduler.sequences[seq_id].max_length - 1) > held


def check_victims_were_needed(machine: SchedulerMachine, before: Before, plan: StepPlan, admitted: list[int]) -> None:
    """With the last victim kept, there would be no seat or no room.

    Room is what the rule of admission wants: the rest of the known tokens of those admitted, and a block for each that
    runs and may still need one.
    """
    scheduler, manager = machine.scheduler, machine.scheduler.blocks
    growing = [s for s in scheduler.running if manager.missing(s, s.max_length - 1) > 0]
    reserved = len(growing) + sum(
        manager.missing(scheduler.sequences[i], len(scheduler.sequences[i].tokens)) for i in admitted
    )
    kept = min(plan.preempted, key=machine.order.__getitem__)
    growth = min(before.gaps[kept], machine.budget - sum(plan.num_tokens))
    no_room = manager.blocks_for(before.computed[kept] + growth) > manager.pool.num_free - reserved
    no_seat = len(scheduler.running) + 1 > machine.max_num_seqs
    assert no_room or no_seat


def check_head_had_no_room(machine: SchedulerMachine, before: Before, plan: StepPlan, head: int) -> None:
    """The first that still waits finds no budget, no seat or no room, even at the cost of all that come after it."""
    order, scheduler = machine.order, machine.scheduler
    earlier = [s.seq_id for s in scheduler.running if order[s.seq_id] < order[head]]
    later = [i for i in before.running if order[i] > order[head]]
    counts = dict(zip(plan.seq_ids, plan.num_tokens, strict=True))
    budget = machine.budget - sum(counts.get(i, 0) for i in earlier)
    free = before.free - sum(len(plan.new_blocks.get(i, [])) for i in earlier)
    free += sum(len(before.tables[i]) for i in later)
    growing = [i for i in earlier if may_grow(scheduler, i, before.tables.get(i, []), plan)]
    needed = scheduler.blocks.blocks_for(len(scheduler.sequences[head].tokens)) + len(growing)
    assert budget == 0 or len(earlier) >= machine.max_num_seqs or needed > free


def check_ending(sequence: Sequence) -> None:
    """Why it ended is what its tokens say."""
    sampled = sequence.tokens[sequence.prompt_length :]
    assert not set(sampled[:-1]) & sequence.stop_token_ids
    if sequence.finish_reason == "stop":
        assert sampled[-1] in sequence.stop_token_ids
    elif sequence.finish_reason == "length":
        assert len(sequence.tokens) == sequence.max_length
        assert sampled[-1] not in sequence.stop_token_ids
    else:
        assert sequence.finish_reason in ("abort", "error")
        assert len(sequence.tokens) < sequence.max_length
    assert sequence.block_table == []


TestSchedulerMachine = pytest.mark.slow(SchedulerMachine.TestCase)
TestSchedulerMachine.settings = settings(max_examples=2000, stateful_step_count=25, deadline=None)
