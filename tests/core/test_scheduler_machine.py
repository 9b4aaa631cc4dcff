"""Hypothesis drives the scheduler through additions, steps and aborts in any order, and every rule is checked.

Nothing is compared with the scheduler's own idea of right: the tokens and tables come from a worker that sees the plans
alone and reads every token back through its tables, and the order of service is derived here from arrivals and
priorities. Prompts begin alike, so that blocks are found again, and come in groups, which fork.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.core import Sequence, Status, StepPlan
from octavo.errors import RequestError
from tests.core.helpers import PARAMS, ShadowWorker, make_scheduler

SEEDS = st.integers(0, 2**32 - 1)


class Request(NamedTuple):
    prompt: int
    generated: int  # a replayed request brings tokens that it generated before
    new_tokens: int
    priority: int
    stop: tuple[int, ...]
    choices: int = 1
    differs_at: int = 99  # the token at this position is another than in other prompts
    salt: str | None = None


REQUESTS = st.builds(
    Request,
    prompt=st.integers(0, 12),
    generated=st.sampled_from([0, 0, 0, 1, 5]),
    new_tokens=st.integers(1, 12),
    priority=st.integers(-2, 2),
    stop=st.sampled_from([(), (), (0,), (0, 1)]),
    choices=st.sampled_from([1, 1, 2, 3]),
    differs_at=st.sampled_from([99, 99, 0, 5]),
    salt=st.sampled_from([None, None, None, "a"]),
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(["fcfs", "priority"]),
        blocks=st.integers(1, 20),
        block_size=st.integers(1, 5),
        seqs=st.sampled_from([1, 2, 3, 4, 6]),
        budget=st.one_of(st.integers(1, 4), st.integers(4, 40)),
        caching=st.sampled_from([True, True, True, False]),
        requests=st.lists(REQUESTS, min_size=2, max_size=6),
    )
    def make(self, requests: list[Request], blocks: int, block_size: int, seqs: int, budget: int, **rest: Any) -> None:
        self.scheduler = make_scheduler(blocks=blocks, block_size=block_size, seqs=seqs, budget=budget, **rest)
        self.worker = ShadowWorker(blocks, block_size, lambda seq_id: self.all[seq_id].cache_salt)
        self.policy = rest["policy"]
        self.max_num_seqs = seqs
        self.budget = budget
        self.capacity = blocks * block_size
        self.plan: StepPlan | None = None  # in flight
        self.order: dict[int, tuple[int, ...]] = {}  # of all sequences ever accepted
        self.all: dict[int, Sequence] = {}
        self.announced: set[int] = set()
        self.forgotten: set[int] = set()
        self.ended: Counter[int] = Counter()
        self.unwritten: set[int] = set()  # forked, or forked from, and nothing computed since
        self.voided: set[int] = set()  # by a failed step, to be told with the next plan
        self.covered: dict[int, int] = {}  # positions that a failed step has left a place for
        self.slots_held = self.slots_allocated = self.steps = self.computed = 0
        self.add(requests)

    # -- rules

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=5))
    def add(self, requests: list[Request]) -> None:
        for request in requests:
            self.add_one(request)

    def add_one(self, request: Request) -> None:
        group = len(self.order) + 100
        prompt = 1 + request.prompt % self.capacity  # most requests should fit into the pool
        known = prompt + request.generated
        tokens = [5 + i % 3 + 10 * (i == request.differs_at) for i in range(known)]
        for choice in range(request.choices):
            sequence = Sequence(
                group + choice,
                list(tokens),
                PARAMS,
                max_length=known + request.new_tokens,
                stop_token_ids=request.stop,
                priority=request.priority,
                prompt_length=prompt,
                cache_salt=request.salt,
                group=group,
                choice=choice,
            )
            if sequence.max_length - 1 > self.capacity:
                with pytest.raises(RequestError):
                    self.scheduler.add(sequence)
                return
            self.scheduler.add(sequence)
            self.accept(sequence, (request.priority if self.policy == "priority" else 0, len(self.order)))

    def accept(self, sequence: Sequence, place: tuple[int, ...]) -> None:
        self.order[sequence.seq_id] = place
        self.all[sequence.seq_id] = sequence

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
            self.check_sharing()
            self.check_sets()
            self.check_worker()
            self.check_stats()

    @precondition(lambda self: self.plan is not None)
    @rule()
    def fail(self) -> None:
        """The executor raises: the workers were told of the plan, and what it should have written is anything."""
        plan, self.plan = self.plan, None
        self.worker.take_differences(plan)
        for seq_id, start, count in zip(plan.seq_ids, plan.starts, plan.num_tokens, strict=True):
            for position in range(start, start + count):
                block = self.worker.tables[seq_id][position // self.worker.block_size]
                self.worker.cache[block][position % self.worker.block_size] = None
            self.covered[seq_id] = max(start + count, self.covered.get(seq_id, 0))
        running = list(self.scheduler.running)
        starts = dict(zip(plan.seq_ids, plan.starts, strict=True))
        self.scheduler.fail(plan)
        assert self.scheduler.running == [s for s in running if s.status is Status.RUNNING]
        assert all(s.num_computed == starts.get(s.seq_id, s.num_computed) for s in self.scheduler.running)
        self.voided |= {s.seq_id for s in running if s.status is Status.PREEMPTED}
        self.unwritten -= self.voided

    def schedule(self) -> None:
        before = Before(self)
        plan = self.scheduler.schedule()
        self.follow_forks(plan)
        check_plan(self, before, plan)
        check_order(self, before, plan)
        self.announced |= {new.seq_id for new in plan.new}
        self.forgotten |= set(plan.finished)
        if plan:
            self.voided.clear()
        self.plan = plan if plan else None

    def follow_forks(self, plan: StepPlan) -> None:
        self.unwritten -= set(plan.preempted)  # some of these may have come in again
        previous = None
        for seq_id, count in zip(plan.seq_ids, plan.num_tokens, strict=True):
            if count > 0:
                self.unwritten.discard(seq_id)
            else:
                assert previous is not None
                self.unwritten |= {previous, seq_id}
            previous = seq_id

    def update(self, seed: int, fails: bool) -> None:
        plan, self.plan = self.plan, None
        assert plan is not None
        rng = random.Random(seed)
        failing = rng.choice(plan.seq_ids) if fails else None
        result = self.worker.execute(plan, lambda *_: rng.randrange(8), failing)
        sampled = {i for i, token in zip(plan.seq_ids, result.token_ids, strict=True) if token >= 0}
        self.steps += 1
        self.computed += sum(plan.num_tokens)
        self.slots_held += self.filled_slots()
        self.slots_allocated += self.scheduler.blocks.pool.num_used * self.scheduler.blocks.block_size
        alive = set(self.scheduler.sequences)
        for sequence in self.scheduler.update(plan, result):
            assert sequence.seq_id in alive & (sampled | set(result.errors))
            assert sequence.status is Status.FINISHED
            assert (sequence.finish_reason == "error") == (sequence.seq_id in result.errors)
            self.ended[sequence.seq_id] += 1

    def places(self, sequence: Sequence) -> int:
        return max(sequence.num_computed, self.covered.get(sequence.seq_id, 0))

    def filled_slots(self) -> int:
        """Of the blocks in use, each counted once."""
        size = self.scheduler.blocks.block_size
        return len(
            {(s.block_table[p // size], p % size) for s in self.scheduler.running for p in range(s.num_computed)}
        )

    # -- what always holds

    @invariant()
    def check_blocks(self) -> None:
        scheduler, manager = self.scheduler, self.scheduler.blocks
        pool = manager.pool
        assert pool.num_free + pool.num_cached + pool.num_used == pool.num_blocks
        assert pool.num_available == pool.num_free + pool.num_cached
        states = Counter(pool.state(block) for block in range(pool.num_blocks))
        assert [states[s] for s in ("free", "cached", "used")] == [pool.num_free, pool.num_cached, pool.num_used]
        holders = Counter(block for s in scheduler.sequences.values() for block in s.block_table)
        assert [pool.ref_count(block) for block in range(pool.num_blocks)] == [
            holders[block] for block in range(pool.num_blocks)
        ]
        assert pool.num_used == len(holders) <= pool.peak_used
        assert pool.num_shared == sum(count > 1 for count in holders.values())
        assert manager.num_filled_slots == self.filled_slots()
        assert manager.caching or pool.num_cached == 0
        for sequence in self.all.values():
            if sequence.status is not Status.RUNNING:
                self.covered.pop(sequence.seq_id, None)
                assert sequence.block_table == []
            else:
                assert len(sequence.block_table) == manager.blocks_for(self.places(sequence))
        snapshot = scheduler.kv_snapshot()
        assert {block: len(owners) for block, owners in snapshot.owners.items()} == holders
        assert {block for block, state in enumerate(snapshot.states) if state == "used"} == set(holders)

    @invariant()
    def check_sharing(self) -> None:
        """Of a block in several tables, all its holders have computed equally much: nobody has written on alone."""
        size = self.scheduler.blocks.block_size
        fills: dict[int, set[int]] = {}
        for sequence in self.scheduler.running:
            for index, block in enumerate(sequence.block_table):
                fills.setdefault(block, set()).add(min(sequence.num_computed - index * size, size))
        holders = Counter(block for sequence in self.scheduler.running for block in sequence.block_table)
        assert all(len(fill) == 1 for fill in fills.values())
        assert all(holders[block] == 1 for block, (fill,) in fills.items() if fill <= 0)

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
        assert (stats.num_steps, stats.num_tokens) == (self.steps, self.computed)
        expected = self.slots_held / self.slots_allocated if self.slots_allocated else 0.0
        assert stats.slot_utilization == expected <= 1.0
        assert stats.num_preemptions == sum(s.num_preemptions for s in self.all.values())
        assert stats.prefix_cache_hits <= stats.prefix_cache_queries

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
        self.tables = {s.seq_id: list(s.block_table) for s in scheduler.sequences.values()}
        self.computed = {s.seq_id: s.num_computed for s in scheduler.sequences.values()}
        self.preemptions = {s.seq_id: s.num_preemptions for s in scheduler.running}
        self.gaps = {s.seq_id: len(s.tokens) - s.num_computed for s in scheduler.running}

    def stayed(self, sequence: Sequence) -> bool:
        """Whether it ran before, and has kept its blocks."""
        return self.preemptions.get(sequence.seq_id) == sequence.num_preemptions


def check_plan(machine: SchedulerMachine, before: Before, plan: StepPlan) -> None:
    """The plan is possible, complete, and says everything exactly once."""
    sequences = machine.scheduler.sequences
    assert bool(plan) == bool(sequences)
    assert len(set(plan.seq_ids)) == len(plan.seq_ids) == len(plan.starts) == len(plan.num_tokens)
    assert sum(plan.num_tokens) <= machine.budget
    for i, (seq_id, start, count) in enumerate(zip(plan.seq_ids, plan.starts, plan.num_tokens, strict=True)):
        assert start + count == sequences[seq_id].num_computed
        if before.stayed(sequences[seq_id]):
            assert start == before.computed[seq_id]
            assert count > 0
        elif count == 0:
            check_twin(sequences[plan.seq_ids[i - 1]], sequences[seq_id])
        else:
            assert start % machine.worker.block_size == 0
    assert {new.seq_id for new in plan.new} == set(plan.seq_ids) - machine.announced
    assert len(plan.new) == len({new.seq_id for new in plan.new})
    for new in plan.new:
        sequence = sequences[new.seq_id]
        assert (new.tokens, new.prompt_length) == (sequence.tokens, sequence.prompt_length)
        assert new.tokens is not sequence.tokens  # plain data, not a view of what goes on changing
    assert len(set(plan.preempted)) == len(plan.preempted)
    assert set(plan.preempted) <= (set(before.running) | machine.voided) & machine.announced
    assert set(plan.new_blocks) | set(plan.copies) <= set(plan.seq_ids)
    for seq_id in plan.seq_ids:
        told = list(before.tables[seq_id]) if before.stayed(sequences[seq_id]) and seq_id in machine.announced else []
        if seq_id in plan.copies and told:
            index = before.computed[seq_id] // machine.worker.block_size
            assert told[index] == plan.copies[seq_id][0]
            told[index] = plan.copies[seq_id][1]
        assert told + plan.new_blocks.get(seq_id, []) == sequences[seq_id].block_table
    for seq_id, (_, copy) in plan.copies.items():
        assert copy in sequences[seq_id].block_table
    if plan:
        done = {i for i in machine.announced if machine.ended[i]} - machine.forgotten
        assert sorted(plan.finished) == sorted(done)
    else:
        assert plan == StepPlan()


def check_twin(parent: Sequence, child: Sequence) -> None:
    """One that samples from the logits of the sequence before it has the very same tokens, none of them sampled."""
    assert child.group == parent.group is not None
    assert child.tokens == parent.tokens
    assert child.num_computed == parent.num_computed == len(child.tokens) == child.prompt_length
    assert child.block_table == parent.block_table


def check_order(machine: SchedulerMachine, before: Before, plan: StepPlan) -> None:
    """Nobody is served before someone earlier in the order who could have been served."""
    order, scheduler = machine.order, machine.scheduler
    running = [s.seq_id for s in scheduler.running]
    assert plan.seq_ids == running[: len(plan.seq_ids)]  # the first of them, without a gap
    if not plan:
        return
    assert plan.seq_ids[0] == min(order.keys() & scheduler.sequences.keys(), key=order.__getitem__)
    gaps = [len(scheduler.sequences[i].tokens) - start for i, start in zip(plan.seq_ids, plan.starts, strict=True)]
    left = machine.budget - sum(plan.num_tokens)
    assert plan.num_tokens[:-1] == gaps[:-1]
    assert plan.num_tokens[-1] == gaps[-1] or left == 0
    if len(plan.seq_ids) < len(running) and left > 0:
        check_last_had_no_room(machine, running[len(plan.seq_ids) :], left)

    gone = {i for i in before.running if not before.stayed(scheduler.sequences[i])}
    admitted = [s.seq_id for s in scheduler.running if not before.stayed(s)]
    assert admitted == sorted([*before.waiting, *gone], key=order.__getitem__)[: len(admitted)]
    for seq_id in admitted:
        check_admitted_with_room(machine, before, plan, seq_id)
    assert all(order[victim] > order[running[-1]] for victim in gone.difference(admitted))
    if gone.intersection(admitted):
        return  # it came back at once: what it held twice, others hold too
    if gone:
        check_victims_were_needed(machine, before, plan, admitted)
    elif len(admitted) < len(before.waiting):
        check_head_had_no_room(machine, before, plan, before.waiting[len(admitted)])


def check_last_had_no_room(machine: SchedulerMachine, left_out: list[int], budget: int) -> None:
    """Only the very last sits a step out, for want of a block, and it keeps those that it has."""
    scheduler = machine.scheduler
    (last,) = (scheduler.sequences[i] for i in left_out)
    wanted = last.num_computed + min(len(last.tokens) - last.num_computed, budget)
    assert scheduler.blocks.missing(last, wanted) > scheduler.blocks.pool.num_available
    assert len(last.block_table) == scheduler.blocks.blocks_for(machine.places(last))


def check_admitted_with_room(machine: SchedulerMachine, before: Before, plan: StepPlan, admitted: int) -> None:
    """Whoever came in found room for all its known tokens, and a block for each before it that may need one."""
    scheduler, manager = machine.scheduler, machine.scheduler.blocks
    sequence = scheduler.sequences[admitted]
    earlier = [s for s in scheduler.running if machine.order[s.seq_id] < machine.order[admitted]]
    kept = {s.seq_id for s in scheduler.running if before.stayed(s)}
    later = {i for i in kept if machine.order[i] > machine.order[admitted]}
    in_use = {block for s in earlier for block in s.block_table}.union(*(before.tables[i] for i in later))
    at = plan.seq_ids.index(admitted)
    found = set(sequence.block_table[: plan.starts[at] // manager.block_size])
    needed = manager.blocks_for(len(sequence.tokens)) - len(found & in_use) if plan.num_tokens[at] else 1
    growing = sum(manager.blocks_for(s.max_length - 1) > len(s.block_table) for s in earlier)
    assert needed + growing <= manager.pool.num_blocks - len(in_use)


def adopted(machine: SchedulerMachine, plan: StepPlan, seq_id: int) -> list[int]:
    """The blocks that one that came in has found computed."""
    size = machine.worker.block_size
    return machine.scheduler.sequences[seq_id].block_table[: -(-plan.starts[plan.seq_ids.index(seq_id)] // size)]


def may_grow(machine: SchedulerMachine, sequence: Sequence) -> bool:
    """Whether it may still need a block: for tokens to come, or for a copy of one that it shares."""
    if sequence.seq_id in machine.unwritten:
        return sequence.num_computed < sequence.max_length - 1
    return machine.scheduler.blocks.blocks_for(sequence.max_length - 1) > len(sequence.block_table)


def check_victims_were_needed(machine: SchedulerMachine, before: Before, plan: StepPlan, admitted: list[int]) -> None:
    """With the last victim kept, there would be no seat or no room.

    Room is what the rule of admission wants: the rest of the known tokens of those admitted, and a block for each that
    runs and may still need one.
    """
    scheduler, manager = machine.scheduler, machine.scheduler.blocks
    running = {s.seq_id for s in scheduler.running}
    reserved = sum(may_grow(machine, s) for s in scheduler.running) + sum(
        manager.missing(scheduler.sequences[i], len(scheduler.sequences[i].tokens)) for i in admitted
    )
    kept = min(set(before.running) - running, key=machine.order.__getitem__)
    growth = min(before.gaps[kept], machine.budget - sum(plan.num_tokens))
    needed = manager.blocks_for(before.computed[kept] + growth) + 1  # one for the copy of a block that it shared
    held = {block for i in running for block in before.tables[i]}.union(*(adopted(machine, plan, i) for i in admitted))
    needed -= len(held.intersection(before.tables[kept]))
    no_room = needed > manager.pool.num_available - reserved
    no_seat = len(scheduler.running) + 1 > machine.max_num_seqs
    assert no_room or no_seat


def check_head_had_no_room(machine: SchedulerMachine, before: Before, plan: StepPlan, head: int) -> None:
    """The first that still waits finds no budget, no seat or no room, even at the cost of all that come after it.

    Or one before it sits this step out for want of room: nobody overtakes that one.
    """
    order, scheduler, manager = machine.order, machine.scheduler, machine.scheduler.blocks
    sequence = scheduler.sequences[head]
    earlier = [s for s in scheduler.running if order[s.seq_id] < order[head]]
    counts = dict(zip(plan.seq_ids, plan.num_tokens, strict=True))
    budget = machine.budget - sum(counts.get(s.seq_id, 0) for s in earlier)
    in_use = {block for s in earlier for block in s.block_table}
    needed = manager.blocks_for(len(sequence.tokens)) - len(in_use.intersection(manager.find_prefix(sequence)))
    growing = sum(may_grow(machine, s) for s in earlier)
    no_room = needed + growing > manager.pool.num_blocks - len(in_use)
    sits_out = any(s.seq_id not in counts for s in earlier)
    assert budget == 0 or len(earlier) >= machine.max_num_seqs or no_room or sits_out


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
# The same examples every time: what fails here fails because of a change. To search on, take derandomize away.
TestSchedulerMachine.settings = settings(max_examples=2000, stateful_step_count=25, deadline=None, derandomize=True)
