"""What a reader wants to know about the scheduler, by example."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core import Sequence, Status, StepResult
from octavo.errors import RequestError
from tests.core.helpers import PARAMS, Engine, from_context, make_scheduler, make_sequence


def work(plan) -> dict[int, tuple[int, int]]:
    """(start, tokens) by sequence."""
    return {i: (start, n) for i, start, n in zip(plan.seq_ids, plan.starts, plan.num_tokens, strict=True)}


def test_an_idle_scheduler_plans_nothing():
    plan = make_scheduler().schedule()
    assert not plan
    assert plan.seq_ids == plan.new == plan.finished == []


def test_one_sequence_from_prompt_to_end():
    engine = Engine(make_scheduler(block_size=4))
    engine.scheduler.add(make_sequence(5, prompt=4, new_tokens=3))
    plans = [engine.step() for _ in range(3)]
    assert [work(plan) for plan in plans] == [{5: (0, 4)}, {5: (4, 1)}, {5: (5, 1)}]
    assert [len(plan.new) for plan in plans] == [1, 0, 0]
    assert [len(plan.new_blocks.get(5, [[]])[0]) for plan in plans] == [1, 1, 0]
    (sequence,) = engine.finished
    assert (len(sequence.tokens), sequence.finish_reason, sequence.num_computed) == (7, "length", 6)
    assert not engine.scheduler.schedule()


def test_new_sequences_join_while_others_decode():
    engine = Engine(make_scheduler())
    engine.scheduler.add(make_sequence(0, prompt=3, new_tokens=6))
    engine.step()
    engine.step()
    engine.scheduler.add(make_sequence(1, prompt=5))
    assert work(engine.step()) == {0: (4, 1), 1: (0, 5)}  # decode and prefill in one step
    assert work(engine.step()) == {0: (5, 1), 1: (5, 1)}


@pytest.mark.parametrize(
    ("budget", "chunks"),
    [
        (1, [(i, 1) for i in range(14)]),
        (7, [(0, 7), (7, 7)]),
        (8, [(0, 8), (8, 6)]),
        (13, [(0, 13), (13, 1)]),
        (14, [(0, 14)]),
        (15, [(0, 14)]),
    ],
)
def test_a_prompt_is_computed_in_chunks_of_the_budget(budget, chunks):
    engine = Engine(make_scheduler(budget=budget))
    engine.scheduler.add(make_sequence(0, prompt=14, new_tokens=1))
    engine.run()
    assert [work(plan)[0] for plan in engine.plans] == chunks


def test_decodes_come_before_the_chunks_of_later_prompts():
    engine = Engine(make_scheduler(budget=4))
    engine.scheduler.add(make_sequence(0, prompt=2, new_tokens=9))
    engine.step()
    engine.scheduler.add(make_sequence(1, prompt=10))
    assert [work(engine.step()) for _ in range(4)] == [
        {0: (2, 1), 1: (0, 3)},
        {0: (3, 1), 1: (3, 3)},
        {0: (4, 1), 1: (6, 3)},
        {0: (5, 1), 1: (9, 1)},
    ]


def test_a_budget_of_one_serves_the_first_in_the_order_to_its_end():
    engine = Engine(make_scheduler(budget=1))
    for i in range(3):
        engine.scheduler.add(make_sequence(i, prompt=2, new_tokens=3))
    engine.run()
    assert [list(work(plan)) for plan in engine.plans] == [[0]] * 4 + [[1]] * 4 + [[2]] * 4


def test_seats_are_limited():
    engine = Engine(make_scheduler(seqs=2))
    for i in range(3):
        engine.scheduler.add(make_sequence(i, prompt=2, new_tokens=2 + i))
    assert [list(work(engine.step())) for _ in range(3)] == [[0, 1], [0, 1], [1, 2]]


def test_a_stop_token_ends_a_sequence_and_is_kept():
    engine = Engine(make_scheduler(), sample=lambda _, context: len(context))
    engine.scheduler.add(make_sequence(0, prompt=3, new_tokens=9, stop=[5]))
    (sequence,) = engine.run()
    assert (sequence.tokens[3:], sequence.finish_reason) == ([3, 4, 5], "stop")


def test_a_stop_token_in_the_last_place_is_a_stop():
    engine = Engine(make_scheduler(), sample=lambda _, context: len(context))
    engine.scheduler.add(make_sequence(0, prompt=3, new_tokens=3, stop=[5]))
    assert engine.run()[0].finish_reason == "stop"


def test_stop_tokens_in_the_prompt_stop_nothing():
    engine = Engine(make_scheduler(), sample=lambda *_: 7)
    engine.scheduler.add(make_sequence(0, prompt=3, new_tokens=2, stop=[1000, 1001, 1002]))
    assert engine.run()[0].finish_reason == "length"


@pytest.mark.parametrize("token", [-1, 7, 3], ids=["no token", "a token", "a stop token"])
def test_an_error_ends_one_sequence_alone(token):
    """The worker may have sampled a token all the same: the logits of a prompt's other rows can be what failed."""
    scheduler = make_scheduler()
    for i in range(3):
        scheduler.add(make_sequence(i, prompt=2, stop=[3]))
    plan = scheduler.schedule()
    (failed,) = scheduler.update(plan, StepResult([7, token, 7], errors={1: "NaN"}))
    assert (failed.seq_id, failed.finish_reason, failed.block_tables) == (1, "error", [])
    assert [s.seq_id for s in scheduler.running] == [0, 2]
    assert scheduler.schedule().finished == [1]


def test_first_come_first_served_ignores_priority():
    engine = Engine(make_scheduler(policy="fcfs", seqs=1))
    for i, priority in enumerate([0, -100, 100]):
        engine.scheduler.add(make_sequence(i, prompt=2, new_tokens=1, priority=priority))
    assert [s.seq_id for s in engine.run()] == [0, 1, 2]


def test_priority_serves_the_smaller_number_first_then_by_arrival():
    engine = Engine(make_scheduler(policy="priority", seqs=1))
    for i, priority in enumerate([3, 0, 3, -1, 0]):
        engine.scheduler.add(make_sequence(i, prompt=2, new_tokens=1, priority=priority))
    assert [s.seq_id for s in engine.run()] == [3, 1, 4, 0, 2]


def test_a_request_that_can_never_fit_is_refused_with_the_numbers():
    """Case 32: at once, and the queue moves."""
    engine = Engine(make_scheduler(blocks=5, block_size=4))
    engine.scheduler.add(make_sequence(0, prompt=4))
    with pytest.raises(RequestError, match=r"needs 6 KV blocks for 22 tokens .*18.* 4 a block.* the whole pool has 5"):
        engine.scheduler.add(make_sequence(1, prompt=18, new_tokens=4))
    engine.scheduler.add(make_sequence(2, prompt=4))
    assert [s.seq_id for s in engine.run()] == [0, 2]


def test_the_last_token_needs_no_place_in_the_cache():
    engine = Engine(make_scheduler(blocks=2, block_size=4))
    engine.scheduler.add(make_sequence(0, prompt=5, new_tokens=4))  # 9 tokens, 8 of them computed
    assert len(engine.run()[0].tokens) == 9
    with pytest.raises(RequestError, match="3 KV blocks"):
        engine.scheduler.add(make_sequence(1, prompt=5, new_tokens=5))


@pytest.mark.parametrize(("known", "max_length"), [(0, 4), (4, 4), (5, 4)])
def test_a_sequence_must_have_something_to_compute_and_to_sample(known, max_length):
    scheduler = make_scheduler(blocks=1, block_size=4)
    with pytest.raises(RequestError, match=f"{known} known tokens.*maximum length of {max_length}"):
        scheduler.add(Sequence(0, [1] * known, PARAMS, max_length=max_length))
    assert not scheduler.sequences


def test_an_id_is_used_once():
    scheduler = make_scheduler()
    scheduler.add(make_sequence(0, prompt=2))
    with pytest.raises(ValueError, match="sequence 0 is already here"):
        scheduler.add(make_sequence(0, prompt=2))


def test_a_replayed_request_goes_on_behind_its_prompt():
    engine = Engine(make_scheduler())
    engine.scheduler.add(Sequence(0, [1, 2, 3, 4, 5], PARAMS, max_length=7, prompt_length=3))
    plan = engine.step()
    assert (plan.new[0].tokens, plan.new[0].prompt_length) == ([1, 2, 3, 4, 5], 3)
    assert work(plan) == {0: (0, 5)}
    assert len(engine.run()[0].tokens) == 7


def test_times_are_the_clock_s():
    scheduler = make_scheduler()
    ticks = iter(range(10, 100))
    scheduler.clock = lambda: next(ticks)
    scheduler.add(sequence := make_sequence(0, prompt=2, new_tokens=2))
    for _ in range(2):
        plan = scheduler.schedule()
        scheduler.update(plan, StepResult([7]))
    assert (sequence.first_scheduled_time, sequence.first_token_time, sequence.finish_time) == (10, 12, 14)


class TestAbort:
    def test_while_it_waits(self):
        engine = Engine(make_scheduler(seqs=1))
        for i in range(3):
            engine.scheduler.add(make_sequence(i, prompt=2, new_tokens=2))
        engine.step()
        aborted = engine.scheduler.abort(1)
        assert (aborted.status, aborted.finish_reason) == (Status.FINISHED, "abort")
        assert [s.seq_id for s in engine.run()] == [0, 2]
        assert all(1 not in plan.finished for plan in engine.plans)  # the workers never heard of it

    def test_while_it_runs(self):
        engine = Engine(make_scheduler())
        for i in range(2):
            engine.scheduler.add(make_sequence(i, prompt=2))
        engine.step()
        engine.scheduler.abort(0)
        plan = engine.step()
        assert (plan.finished, plan.seq_ids) == ([0], [1])
        assert engine.scheduler.blocks.pool.num_used == 1

    def test_while_its_step_is_in_flight(self):
        engine = Engine(make_scheduler())
        for i in range(3):
            engine.scheduler.add(make_sequence(i, prompt=2))
        plan = engine.schedule()
        aborted = engine.scheduler.abort(1)
        assert engine.scheduler.update(plan, engine.worker.execute(plan, from_context)) == []
        assert aborted.tokens == [2000, 2001]
        assert engine.step().finished == [1]
        assert [s.seq_id for s in engine.run()] == [0, 2]

    def test_while_it_is_preempted(self):
        engine = Engine(make_scheduler(policy="priority", seqs=1))
        engine.scheduler.add(make_sequence(0, prompt=2))
        engine.step()
        engine.scheduler.add(make_sequence(1, prompt=2, priority=-1))
        assert engine.step().preempted == [0]
        engine.scheduler.abort(0)
        assert engine.step().finished == [0]
        assert [s.seq_id for s in engine.run()] == [1]

    def test_when_it_is_gone_or_never_was(self):
        engine = Engine(make_scheduler())
        engine.scheduler.add(make_sequence(0, prompt=2, new_tokens=1))
        engine.run()
        assert engine.scheduler.abort(0) is None
        assert engine.scheduler.abort(99) is None

    def test_the_last_one_is_reported_with_the_next_work(self):
        engine = Engine(make_scheduler())
        engine.scheduler.add(make_sequence(0, prompt=2))
        engine.step()
        engine.scheduler.abort(0)
        assert not engine.scheduler.schedule()
        engine.scheduler.add(make_sequence(1, prompt=2))
        assert engine.step().finished == [0]


def test_stats_of_a_tiny_run_by_hand():
    """Blocks of 4. Step 1: A 5 tokens (2 blocks), B 3 (1 block); step 2: A 6, B 4; step 3: B 5 (2 blocks)."""
    engine = Engine(make_scheduler(blocks=10, block_size=4))
    engine.scheduler.add(make_sequence(0, prompt=5, new_tokens=2))
    engine.scheduler.add(make_sequence(1, prompt=3, new_tokens=3))
    engine.step()
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks, stats.num_free_blocks) == (2, 0, 10, 7)
    assert stats.slot_utilization == 8 / 12
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.slot_utilization == (8 + 10 + 5) / (12 + 12 + 8)
    assert (stats.num_steps, stats.num_tokens, stats.num_preemptions) == (3, 8 + 2 + 1, 0)
    assert (stats.peak_used_blocks, stats.num_used_blocks, stats.num_running) == (3, 0, 0)
    assert (stats.num_free_blocks, stats.num_cached_blocks) == (8, 2)  # one full block of each


def test_stats_before_any_step():
    assert make_scheduler().stats().slot_utilization == 0.0


class TestPreemption:
    def test_the_victim_is_the_last_and_is_computed_again(self):
        """Nine blocks of 4, full when each of the three has three; then the first needs its fourth."""
        engine = Engine(make_scheduler(blocks=9, block_size=4))
        for i, prompt in enumerate([8, 8, 5]):
            engine.scheduler.add(make_sequence(i, prompt, new_tokens=9))
        while not (plan := engine.step()).preempted:
            assert plan.seq_ids == [0, 1, 2]
        assert (plan.preempted, plan.seq_ids) == ([2], [0, 1])
        assert work(plan) == {0: (12, 1), 1: (12, 1)}
        victim = engine.scheduler.sequences[2]
        assert (victim.status, victim.num_computed, len(victim.tokens)) == (Status.PREEMPTED, 0, 10)
        while 2 not in (plan := engine.step()).seq_ids:
            assert not plan.new
        assert work(plan)[2] == (4, 6)  # one of its two full blocks was taken, the last
        assert not plan.new  # the workers keep its tokens
        assert [(s.seq_id, len(s.tokens)) for s in engine.run()] == [(0, 17), (1, 17), (2, 14)]

    def test_the_last_sits_out_and_keeps_its_blocks_while_others_grow(self):
        """Five blocks of 4: the first takes the last free one, and the second waits for it with all that it has."""
        engine = Engine(make_scheduler(blocks=5, block_size=4))
        engine.scheduler.add(make_sequence(0, prompt=8, new_tokens=5))
        engine.scheduler.add(make_sequence(1, prompt=8, new_tokens=5))
        engine.step()
        for _ in range(4):
            assert engine.step().seq_ids == [0]
            last = engine.scheduler.sequences[1]
            assert (last.num_computed, len(last.block_tables[0])) == (8, 2)
        assert [s.seq_id for s in engine.run()] == [0, 1]
        assert engine.scheduler.stats().num_preemptions == 0

    def test_nobody_overtakes_the_victim(self):
        engine = Engine(make_scheduler(blocks=5, block_size=4))
        engine.scheduler.add(make_sequence(0, prompt=8, new_tokens=9))
        engine.scheduler.add(make_sequence(1, prompt=7, new_tokens=5))
        for _ in range(6):
            engine.step()
        assert [s.seq_id for s in engine.scheduler.running] == [0]
        engine.scheduler.add(make_sequence(2, prompt=1, new_tokens=1))  # small enough to fit at once
        first_runs = {}
        engine.run()
        for step, plan in enumerate(engine.plans):
            for seq_id in plan.seq_ids:
                if work(plan)[seq_id][0] == 0:
                    first_runs[seq_id] = step  # of the victim, the second time
        assert first_runs[1] <= first_runs[2]
        assert next(s for s in engine.finished if s.seq_id == 1).num_preemptions == 1

    def test_an_urgent_request_preempts_and_the_victim_resumes_before_newer_ones_of_its_class(self):
        """Case 31."""
        engine = Engine(make_scheduler(policy="priority", blocks=4, block_size=4))
        engine.scheduler.add(make_sequence(0, prompt=12, new_tokens=4))
        engine.step()
        engine.scheduler.add(make_sequence(1, prompt=12, new_tokens=4))  # newer, same class: waits
        engine.scheduler.add(make_sequence(2, prompt=8, new_tokens=2, priority=-100))
        plan = engine.step()
        assert (plan.preempted, plan.seq_ids) == ([0], [2])
        assert [s.seq_id for s in engine.run()] == [2, 0, 1]
        assert [s.num_preemptions for s in engine.finished] == [0, 1, 0]

    def test_an_urgent_request_preempts_for_a_seat(self):
        engine = Engine(make_scheduler(policy="priority", seqs=1))
        engine.scheduler.add(make_sequence(0, prompt=2))
        engine.step()
        engine.scheduler.add(make_sequence(1, prompt=2, priority=-1))
        plan = engine.step()
        assert (plan.preempted, plan.seq_ids) == ([0], [1])
        assert [s.seq_id for s in engine.run()] == [1, 0]

    def test_an_equal_priority_never_preempts(self):
        engine = Engine(make_scheduler(policy="priority", seqs=1))
        engine.scheduler.add(make_sequence(0, prompt=2, priority=-1))
        engine.step()
        engine.scheduler.add(make_sequence(1, prompt=2, priority=-1))
        engine.run()
        assert all(plan.preempted == [] for plan in engine.plans)

    def test_only_as_many_as_needed_are_preempted(self):
        engine = Engine(make_scheduler(policy="priority", blocks=9, block_size=4))
        for i in range(3):
            engine.scheduler.add(make_sequence(i, prompt=5, new_tokens=3))
        engine.step()  # two blocks each, three are free
        engine.scheduler.add(make_sequence(3, prompt=13, new_tokens=2, priority=-1))
        plan = engine.step()  # four blocks: one more than are free
        assert (plan.preempted, plan.seq_ids) == ([2], [3, 0, 1])


@settings(max_examples=300, deadline=None)
@given(
    policy=st.sampled_from(["fcfs", "priority"]),
    block_size=st.integers(1, 4),
    slack=st.integers(0, 6),
    seqs=st.integers(1, 6),
    budget=st.integers(1, 20),
    requests=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(-2, 2)), min_size=2, max_size=6),
)
def test_results_do_not_depend_on_pool_budget_or_company(policy, block_size, slack, seqs, budget, requests):
    """Case 30: preempted or not, each gets the tokens that it gets alone, from a model that reads its whole cache."""
    most = max(prompt + new - 1 for prompt, new, _ in requests)
    blocks = -(-most // block_size) + slack
    engine = Engine(make_scheduler(policy=policy, blocks=blocks, block_size=block_size, seqs=seqs, budget=budget))
    for i, (prompt, new, priority) in enumerate(requests):
        engine.scheduler.add(make_sequence(i, prompt, new, priority=priority))
        if i % 2:
            engine.step()
    together = {s.seq_id: s.tokens for s in engine.run()}
    for i, (prompt, new, _) in enumerate(requests):
        alone = Engine(make_scheduler())
        alone.scheduler.add(make_sequence(i, prompt, new))
        assert together[i] == alone.run()[0].tokens
    assert len(together) == len(requests)
