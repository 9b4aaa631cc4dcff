"""What the state machine of the scheduler checks of every plan: that it is possible, complete, and in order."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from octavo.core import NOTHING, BlockMove, Sequence, StepPlan

if TYPE_CHECKING:
    from tests.core.test_scheduler_machine import SchedulerMachine

SEEN_IN_FLIGHT: Counter[str] = Counter()


def held(sequence: Sequence) -> list[int]:
    """All blocks of a sequence, in all groups."""
    return [block for table in sequence.block_tables for block in table if block != NOTHING]


class Before:
    """What the order of service is judged by: the state before a plan is made."""

    def __init__(self, machine: SchedulerMachine) -> None:
        scheduler = machine.scheduler
        self.running = [s.seq_id for s in scheduler.running]
        self.waiting = sorted(scheduler.sequences.keys() - set(self.running), key=machine.order.__getitem__)
        self.tables = {s.seq_id: [list(table) for table in s.block_tables] for s in scheduler.sequences.values()}
        self.held = {s.seq_id: held(s) for s in scheduler.sequences.values()}
        self.computed = {s.seq_id: s.num_computed for s in scheduler.sequences.values()}
        self.preemptions = {s.seq_id: s.num_preemptions for s in scheduler.running}
        self.gaps = {s.seq_id: len(s.tokens) - s.num_computed for s in scheduler.running}

    def stayed(self, sequence: Sequence) -> bool:
        """Whether it ran before, and has kept its blocks."""
        return self.preemptions.get(sequence.seq_id) == sequence.num_preemptions

    def idle(self, sequence: Sequence) -> bool:
        """Whether it is a beam that waits for the others of its group, or a sequence that waits for its token."""
        return self.stayed(sequence) and self.gaps[sequence.seq_id] == 0


def check_plan(machine: SchedulerMachine, before: Before, plan: StepPlan) -> None:
    """The plan is possible, complete, and says everything exactly once."""
    sequences = machine.scheduler.sequences
    # Groups of beams that can always go on were let in, no others; what is in flight may hold all up.
    assert bool(plan) == bool(sequences) or (machine.in_flight and not plan)
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
    assert set(plan.new_blocks) | set(plan.tails) <= set(plan.seq_ids)
    if not machine.in_flight:  # else the worker that is asked has not seen them all
        for seq_id in plan.seq_ids:
            check_tables_as_told(machine, before, plan, sequences[seq_id])
    for tails in plan.tails.values():
        assert len(tails) == len(machine.worker.windows)
    if plan:
        done = {i for i in machine.announced if machine.ended[i] or i in machine.branched} - machine.forgotten
        assert sorted(plan.finished) == sorted(done)
    else:
        assert plan == StepPlan(preempted=plan.preempted)
        assert machine.depth > 1 or not plan.preempted


def check_tables_as_told(machine: SchedulerMachine, before: Before, plan: StepPlan, sequence: Sequence) -> None:
    """What the workers were told of before and with this plan makes up the tables, but for what fell out of windows."""
    seq_id, groups = sequence.seq_id, range(len(machine.worker.windows))
    told: list[list[int]] = [[] for _ in groups]
    if before.stayed(sequence) and seq_id in machine.announced:
        told = [list(table) for table in machine.worker.tables[seq_id]]
        if seq_id in plan.tails:
            index = before.computed[seq_id] // machine.worker.block_size
            for table, copy in zip(told, plan.tails[seq_id], strict=True):
                assert BlockMove("copy", table[index], copy) in plan.moves
                table[index] = copy
    appended = plan.new_blocks.get(seq_id, [[] for _ in groups])
    for g, table in enumerate(sequence.block_tables):
        now = [*told[g], *appended[g]]
        assert [here if here == NOTHING else block for block, here in zip(now, table, strict=True)] == table
        if seq_id in plan.tails:
            assert plan.tails[seq_id][g] in table


def check_twin(parent: Sequence, child: Sequence) -> None:
    """One that samples from the logits of the sequence before it has the very same tokens, none of them sampled."""
    assert child.group == parent.group is not None
    assert child.tokens == parent.tokens
    assert child.num_computed == parent.num_computed == len(child.tokens) == child.prompt_length
    assert child.block_tables == parent.block_tables


def check_order(machine: SchedulerMachine, before: Before, plan: StepPlan) -> None:
    """Nobody is served before someone earlier in the order who could have been served."""
    order, scheduler = machine.order, machine.scheduler
    running = [s.seq_id for s in scheduler.running if not before.idle(s)]
    assert plan.seq_ids == running[: len(plan.seq_ids)]  # the first of them, without a gap
    if not plan:
        return
    unfinished = [i for i, s in scheduler.sequences.items() if not before.idle(s)]
    assert plan.seq_ids[0] == min(unfinished, key=order.__getitem__)
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
    assert all(order[victim] > order[scheduler.running[-1].seq_id] for victim in gone.difference(admitted))
    if gone.intersection(admitted):
        return  # it came back at once: what it held twice, others hold too
    if gone:
        check_victims_were_needed(machine, before, plan, admitted)
    elif len(admitted) < len(before.waiting):
        check_head_had_no_room(machine, before, plan, before.waiting[len(admitted)])


def check_share(machine: SchedulerMachine, before: Before, plan: StepPlan) -> None:
    """Of several plans in flight each has the first that can compute a token, and no more than its share of all."""
    running = [s.seq_id for s in machine.scheduler.running if not before.idle(s)]
    assert plan.seq_ids == running[: len(plan.seq_ids)]
    able = min(len(machine.scheduler.sequences), machine.max_num_seqs)
    assert len(plan.seq_ids) * machine.depth < able + machine.depth
    for seq_id in plan.seq_ids:
        assert seq_id not in awaited(machine)
    SEEN_IN_FLIGHT["two of one prompt"] += any(set(plan.seq_ids) & set(other.seq_ids) for other in machine.in_flight)
    SEEN_IN_FLIGHT["preempted meanwhile"] += any(set(plan.preempted) & set(p.seq_ids) for p in machine.in_flight)


def awaited(machine: SchedulerMachine) -> set[int]:
    """Sequences whose next token some plan in flight samples."""
    found = set()
    for plan in machine.in_flight:
        for seq_id, start, count in zip(plan.seq_ids, plan.starts, plan.num_tokens, strict=True):
            sequence = machine.scheduler.sequences.get(seq_id)
            if sequence is not None and start + count == len(sequence.tokens):
                found.add(seq_id)
    return found


def check_last_had_no_room(machine: SchedulerMachine, left_out: list[int], budget: int) -> None:
    """Only the very last sits a step out, for want of a block, and it keeps those that it has."""
    scheduler = machine.scheduler
    (last,) = (scheduler.sequences[i] for i in left_out)
    wanted = last.num_computed + min(len(last.tokens) - last.num_computed, budget)
    assert scheduler.blocks.missing(last, wanted) > scheduler.blocks.pool.num_available


def check_admitted_with_room(machine: SchedulerMachine, before: Before, plan: StepPlan, admitted: int) -> None:
    """Whoever came in found room for all its known tokens, and for what those before it may take meanwhile."""
    scheduler, manager = machine.scheduler, machine.scheduler.blocks
    sequence = scheduler.sequences[admitted]
    earlier = [s for s in scheduler.running if machine.order[s.seq_id] < machine.order[admitted]]
    kept = {s.seq_id for s in scheduler.running if before.stayed(s)}
    later = {i for i in kept if machine.order[i] > machine.order[admitted]}
    in_use = {block for s in earlier for block in held(s)}.union(*(before.held[i] for i in later))
    at = plan.seq_ids.index(admitted)
    steps, needed = 1, len(manager.windows) * (len(sequence.tokens) < sequence.max_length - 1)
    if plan.num_tokens[at]:
        steps = steps_to_compute(machine, len(sequence.tokens) - plan.starts[at], len(earlier))
        needed = manager.most_blocks(len(sequence.tokens)) - len(in_use.intersection(adopted(machine, plan, admitted)))
    growing = sum(may_grow(machine, s, steps) for s in earlier)
    if plan.num_tokens[at] == 0 < plan.num_tokens[at - 1]:  # before it, nobody shared the last block
        last = earlier[-1]
        growing -= may_grow(machine, last, steps) - may_grow(machine, last, steps, unwritten=False)
    assert needed + growing <= manager.pool.num_blocks - len(in_use)


def steps_to_compute(machine: SchedulerMachine, num_tokens: int, earlier: int) -> int:
    """When each of those before it decodes a token a step."""
    return -(-num_tokens // max(machine.budget - earlier, 1))


def adopted(machine: SchedulerMachine, plan: StepPlan, seq_id: int) -> list[int]:
    """The blocks that one that came in has found computed, or has taken from the sequence before it."""
    count = -(-plan.starts[plan.seq_ids.index(seq_id)] // machine.worker.block_size)
    tables = machine.scheduler.sequences[seq_id].block_tables
    return [block for table in tables for block in table[:count] if block != NOTHING]


def may_grow(machine: SchedulerMachine, sequence: Sequence, steps: int, *, unwritten: bool = True) -> int:
    """Blocks that it may take in so many steps: for tokens to come, and for a copy of one that it shares."""
    manager = machine.scheduler.blocks
    if sequence.num_computed == sequence.max_length - 1:
        return 0
    ever = manager.blocks_for(sequence.max_length - 1) - len(sequence.block_tables[0])
    copies = unwritten and sequence.seq_id in machine.unwritten and sequence.num_computed % manager.block_size > 0
    growth = min(1 + steps // manager.block_size, ever) * len(manager.windows)
    growth = min(growth, manager.most_blocks(sequence.max_length - 1) - len(held(sequence)))
    return growth + copies * len(manager.windows)


def check_victims_were_needed(machine: SchedulerMachine, before: Before, plan: StepPlan, admitted: list[int]) -> None:
    """With the last victim kept, there would be no seat or no room.

    Room is what the rule of admission wants: the rest of the known tokens of those admitted, and a block for each that
    runs and may still need one.
    """
    scheduler, manager = machine.scheduler, machine.scheduler.blocks
    running = {s.seq_id for s in scheduler.running}
    known = [len(scheduler.sequences[i].tokens) for i in admitted]
    steps = max((steps_to_compute(machine, count, len(running)) for count in known), default=1)
    reserved = sum(may_grow(machine, s, steps) for s in scheduler.running)
    # What fell out of windows in this plan may have been given back after the victim had to leave.
    before_plan = {block for s in scheduler.running if before.stayed(s) for block in before.held[s.seq_id]}
    reserved += len(before_plan.difference(*(held(s) for s in scheduler.running)))
    for i, count in zip(admitted, known, strict=True):
        reserved += max(manager.most_blocks(count) - len(held(scheduler.sequences[i])), 0)
    kept = min(set(before.running) - running, key=machine.order.__getitem__)
    growth = min(before.gaps[kept], machine.budget - sum(plan.num_tokens))
    needed = manager.blocks_for(before.computed[kept] + growth) + 1  # one for the copy of a block that it shared
    still_held = {block for i in running for block in before.held[i]}
    still_held = still_held.union(*(adopted(machine, plan, i) for i in admitted))
    needed = needed * len(manager.windows) - len(still_held.intersection(before.held[kept]))
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
    in_use = {block for s in earlier for block in held(s)}
    prefix = manager.find_prefix(sequence)
    found = {block for table in prefix for block in table}
    needed = manager.most_blocks(len(sequence.tokens)) - len(in_use.intersection(found))
    steps = steps_to_compute(machine, len(sequence.tokens) - len(prefix[0]) * manager.block_size, len(earlier))
    growing = sum(may_grow(machine, s, steps) for s in earlier)
    no_room = needed + growing > manager.pool.num_blocks - len(in_use)
    sits_out = any(s.seq_id not in counts and not before.idle(s) for s in earlier)
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
    assert sequence.block_tables == []
