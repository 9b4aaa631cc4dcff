"""Hypothesis drives the scheduler through additions, steps and aborts in any order, and every rule is checked.

Nothing is compared with the scheduler's own idea of right: the tokens and tables come from a worker that sees the plans
alone and reads every token back through its tables, and the order of service is derived here from arrivals and
priorities. Prompts begin alike, so that blocks are found again, and come in groups, which fork, or as beams, which
branch. Some layers look back over a window only, and what is pushed out of the pool may go to a host tier.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.core import NOTHING, Sequence, Status, StepPlan
from octavo.errors import RequestError
from tests.core.helpers import PARAMS, ShadowWorker, make_scheduler
from tests.core.machine_checks import Before, check_ending, check_order, check_plan, check_share, held

EVENTS = (
    "copy", "swap_out", "swap_in", "twin", "beam", "beam preempted", "hit", "preempted", "preempted for a newcomer",
    "came back", "fell out of a window",
)  # fmt: skip
SEEN: Counter[str] = Counter()

SEEDS = st.integers(0, 2**32 - 1)


class Request(NamedTuple):
    prompt: int
    generated: int  # a replayed request brings tokens that it generated before
    new_tokens: int
    priority: int
    stop: tuple[int, ...]
    choices: int = 1
    beams: int = 0
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
    beams=st.sampled_from([0, 0, 0, 1, 2, 3]),
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
        windows=st.sampled_from([(None,), (None,), (None,), (None, None), (None, 3), (6,), (None, 1, 5, 5)]),
        host=st.sampled_from([0, 0, 1, 4, 50]),
        mode=st.sampled_from(["auto", "swap", "recompute"]),
        depth=st.sampled_from([1, 1, 2, 4]),
        requests=st.lists(REQUESTS, min_size=2, max_size=6),
    )
    def make(self, requests: list[Request], blocks: int, block_size: int, seqs: int, budget: int, **rest: Any) -> None:
        blocks *= len(rest["windows"])
        rest["host"] *= rest["caching"]
        self.scheduler = make_scheduler(blocks=blocks, block_size=block_size, seqs=seqs, budget=budget, **rest)
        self.worker = ShadowWorker(self.scheduler, lambda seq_id: self.all[seq_id].cache_salt)
        self.policy = rest["policy"]
        self.max_num_seqs = seqs
        self.budget = budget
        fits = [n for n in range(1, 101) if self.scheduler.blocks.most_blocks(n) <= blocks]
        self.capacity = max(fits)  # tokens of one sequence
        self.beams: dict[tuple[int, int], list[Sequence]] = {}  # that live, by group: its width, and its first seq_id
        self.sampled: set[int] = set()
        self.branched: set[int] = set()  # ended, because their groups went on
        self.depth = rest["depth"]
        self.in_flight: deque[StepPlan] = deque()
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
        if request.beams:
            self.add_beam(request)
        else:
            self.add_choices(request)

    def add_beam(self, request: Request) -> None:
        """The prompt of a group of beams; refused, as an engine would, unless all of them fit at once."""
        prompt = 1 + request.prompt % self.capacity
        blocks, width = self.scheduler.blocks, request.beams
        sequence = Sequence(
            len(self.order) + 100,
            [5 + i % 3 for i in range(prompt)],
            PARAMS,
            max_length=prompt + request.new_tokens,
            priority=request.priority,
            cache_salt=request.salt,
            is_beam=True,
        )
        needed = width * blocks.most_blocks(sequence.max_length - 1)
        if width <= self.max_num_seqs and needed <= blocks.pool.num_blocks:
            self.scheduler.add(sequence)
            self.accept(sequence, (request.priority if self.policy == "priority" else 0, len(self.order)))
            self.beams[width, sequence.seq_id] = [sequence]

    def add_choices(self, request: Request) -> None:
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
            if self.scheduler.blocks.most_blocks(sequence.max_length - 1) > self.scheduler.blocks.pool.num_blocks:
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
        group = next((beams for beams in self.beams.values() if self.all[seq_id] in beams), [self.all[seq_id]])
        for member in group:
            assert self.scheduler.abort(member.seq_id) is member
            assert member.finish_reason == "abort"
            self.ended[member.seq_id] += 1
            assert self.scheduler.abort(member.seq_id) is None
        self.beams = {key: beams for key, beams in self.beams.items() if beams is not group}

    @rule(seed=SEEDS, fails=st.sampled_from([False, False, False, True]))
    def half_step(self, seed: int, fails: bool) -> None:
        """So that anything can come between schedule() and update()."""
        can_plan = len(self.in_flight) < self.depth and (not self.in_flight or seed % 2 == 0)
        if not can_plan or (not self.schedule() and self.in_flight):
            self.update(seed, fails)

    @rule(steps=st.integers(2, 8), seed=SEEDS)
    def run(self, steps: int, seed: int) -> None:
        for i in range(steps):
            self.half_step(seed + i, False)
            if self.in_flight:
                self.half_step(seed + i + 1, False)
            self.check_blocks()
            self.check_sharing()
            self.check_sets()
            self.check_worker()
            self.check_stats()

    @precondition(lambda self: self.depth == 1 and self.in_flight)
    @rule()
    def fail(self) -> None:
        """The executor raises: the workers were told of the plan, and what it should have written is anything."""
        plan = self.in_flight.popleft()
        self.worker.take_differences(plan)
        for move in plan.moves:  # perhaps they were not made
            target = self.worker.host if move.kind == "swap_out" else self.worker.cache
            target[move.destination] = [None] * self.worker.block_size
        for seq_id, start, count in zip(plan.seq_ids, plan.starts, plan.num_tokens, strict=True):
            for table in self.worker.tables[seq_id]:
                for position in range(start, start + count):
                    self.worker.cache[table[position // self.worker.block_size]][position % self.worker.block_size] = (
                        None
                    )
            self.covered[seq_id] = max(start + count, self.covered.get(seq_id, 0))
        running = list(self.scheduler.running)
        starts = dict(zip(plan.seq_ids, plan.starts, strict=True))
        self.scheduler.fail(plan)
        assert self.scheduler.running == [s for s in running if s.status is Status.RUNNING]
        assert all(s.num_computed == starts.get(s.seq_id, s.num_computed) for s in self.scheduler.running)
        self.voided |= {s.seq_id for s in running if s.status is Status.PREEMPTED}
        self.unwritten -= self.voided

    def schedule(self) -> bool:
        """Whether there is a plan."""
        before = Before(self)
        plan = self.scheduler.schedule()
        self.follow_forks(plan)
        self.covered = {i: end for i, end in self.covered.items() if before.stayed(self.all[i])}
        check_plan(self, before, plan)
        if self.depth == 1:
            check_order(self, before, plan)
        else:
            check_share(self, before, plan)
        self.see(before, plan)
        self.announced |= {new.seq_id for new in plan.new}
        self.forgotten |= set(plan.finished)
        if plan:
            self.voided.clear()
            self.in_flight.append(plan)
        self.voided |= set(plan.preempted) if not plan else set()
        return bool(plan)

    def see(self, before: Before, plan: StepPlan) -> None:
        """What the examples are there for does happen in them."""
        SEEN.update(move.kind for move in plan.moves)
        SEEN["twin"] += plan.num_tokens.count(0)
        SEEN["beam"] += sum(new.is_beam for new in plan.new)
        SEEN["beam preempted"] += sum(self.all[i].is_beam for i in plan.preempted)
        begun = {i: start for i, start in zip(plan.seq_ids, plan.starts, strict=True) if not before.stayed(self.all[i])}
        SEEN["hit"] += sum(start > 0 for start in begun.values())
        SEEN["came back"] += len(begun.keys() & self.announced)
        SEEN["preempted"] += len(plan.preempted)
        SEEN["preempted for a newcomer"] += len(set(plan.preempted) - set(plan.seq_ids)) * bool(plan.new)
        tables = [table for i in plan.seq_ids for table in self.all[i].block_tables]
        SEEN["fell out of a window"] += sum(NOTHING in table for table in tables)

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

    def branch(self, rng: random.Random) -> None:
        """Each group of which all beams have sampled goes on, or ends."""
        for key, beams in list(self.beams.items()):
            alive = [s for s in beams if s.seq_id in self.scheduler.sequences]
            if len(alive) < len(beams):  # one failed: the group ends
                self.end_beams(alive)
                del self.beams[key]
            elif all(seq_id in self.sampled for seq_id in (s.seq_id for s in beams)):
                self.go_on(key, beams, rng)

    def end_beams(self, beams: list[Sequence]) -> None:
        self.scheduler.branch(beams, [])
        self.branched |= {s.seq_id for s in beams}

    def go_on(self, key: tuple[int, int], beams: list[Sequence], rng: random.Random) -> None:
        if len(beams[0].tokens) + 1 >= beams[0].max_length or rng.random() < 0.1:
            self.end_beams(beams)
            del self.beams[key]
            return
        children = []
        for i in range(rng.randint(1, key[0])):
            parent = rng.choice(beams)
            child = Sequence(
                len(self.order) + 100,
                [*parent.tokens, 20 + i],
                PARAMS,
                max_length=parent.max_length,
                priority=parent.priority,
                prompt_length=parent.prompt_length,
                cache_salt=parent.cache_salt,
                is_beam=True,
            )
            self.accept(child, (*self.order[parent.seq_id][:2], len(self.order)))
            children.append((parent, child))
        tables = {parent.seq_id: parent.block_tables for parent in beams}
        self.scheduler.branch(beams, children)
        self.branched |= {s.seq_id for s in beams}
        for parent, child in children:
            assert (child.status is Status.RUNNING) <= (child.block_tables == tables[parent.seq_id])
            self.unwritten.add(child.seq_id)
        assert not self.scheduler.waiting.peek() or len(self.scheduler.running) <= self.max_num_seqs
        self.beams[key] = [child for _, child in children]

    def update(self, seed: int, fails: bool) -> None:
        plan = self.in_flight.popleft()
        rng = random.Random(seed)
        failing = rng.choice(plan.seq_ids) if fails else None
        result = self.worker.execute(plan, lambda *_: rng.randrange(8), failing)
        sampled = {i for i, token in zip(plan.seq_ids, result.token_ids, strict=True) if token >= 0}
        self.sampled |= sampled
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
        self.branch(rng)

    def places(self, sequence: Sequence) -> int:
        return max(sequence.num_computed, self.covered.get(sequence.seq_id, 0))

    def filled_slots(self) -> int:
        """Of the blocks in use, each counted once."""
        size = self.scheduler.blocks.block_size
        slots = {
            (table[p // size], p % size)
            for s in self.scheduler.running
            for table in s.block_tables
            for p in range(s.num_computed)
        }
        return sum(block != NOTHING for block, _ in slots)

    # -- what always holds

    @invariant()
    def check_blocks(self) -> None:
        scheduler, manager = self.scheduler, self.scheduler.blocks
        pool = manager.pool
        assert pool.num_free + pool.num_cached + pool.num_used == pool.num_blocks
        assert pool.num_available == pool.num_free + pool.num_cached
        states = Counter(pool.state(block) for block in range(pool.num_blocks))
        assert [states[s] for s in ("free", "cached", "used")] == [pool.num_free, pool.num_cached, pool.num_used]
        holders = Counter(block for s in scheduler.sequences.values() for block in held(s))
        assert [pool.ref_count(block) for block in range(pool.num_blocks)] == [
            holders[block] for block in range(pool.num_blocks)
        ]
        assert pool.num_used == len(holders) <= pool.peak_used
        assert pool.num_shared == sum(count > 1 for count in holders.values())
        assert manager.num_filled_slots == self.filled_slots()
        assert manager.caching or pool.num_cached == 0
        assert len(manager.host) <= manager.host.num_blocks
        for sequence in self.all.values():
            if sequence.status is not Status.RUNNING:
                self.covered.pop(sequence.seq_id, None)
                assert sequence.block_tables == []
            else:
                self.check_tables(sequence)
        snapshot = scheduler.kv_snapshot()
        assert {block: len(owners) for block, owners in snapshot.owners.items()} == holders
        assert {block for block, state in enumerate(snapshot.states) if state == "used"} == set(holders)

    def check_tables(self, sequence: Sequence) -> None:
        """They reach as far as they must, and no window holds more than it can look at."""
        manager = self.scheduler.blocks
        assert len(held(sequence)) <= manager.most_blocks(sequence.max_length - 1)
        for table, window in zip(sequence.block_tables, manager.windows, strict=True):
            assert len(table) == manager.blocks_for(self.places(sequence))
            seen = 0 if window is None else max(sequence.num_computed - window + 1, 0)
            assert NOTHING not in table[seen // manager.block_size :]

    @invariant()
    def check_sharing(self) -> None:
        """Of a block in several tables, all its holders have computed equally much: nobody has written on alone."""
        size = self.scheduler.blocks.block_size
        fills: dict[int, set[int]] = {}
        for sequence in self.scheduler.running:
            for table in sequence.block_tables:
                for index, block in enumerate(table):
                    fills.setdefault(block, set()).add(min(sequence.num_computed - index * size, size))
        fills.pop(NOTHING, None)
        holders = Counter(block for sequence in self.scheduler.running for block in held(sequence))
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
            assert self.ended[seq_id] + (seq_id in self.branched) == (sequence.status is Status.FINISHED)
            if seq_id not in self.branched:
                assert (sequence.status is Status.FINISHED) == (sequence.finish_reason is not None)
            if sequence.status is not Status.FINISHED:
                assert sequence.num_computed <= len(sequence.tokens) < sequence.max_length

    @invariant()
    def check_worker(self) -> None:
        if not self.in_flight:
            for seq_id in self.scheduler.sequences.keys() & self.announced:
                sequence = self.all[seq_id]
                assert self.worker.tokens[seq_id] == sequence.tokens
                if sequence.status is Status.RUNNING:  # a preemption is reported with the plan that caused it
                    for told, table in zip(self.worker.tables[seq_id], sequence.block_tables, strict=True):
                        assert [b if here != NOTHING else here for b, here in zip(told, table, strict=True)] == table
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
        # A beam's children may have to compute all of it again.
        bound = sum(s.max_length - 1 for s in self.scheduler.sequences.values()) + len(self.in_flight)
        bound += sum(width * beams[0].max_length ** 2 for (width, _), beams in self.beams.items())
        steps = 0
        while self.scheduler.sequences or self.in_flight:
            assert steps <= bound * 3 * self.depth
            self.run(1, steps)
            steps += 1
        for sequence in self.all.values():
            if sequence.seq_id not in self.branched:
                check_ending(sequence)
        assert self.scheduler.running == []
        assert len(self.scheduler.waiting) == 0
        assert self.scheduler.blocks.pool.num_used == 0
        self.add_one(Request(prompt=0, generated=0, new_tokens=1, priority=0, stop=()))
        while max(self.all) not in self.announced:
            self.run(1, 0)
        assert self.forgotten == self.announced - {max(self.all)}
        assert set(self.worker.tokens) == {max(self.all)}


@pytest.mark.slow
class TestSchedulerMachine(SchedulerMachine.TestCase):
    # The same examples every time: what fails here fails because of a change. To search on, take derandomize away.
    settings = settings(max_examples=2000, stateful_step_count=25, deadline=None, derandomize=True)

    def runTest(self) -> None:
        SEEN.clear()
        super().runTest()
        for event in EVENTS:
            assert SEEN[event] >= 100, f"{event} was seen {SEEN[event]} times in all examples"
