"""The host tier: what is pushed out of the pool comes back, the right bytes of it, and only where that pays."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core import Sequence, StepPlan, StepResult
from octavo.core.host_tier import HostTier
from octavo.core.scheduler import PreemptionMode
from tests.core.helpers import Engine, make_scheduler, make_sequence
from tests.core.test_scheduler import work


class TestSlots:
    def test_each_key_has_a_slot_of_its_own(self) -> None:
        host = HostTier(3)
        assert sorted(slot for key in (b"a", b"b", b"c") if (slot := host.put(key)) is not None) == [0, 1, 2]
        assert len(host) == 3
        assert host.put(b"a") is None  # it is here already, and now the most recently used
        slot = host.put(b"d")
        assert b"b" not in host
        assert b"a" in host
        assert slot == host.take_out(b"d")

    def test_what_is_taken_out_is_not_replaced(self) -> None:
        host = HostTier(2)
        slots = [host.put(b"a"), host.put(b"b")]
        taken = host.take_out(b"a")
        assert taken == slots[0]
        assert [host.put(b"c"), host.put(b"d")] == [slots[1], slots[1]]
        host.put_back(b"a", taken)
        assert host.put(b"e") == slots[1]  # d was used longer ago than a
        assert b"a" in host

    def test_no_slot_while_all_are_taken_out(self) -> None:
        host = HostTier(1)
        slot = host.put(b"a")
        assert slot == host.take_out(b"a") == 0
        assert host.put(b"b") is None
        host.put_back(b"a", slot)
        assert host.put(b"b") == 0
        assert HostTier(0).put(b"a") is None

    def test_what_came_in_again_meanwhile_stays_and_the_other_slot_is_free(self) -> None:
        host = HostTier(2)
        host.put(b"a")
        taken = host.take_out(b"a")
        again = host.put(b"a")
        assert again not in (None, taken)
        host.put_back(b"a", taken)
        assert (len(host), host.put(b"b")) == (1, taken)

    def test_what_is_discarded_frees_its_slot(self) -> None:
        host = HostTier(1)
        host.put(b"a")
        host.discard(b"b")
        host.discard(b"a")
        assert (len(host), b"a" in host, host.put(b"c")) == (0, False, 0)

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(size=st.integers(0, 4), seed=st.integers(0, 2**32 - 1))
    def test_against_a_plain_restatement(self, size: int, seed: int) -> None:
        """Keys in the order of their last use, slots looked for from the start; never two keys in one slot."""
        rng = random.Random(seed)
        host, here, out = HostTier(size), OrderedDict[bytes, int](), dict[bytes, int]()
        for _ in range(60):
            key = bytes([rng.randrange(7)])
            match rng.choice(("put", "put", "put", "take", "back", "discard")):
                case "put":
                    slot = host.put(key)
                    assert (slot is None) == (key in here or len(out) == size)
                    if key in here:
                        here.move_to_end(key)
                    elif slot is not None:
                        if len(here) + len(out) == size:
                            assert slot == here.popitem(last=False)[1]
                        here[key] = slot
                case "take" if key in here and key not in out:
                    out[key] = here.pop(key)
                    assert host.take_out(key) == out[key]
                case "back" if key in out:
                    host.put_back(key, out[key])
                    here.setdefault(key, out.pop(key))
                case "discard" if key not in out:
                    host.discard(key)
                    here.pop(key, None)
            slots = [*here.values(), *out.values()]
            assert len(set(slots)) == len(slots) <= size
            assert set(slots) <= set(range(size))
            assert len(host) == len(here)
            assert [bytes([i]) in host for i in range(7)] == [bytes([i]) in here for i in range(7)]


class Clockwork(Engine):
    """An engine whose steps and moves take as long as it is told."""

    def __init__(self, *, per_token: float, per_move: float, fixed: float = 1.0, **options: Any) -> None:
        super().__init__(make_scheduler(**options))
        self.now, self.fixed, self.per_token, self.per_move = 0.0, fixed, per_token, per_move
        self.scheduler.clock = lambda: self.now

    def execute(self, plan: StepPlan) -> StepResult:
        result = self.worker.execute(plan, self.sample)
        result.move_seconds = self.per_move * sum(move.kind != "copy" for move in plan.moves)
        self.now += self.fixed + self.per_token * sum(plan.num_tokens) + result.move_seconds
        return result

    def step(self) -> StepPlan:
        plan = self.schedule()
        self.plans.append(plan)
        self.finished += self.scheduler.update(plan, self.execute(plan))
        return plan


def add(engine: Engine, seq_id: int, prompt: int, new_tokens: int = 2, **fields: Any) -> Sequence:
    sequence = make_sequence(seq_id, prompt, new_tokens, **fields)
    engine.scheduler.add(sequence)
    return sequence


def kinds(plan: StepPlan) -> list[str]:
    return [move.kind for move in plan.moves]


def pushed_aside(*, mode: PreemptionMode = "swap", host: int = 8) -> tuple[Engine, Sequence]:
    """Sequence 0, with four full blocks and one token more, has just lost the pool of 6 to a more urgent one."""
    engine = Engine(make_scheduler(blocks=6, policy="priority", host=host, mode=mode))
    victim = add(engine, 0, 17, new_tokens=6)
    engine.step()
    add(engine, 1, 16, new_tokens=2, priority=-1)
    engine.step()
    assert victim.num_preemptions == 1
    return engine, victim


class TestSwap:
    def test_a_victim_comes_back_without_computing_what_it_had(self) -> None:
        engine, victim = pushed_aside()
        assert work(engine.plans[-1]) == {1: (0, 16)}
        # Blocks go only where they are needed: of the pool of 6, one was never used, and the victim's last was free.
        assert kinds(engine.plans[-1]) == ["swap_out"] * 2
        engine.run()
        back = next(plan for plan in engine.plans[2:] if 0 in plan.seq_ids)
        assert work(back)[0] == (16, 2)  # its seventeenth token was in no full block, its eighteenth is new
        stats = engine.scheduler.stats()
        assert (stats.num_preempted_tokens, stats.num_restored_tokens, stats.num_preemptions_swap) == (17, 16, 1)
        assert stats.num_swapped_in_blocks == kinds(back).count("swap_in") == 3
        assert len(victim.tokens) == 23

    def test_nothing_moves_as_long_as_nobody_needs_the_blocks(self) -> None:
        engine = Engine(make_scheduler(blocks=12, seqs=1, policy="priority", host=8, mode="swap"))
        add(engine, 0, 17, new_tokens=6)
        engine.step()
        add(engine, 1, 16, new_tokens=2, priority=-1)  # takes the seat, and finds free blocks enough
        engine.run()
        stats = engine.scheduler.stats()
        assert (stats.num_preemptions_swap, stats.num_restored_tokens) == (1, 16)
        assert stats.num_swapped_out_blocks == stats.num_swapped_in_blocks == 0

    def test_tails_go_out_before_heads(self) -> None:
        engine, victim = pushed_aside()
        keys, host = victim.block_keys, engine.scheduler.blocks.host
        assert [key in host for key in keys] == [False, False, True, True]

    def test_what_is_in_both_places_is_not_written_again(self) -> None:
        engine = Engine(make_scheduler(blocks=6, host=15))
        for seq_id in (0, 1, 2):  # each pushes the one before it out
            add(engine, seq_id, 21, new_tokens=2)
            engine.run()
        assert engine.scheduler.stats().num_swapped_out_blocks == 5 + 5
        for seq_id, prompt in ((3, 0), (4, 1), (5, 0), (6, 1)):
            again = add(engine, seq_id, 21, new_tokens=2, first_token=1000 * (prompt + 1))
            engine.run()
            assert again.num_cached_tokens == 20
        assert engine.scheduler.stats().num_swapped_out_blocks == 5 + 5 + 5  # the third's, and no other's again

    def test_a_victim_may_come_back_from_both_places(self) -> None:
        """Some of its blocks are still in the pool, others in the host tier."""
        engine, victim = pushed_aside()
        assert [engine.scheduler.blocks.pool.find(key) is not None for key in victim.block_keys] == [
            True, True, False, False,
        ]  # fmt: skip
        engine.scheduler.abort(1)
        plan = engine.step()
        assert work(plan) == {0: (16, 2)}
        assert kinds(plan).count("swap_in") == 2

    def test_a_host_tier_that_is_too_small_keeps_the_heads_of_what_came_last(self) -> None:
        """Tails go out first, so heads are the last to be replaced; a hit needs its head."""
        engine = Engine(make_scheduler(blocks=6, host=2))
        add(engine, 0, 21, new_tokens=2)
        engine.run()
        add(engine, 1, 23, new_tokens=1)
        engine.run()
        third = add(engine, 2, 21, new_tokens=2, first_token=1000)
        assert work(engine.step()) == {2: (8, 13)}
        engine.run()
        assert third.num_cached_tokens == 8

    @pytest.mark.parametrize("host", [0, 1, 2, 3, 50])
    def test_answers_are_the_same_with_any_host_tier(self, host: int) -> None:
        def answers(**options: Any) -> tuple[list[list[int]], int]:
            engine = Engine(make_scheduler(policy="priority", **options))
            for i in range(12):
                add(engine, i, 9 + i, new_tokens=9, priority=-(i % 4), first_token=1000 * (i % 3))
                engine.step()
            tokens = [s.tokens for s in sorted(engine.run(), key=lambda s: s.seq_id)]
            return tokens, engine.scheduler.stats().num_swapped_in_blocks

        found, swapped = answers(blocks=9, host=host, mode="swap")
        assert found == answers(blocks=200)[0]
        assert (swapped > 0) == (host > 0)


class TestSecondLevel:
    """The host tier is a second level of the prefix cache, for whoever begins with what was computed before."""

    @pytest.mark.parametrize("mode", ["auto", "swap", "recompute"])
    def test_what_finished_long_ago_is_found_again(self, mode: PreemptionMode) -> None:
        engine = Engine(make_scheduler(blocks=6, host=20, mode=mode))
        for seq_id in range(3):
            add(engine, seq_id, 21, new_tokens=2)
            engine.run()
        again = add(engine, 3, 21, new_tokens=2)
        again.tokens[:] = [1000 + i for i in range(21)]
        plan = engine.step()
        assert work(plan) == {3: (20, 1)}
        assert kinds(plan).count("swap_in") == 5
        engine.run()
        assert again.num_cached_tokens == 20
        assert engine.scheduler.stats().prefix_cache_hits == 20

    def test_salts_are_kept_apart_there_too(self) -> None:
        engine = Engine(make_scheduler(blocks=6, host=20))
        add(engine, 0, 21, cache_salt="a")
        engine.run()
        add(engine, 1, 21, cache_salt="a")
        engine.run()
        other = add(engine, 2, 21, first_token=1000, cache_salt="b")
        engine.run()
        same = add(engine, 3, 21, first_token=1000, cache_salt="a")
        engine.run()
        assert (other.num_cached_tokens, same.num_cached_tokens) == (0, 20)

    def test_what_comes_in_is_shared_by_all_that_arrive_with_it(self) -> None:
        engine = Engine(make_scheduler(blocks=9, host=20))
        for seq_id in range(2):
            add(engine, seq_id, 21)
            engine.run()
        add(engine, 2, 34, new_tokens=2)
        engine.run()
        for seq_id in (3, 4):
            add(engine, seq_id, 21, first_token=1000)
        plan = engine.step()
        assert work(plan) == {3: (20, 1), 4: (20, 1)}
        assert kinds(plan).count("swap_in") == 5
        engine.run()

    def test_what_failed_is_not_kept(self) -> None:
        engine = Engine(make_scheduler(blocks=6, host=20))
        add(engine, 0, 21)
        plan = engine.schedule()
        engine.scheduler.update(plan, engine.worker.execute(plan, engine.sample, failing=0))
        add(engine, 1, 22)
        engine.run()
        assert len(engine.scheduler.blocks.host) == 0

    def test_what_came_back_and_failed_is_not_found_there_again(self) -> None:
        """Else whoever comes with the same tokens could read back what failed."""
        engine, victim = pushed_aside()
        while victim.num_computed == 0:
            plan = engine.schedule()
            failing = 0 if 0 in plan.seq_ids else None
            engine.scheduler.update(plan, engine.worker.execute(plan, engine.sample, failing=failing))
        assert "swap_in" in kinds(plan)
        assert victim.finish_reason == "error"
        assert len(victim.block_keys) == 4
        assert not any(key in engine.scheduler.blocks.host for key in victim.block_keys)


class TestFailure:
    """A step that failed moved nothing, as far as anybody knows."""

    @staticmethod
    def fail(engine: Engine, plan: StepPlan) -> None:
        engine.worker.take_differences(plan)
        for move in plan.moves:
            target: list[Any] = engine.worker.host if move.kind == "swap_out" else engine.worker.cache
            target[move.destination] = [None] * engine.worker.block_size
        for seq_id, start, count in zip(plan.seq_ids, plan.starts, plan.num_tokens, strict=True):
            for position in range(start, start + count):
                block = engine.worker.tables[seq_id][0][position // engine.worker.block_size]
                engine.worker.cache[block][position % engine.worker.block_size] = None
        engine.scheduler.fail(plan)

    def test_forgets_what_it_put_into_the_host_tier(self) -> None:
        engine = Engine(make_scheduler(blocks=6, host=8))
        add(engine, 0, 21)
        engine.run()
        add(engine, 1, 20)
        plan = engine.schedule()
        assert kinds(plan) == ["swap_out"] * 4  # of the six blocks, two were free
        self.fail(engine, plan)
        assert len(engine.scheduler.blocks.host) == 0
        again = add(engine, 2, 21, first_token=1000)
        engine.run()  # the worker would see what was never written
        assert again.num_cached_tokens == 4  # its first block had not gone

    def test_what_should_have_come_in_comes_in_with_the_next_step(self) -> None:
        engine = Engine(make_scheduler(blocks=6, host=8))
        for seq_id in range(2):
            add(engine, seq_id, 21)
            engine.run()
        again = add(engine, 2, 21, first_token=1000)
        plan = engine.schedule()
        assert kinds(plan).count("swap_in") == 5
        self.fail(engine, plan)
        assert again.num_preemptions == 1
        plan = engine.step()
        assert work(plan) == {2: (20, 1)}
        assert kinds(plan).count("swap_in") == 5  # what was read from the host tier is still there
        engine.run()


class TestChoice:
    """Recompute or swap, by what each costs."""

    def test_recompute_puts_no_victim_there(self) -> None:
        engine, victim = pushed_aside(mode="recompute")
        engine.run()
        stats = engine.scheduler.stats()
        assert (stats.num_preemptions_swap, stats.num_preemptions) == (0, 1)
        assert not any(key in engine.scheduler.blocks.host for key in victim.block_keys[2:4])
        assert stats.num_restored_tokens == 4  # the one block that nobody had needed

    @staticmethod
    def preempt_once(engine: Clockwork, seq_id: int) -> Sequence:
        """A victim of four full blocks, beside whom somebody more urgent needs most of the pool."""
        victim = add(engine, seq_id, 17, new_tokens=6)
        engine.step()
        add(engine, seq_id + 1, 16, new_tokens=2, priority=-1)
        engine.step()
        assert victim.num_preemptions == 1
        engine.run()
        return victim

    @pytest.mark.parametrize(("per_move", "swaps"), [(0.001, True), (1.0, False)])
    def test_auto_swaps_while_that_is_cheaper(self, per_move: float, swaps: bool) -> None:
        """17 tokens of 10 ms against 5 blocks, out and back."""
        engine = Clockwork(blocks=6, policy="priority", host=8, mode="auto", per_token=0.01, per_move=per_move)
        self.preempt_once(engine, 0)
        assert engine.scheduler.stats().num_preemptions_swap == 1  # nothing was known yet
        self.preempt_once(engine, 10)
        assert engine.scheduler.stats().num_preemptions_swap == 1 + swaps

    def test_auto_changes_its_mind_when_moves_become_slow(self) -> None:
        engine = Clockwork(blocks=6, policy="priority", host=8, mode="auto", per_token=0.01, per_move=0.001)
        chosen = []
        for i in range(12):
            engine.per_move = 0.001 if i < 4 else 10.0
            before = engine.scheduler.stats().num_preemptions_swap
            self.preempt_once(engine, 10 * i)
            chosen.append(engine.scheduler.stats().num_preemptions_swap - before)
        assert chosen[:4] == [1] * 4
        assert chosen[-4:] == [0] * 4

    def test_the_cost_of_every_step_counts_once_not_once_a_token(self) -> None:
        """A long step with few tokens does not make tokens dear: the slope decides, not the mean."""
        engine = Clockwork(blocks=6, policy="priority", host=8, mode="auto", fixed=100.0, per_token=0.01, per_move=1.0)
        self.preempt_once(engine, 0)
        self.preempt_once(engine, 10)
        assert engine.scheduler.stats().num_preemptions_swap == 1

    def test_the_time_of_moves_is_not_taken_for_that_of_tokens(self) -> None:
        engine = Clockwork(blocks=6, policy="priority", host=8, mode="swap", per_token=0.01, per_move=5.0)
        for i in range(3):
            self.preempt_once(engine, 10 * i)
        cost = engine.scheduler._cost
        assert (cost.per_token, cost.per_move) == (pytest.approx(0.01), pytest.approx(5.0))

    def test_a_failed_step_s_victims_are_no_swap(self) -> None:
        engine = Engine(make_scheduler(blocks=6, host=8, mode="swap"))
        add(engine, 0, 17)
        engine.scheduler.fail(engine.schedule())
        stats = engine.scheduler.stats()
        assert (stats.num_preemptions_failure, stats.num_preemptions_swap) == (1, 0)

    def test_without_a_host_tier_there_is_nothing_to_choose(self) -> None:
        engine, _ = pushed_aside(mode="auto", host=0)
        engine.run()
        assert engine.scheduler.stats().num_preemptions_swap == 0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    blocks=st.integers(6, 14),
    host=st.integers(1, 20),
    mode=st.sampled_from(["auto", "swap", "recompute"]),
    windows=st.sampled_from([(None,), (None, 6), (5,)]),
    budget=st.integers(3, 30),
    per_move=st.sampled_from([1e-6, 0.01, 10.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_contents_are_always_right(
    blocks: int,
    host: int,
    mode: PreemptionMode,
    windows: tuple[int | None, ...],
    budget: int,
    per_move: float,
    seed: int,
) -> None:
    """Requests over few prefixes in a small pool; the worker reads every slot that a window sees, and checks it."""
    rng = random.Random(seed)
    engine = Clockwork(
        blocks=blocks * len(windows), policy="priority", seqs=4, budget=budget, windows=windows, host=host, mode=mode,
        per_token=0.01, per_move=per_move,
    )  # fmt: skip
    for i in range(15):
        first, priority = 1000 * rng.randrange(3), -rng.randrange(3)
        add(engine, i, rng.randrange(1, 17), rng.randrange(1, 9), first_token=first, priority=priority)
        for _ in range(rng.randrange(4)):
            if engine.scheduler.sequences:
                engine.step()
    assert len(engine.run()) == 15
    stats = engine.scheduler.stats()
    assert stats.num_used_blocks == 0
    assert stats.num_used_host_blocks <= host
    assert stats.num_swapped_in_blocks == sum(kinds(plan).count("swap_in") for plan in engine.plans)
    assert stats.num_swapped_out_blocks == sum(kinds(plan).count("swap_out") for plan in engine.plans)
