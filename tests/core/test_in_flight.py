"""Several plans in flight, as a pipeline of workers needs them: who is in which, and what may come in between."""

from __future__ import annotations

from collections import deque

from octavo.core import Scheduler, Status, StepPlan, StepResult
from tests.core.helpers import ShadowWorker, from_context, make_scheduler, make_sequence


class Pipeline:
    """Keeps as many plans in flight as there may be; a worker executes the oldest when it is collected."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.worker = ShadowWorker(scheduler)
        self.in_flight: deque[StepPlan] = deque()

    def fill(self) -> list[StepPlan]:
        """The plans that were made."""
        made = []
        while len(self.in_flight) < self.scheduler.depth and (plan := self.scheduler.schedule()):
            self.in_flight.append(plan)
            made.append(plan)
        return made

    def collect(self) -> list[int]:
        """Takes in the oldest plan; the sequences that it ended."""
        plan = self.in_flight.popleft()
        return [s.seq_id for s in self.scheduler.update(plan, self.worker.execute(plan, from_context))]

    def run(self, limit: int = 500) -> list[int]:
        finished: list[int] = []
        for _ in range(limit):
            self.fill()
            if not self.in_flight:
                assert not self.scheduler.sequences
                return finished
            finished += self.collect()
        raise AssertionError("it does not end")


def decoding(count: int, depth: int, new_tokens: int = 40) -> Pipeline:
    """So many sequences whose prompts are computed, and as many plans in flight as there may be."""
    pipeline = Pipeline(make_scheduler(seqs=count, depth=depth))
    for i in range(count):
        pipeline.scheduler.add(make_sequence(i, 3, new_tokens))
    for _ in range(3 * depth):
        pipeline.fill()
        pipeline.collect()
    pipeline.fill()
    return pipeline


def sizes(pipeline: Pipeline, steps: int) -> list[int]:
    """Of the plans made in so many steps; in each, one for the one that came back."""
    found = []
    for _ in range(steps):
        pipeline.collect()
        made = pipeline.fill()
        assert len(made) == 1, "a stage would have nothing to do"
        found.append(len(made[0].seq_ids))
    return found


def test_eight_sequences_are_two_plans_of_four() -> None:
    pipeline = decoding(8, depth=2)
    assert len(pipeline.in_flight) == 2
    assert sizes(pipeline, 10) == [4] * 10
    first, second = pipeline.in_flight
    assert sorted(first.seq_ids + second.seq_ids) == list(range(8))


def test_depth_four() -> None:
    pipeline = decoding(8, depth=4)
    assert len(pipeline.in_flight) == 4
    assert sizes(pipeline, 10) == [2] * 10


def test_an_odd_number_is_dealt_as_evenly_as_can_be() -> None:
    pipeline = decoding(7, depth=2)
    assert sorted(sizes(pipeline, 10)) == [3] * 5 + [4] * 5


def test_after_arrivals_and_ends_plans_are_even_again() -> None:
    pipeline = decoding(8, depth=2)
    for seq_id in (0, 1, 2):
        pipeline.scheduler.abort(seq_id)
    assert sum(sizes(pipeline, 8)[-2:]) == 5
    pipeline.scheduler.max_num_seqs = 9
    for seq_id in (20, 21, 22, 23):
        pipeline.scheduler.add(make_sequence(seq_id, 3, 40))
    assert sorted(sizes(pipeline, 10)[-2:]) == [4, 5]


def test_everybody_gets_as_many_tokens_as_the_others() -> None:
    pipeline = decoding(8, depth=2)
    for _ in range(20):
        pipeline.collect()
        pipeline.fill()
    lengths = [len(s.tokens) for s in pipeline.scheduler.sequences.values()]
    assert max(lengths) - min(lengths) <= 1


def test_chunks_of_one_prompt_are_in_flight_together() -> None:
    """Nothing waits for a token: the second is planned before the first is done, and the last one samples."""
    pipeline = Pipeline(make_scheduler(budget=8, depth=3))
    pipeline.scheduler.add(make_sequence(0, 20, 2))
    made = pipeline.fill()
    assert [(plan.starts, plan.num_tokens) for plan in made] == [([0], [8]), ([8], [8]), ([16], [4])]
    assert pipeline.scheduler.schedule() == StepPlan()  # now its token is awaited
    assert pipeline.run() == [0]


def test_a_prefix_is_found_while_it_is_in_flight() -> None:
    pipeline = Pipeline(make_scheduler(budget=8, depth=2, seqs=2))
    pipeline.scheduler.add(make_sequence(0, 8, 2, first_token=7))
    pipeline.scheduler.add(make_sequence(1, 9, 2, first_token=7))
    first, second = pipeline.fill()
    assert (first.seq_ids, second.seq_ids, second.starts) == ([0], [1], [8])
    assert sorted(pipeline.run()) == [0, 1]


def preempted_in_flight() -> tuple[Pipeline, StepPlan]:
    """Sequence 1 has its next token in flight when sequence 0 takes its blocks; and the plan with that token."""
    pipeline = Pipeline(make_scheduler(blocks=4, block_size=2, seqs=2, depth=2, caching=False))
    pipeline.scheduler.add(make_sequence(0, 2, 6))
    pipeline.scheduler.add(make_sequence(1, 2, 6))
    sequence = pipeline.scheduler.sequences[1]
    for _ in range(20):
        pipeline.fill()
        if sequence.status is Status.PREEMPTED:
            holds = [plan for plan in pipeline.in_flight if 1 in plan.seq_ids]
            assert holds, "its token had come"
            return pipeline, holds[0]
        pipeline.collect()
    raise AssertionError("nobody was preempted")


def test_a_preempted_sequence_is_not_admitted_before_its_token_came() -> None:
    pipeline, awaited = preempted_in_flight()
    sequence = pipeline.scheduler.sequences[1]
    length = len(sequence.tokens)
    pipeline.scheduler.abort(0)  # so that there is room
    assert pipeline.scheduler.schedule() == StepPlan()
    while awaited in pipeline.in_flight:
        assert sequence.status is Status.PREEMPTED
        pipeline.collect()
    assert len(sequence.tokens) == length + 1
    (plan,) = pipeline.fill()
    assert (plan.seq_ids, plan.starts, plan.num_tokens) == ([1], [0], [length + 1])
    assert pipeline.run() == [1]


def test_a_preempted_sequence_that_its_token_ends_waits_no_more() -> None:
    pipeline, _ = preempted_in_flight()
    sequence = pipeline.scheduler.sequences[1]
    sequence.max_length = len(sequence.tokens) + 1
    finished = pipeline.collect() + (pipeline.collect() if pipeline.in_flight else [])
    assert finished == [1]
    assert len(pipeline.scheduler.waiting) == 0
    assert pipeline.run() == [0]


def test_the_token_of_an_aborted_sequence_is_dropped() -> None:
    pipeline = decoding(4, depth=2)
    gone = pipeline.in_flight[0].seq_ids[0]
    sequence = pipeline.scheduler.abort(gone)
    assert sequence is not None
    length = len(sequence.tokens)
    pipeline.collect()
    assert (len(sequence.tokens), sequence.finish_reason) == (length, "abort")
    (plan,) = pipeline.fill()
    assert plan.finished == [gone]
    assert sorted(pipeline.run()) == sorted({0, 1, 2, 3} - {gone})


def test_an_aborted_sequence_s_blocks_are_anothers_at_once() -> None:
    """Workers execute plans in order: what one in flight still writes, the next may write over."""
    pipeline = Pipeline(make_scheduler(blocks=3, block_size=2, seqs=1, depth=2, caching=False))
    pipeline.scheduler.add(make_sequence(0, 4, 2))
    pipeline.scheduler.add(make_sequence(1, 4, 2))
    pipeline.fill()
    pipeline.scheduler.abort(0)
    (plan,) = pipeline.fill()
    assert (plan.seq_ids, plan.finished) == ([1], [0])
    assert pipeline.run() == [1]


def test_the_same_tokens_at_every_depth() -> None:
    """A small pool, so that some are preempted; tokens depend on all that is read from the cache."""
    found = []
    for depth in (1, 2, 3, 5):
        pipeline = Pipeline(make_scheduler(blocks=9, block_size=2, seqs=4, budget=6, depth=depth))
        sequences = [make_sequence(i, 2 + i % 5, 5 + i % 3, first_token=9) for i in range(8)]
        for sequence in sequences:
            pipeline.scheduler.add(sequence)
        assert sorted(pipeline.run()) == list(range(8))
        found.append([sequence.tokens for sequence in sequences])
        assert pipeline.scheduler.stats().num_preemptions > 0
    assert all(tokens == found[0] for tokens in found)


def test_those_that_find_no_room_count_for_nothing() -> None:
    """Twenty seats, but blocks for five or six: all begin in one plan, and soon no stage is without work."""
    pipeline = Pipeline(make_scheduler(blocks=40, block_size=2, seqs=20, depth=2, budget=200, caching=False))
    for i in range(60):
        pipeline.scheduler.add(make_sequence(i, 10, 8))
    found = []
    for _ in range(30):
        pipeline.fill()
        found.append([len(plan.seq_ids) for plan in pipeline.in_flight])
        pipeline.collect()
    assert len(found[0]) == 1
    assert sum(len(plans) == 2 for plans in found) >= 24, found
    assert sum(max(plans) <= 4 for plans in found) >= 20, found
    pipeline.run()


def test_who_comes_again_under_its_number_gets_nothing_of_what_it_left_in_flight() -> None:
    """A supervisor withdraws requests while another is on trial, and sends them again to the same engine."""
    for between in (0, 1):  # plans that are made after its return, before the old one is taken in
        pipeline = Pipeline(make_scheduler(depth=2))
        scheduler = pipeline.scheduler
        scheduler.add(make_sequence(0, 3, 12, first_token=1))
        old = scheduler.schedule()
        pipeline.in_flight.append(old)
        assert scheduler.abort(0) is not None
        scheduler.add(make_sequence(0, 3, 12, first_token=1))
        for _ in range(between):
            assert not scheduler.schedule()
        result = StepResult([77], errors={0: "of who left"})
        pipeline.in_flight.popleft()
        assert scheduler.update(old, result) == []
        assert scheduler.sequences[0].tokens == [1, 2, 3]
        plan = scheduler.schedule()
        assert plan.finished == [0]
        assert [new.seq_id for new in plan.new] == plan.seq_ids == [0]
