"""What is computed once is found again: across requests, steps, preemptions and failures; never by the wrong one."""

import hashlib
import struct
import subprocess
import sys
from dataclasses import replace

import pytest

from octavo.core import Sequence, Status, block_manager
from octavo.core.block_keys import block_key, root_key
from tests.core.helpers import PARAMS, Engine, make_scheduler, make_sequence
from tests.core.test_scheduler import work


def add(engine: Engine, seq_id: int, prompt: int, new_tokens: int = 2, *, first_token: int = 5, **fields):
    sequence = make_sequence(seq_id, prompt, new_tokens, first_token=first_token, **fields)
    engine.scheduler.add(sequence)
    return sequence


class TestKeys:
    def test_the_encoding_is_fixed(self):
        """By hand: each part of the root with its length before it, each token in four bytes, little end first."""
        root = hashlib.sha256(b"\x03" + bytes(7) + b"=me" + bytes(8)).digest()
        assert root_key("me") == root
        assert block_key(root, [1, 258]) == hashlib.sha256(root + bytes([1, 0, 0, 0, 2, 1, 0, 0])).digest()

    def test_every_part_counts(self):
        keys = [
            root_key(salt, adapter)
            for salt, adapter in [(None, None), ("", None), ("a", None), (None, "a"), ("a", "a"), ("=a", None)]
        ]
        keys += [block_key(keys[0], tokens) for tokens in ([1, 2], [2, 1], [1], [1, 2, 0])]
        keys.append(block_key(keys[1], [1, 2]))
        assert len(set(keys)) == len(keys)

    def test_keys_are_the_same_in_every_process(self):
        script = "from octavo.core.block_keys import *; print(block_key(root_key('salt'), [7, 8]).hex())"
        found = {
            subprocess.run(
                [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
            ).stdout.strip()
            for seed in ("1", "2")
        }
        root = hashlib.sha256(struct.pack("<q", 5) + b"=salt" + bytes(8)).digest()
        assert found == {hashlib.sha256(root + struct.pack("<2I", 7, 8)).hexdigest()}


class TestHits:
    def test_a_second_request_computes_only_what_differs(self):
        engine = Engine(make_scheduler())
        first = add(engine, 0, 10)
        engine.run()
        second = add(engine, 1, 14)
        assert work(engine.step()) == {1: (8, 6)}
        assert engine.plans[-1].new_blocks[1][0][:2] == engine.plans[0].new_blocks[0][0][:2]
        engine.run()
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
        stats = engine.scheduler.stats()
        assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (24, 8)
        assert stats.num_tokens == 10 + 1 + 6 + 1

    @pytest.mark.parametrize(("prompt", "found"), [(8, 4), (9, 8), (4, 0), (3, 0), (1, 0)])
    def test_the_last_token_is_never_a_hit(self, prompt, found):
        engine = Engine(make_scheduler())
        add(engine, 0, prompt)
        engine.run()
        add(engine, 1, prompt)
        assert work(engine.step()) == {1: (found, prompt - found)}

    def test_what_was_generated_is_found_too(self):
        """As the next turn of a conversation does."""
        engine = Engine(make_scheduler())
        first = add(engine, 0, 6, new_tokens=7)
        engine.run()
        second = make_sequence(1, 1)
        second.tokens[:] = [*first.tokens, 1, 2]  # 15, of which 12 were computed
        second.prompt_length, second.max_length = 15, 20
        engine.scheduler.add(second)
        assert work(engine.step()) == {1: (12, 3)}

    def test_a_common_start_of_less_than_a_block_is_none(self):
        engine = Engine(make_scheduler())
        add(engine, 0, 9)
        engine.run()
        other = add(engine, 1, 9)
        other.tokens[3] += 50
        assert work(engine.step()) == {1: (0, 9)}

    def test_equal_blocks_behind_different_ones_are_not_equal(self):
        """Keys and values depend on all tokens before them."""
        engine = Engine(make_scheduler())
        add(engine, 0, 13)
        engine.run()
        add(engine, 1, 9, first_token=9)  # the first request's second block and third, as its own first and second
        assert work(engine.step()) == {1: (0, 9)}

    def test_salts_do_not_share(self):
        engine = Engine(make_scheduler())
        starts = []
        for seq_id, salt in enumerate([None, "a", "b", "a", None]):
            add(engine, seq_id, 9, cache_salt=salt)
            starts.append(engine.step().starts)
            engine.run()
        assert starts == [[0], [0], [0], [8], [8]]

    def test_prompt_logprobs_need_every_token(self):
        engine = Engine(make_scheduler(policy="priority", blocks=5))
        add(engine, 0, 9)
        engine.run()
        second = make_sequence(1, 9, 9, first_token=5)
        second.params = replace(PARAMS, prompt_logprobs=0)
        engine.scheduler.add(second)
        assert work(engine.step()) == {1: (0, 9)}
        assert engine.scheduler.stats().prefix_cache_hits == 0
        add(engine, 2, 12, new_tokens=1, first_token=500, priority=-1)
        assert engine.step().preempted == [1]
        assert work(engine.step()) == {1: (8, 2)}  # they are reported: now it may find what it has lost

    def test_without_caching_nothing_is_found_or_counted(self):
        engine = Engine(make_scheduler(caching=False))
        for seq_id in range(2):
            add(engine, seq_id, 9)
            assert engine.step().starts == [0]
            engine.run()
        stats = engine.scheduler.stats()
        assert (stats.prefix_cache_queries, stats.num_cached_blocks, stats.num_free_blocks) == (0, 0, 100)


class TestTogether:
    def test_requests_that_arrive_together_compute_a_prefix_once(self):
        engine = Engine(make_scheduler(budget=1000, seqs=64, blocks=500))
        for seq_id in range(64):
            add(engine, seq_id, 101).tokens[-1] = 1000 + seq_id
        plan = engine.step()  # the worker checks what each reads in this very step
        assert plan.num_tokens == [101] + [1] * 63
        assert engine.scheduler.stats().num_used_blocks == 25 + 64
        engine.run()
        assert engine.scheduler.stats().prefix_cache_hits == 63 * 100

    def test_and_over_the_chunks_of_the_first(self):
        engine = Engine(make_scheduler(budget=10))
        for seq_id in range(3):
            add(engine, seq_id, 25)
        assert [work(engine.step()) for _ in range(3)] == [
            {0: (0, 10)},
            {0: (10, 10)},
            {0: (20, 5), 1: (24, 1), 2: (24, 1)},
        ]


class TestEviction:
    def test_the_tail_of_a_sequence_goes_before_its_head(self):
        engine = Engine(make_scheduler(blocks=6))
        add(engine, 0, 16, new_tokens=1)
        engine.run()  # four cached blocks, two free ones
        add(engine, 1, 15, new_tokens=1, first_token=500)  # takes four: two of the cached ones
        engine.run()
        add(engine, 2, 17, new_tokens=1)
        assert work(engine.step()) == {2: (8, 9)}

    def test_the_least_recently_used_goes_first(self):
        engine = Engine(make_scheduler(blocks=4))
        for seq_id, first_token in enumerate([100, 200]):
            add(engine, seq_id, 8, new_tokens=1, first_token=first_token)
            engine.run()
        add(engine, 2, 9, new_tokens=1, first_token=100)  # used again; its third block is the one of 200's tail
        engine.run()
        add(engine, 3, 9, new_tokens=1, first_token=200)
        add(engine, 4, 9, new_tokens=1, first_token=100)
        assert work(engine.step()) == {3: (4, 5)}
        assert work(engine.step()) == {4: (4, 5)}

    def test_cached_blocks_are_as_good_as_free_ones(self):
        """A full cache keeps nobody waiting."""
        engine = Engine(make_scheduler(blocks=4))
        for seq_id in range(5):
            add(engine, seq_id, 13, new_tokens=4, first_token=100 * seq_id + 7)
            assert work(engine.step()) == {seq_id: (0, 13)}
            engine.run()
        assert engine.scheduler.stats().num_preemptions == 0


class TestPreemption:
    def test_a_victim_finds_what_was_not_taken(self):
        engine = Engine(make_scheduler(policy="priority", blocks=8))
        add(engine, 0, 17, new_tokens=8)
        engine.step()
        add(engine, 1, 13, new_tokens=1, first_token=500, priority=-1)
        plan = engine.step()  # four blocks: the three that were free, and the victim's last
        assert (plan.preempted, plan.seq_ids) == ([0], [1])
        assert work(engine.step()) == {0: (16, 2)}
        stats = engine.scheduler.stats()
        assert (stats.num_preemptions, stats.num_preemptions_admission) == (1, 1)
        assert (stats.num_preempted_tokens, stats.num_restored_tokens) == (17, 16)
        assert stats.prefix_cache_hits == 0  # of its own tokens, when it came back: not a hit of the prompt
        assert engine.run()[-1].num_cached_tokens == 0

    def test_what_a_victim_alone_held_of_the_prefix_is_not_counted_as_room(self):
        """The urgent request shares two of the victim's three blocks, and needs three more; one is free."""
        engine = Engine(make_scheduler(policy="priority", blocks=6))
        add(engine, 0, 9, new_tokens=4)
        add(engine, 1, 6, new_tokens=3, first_token=500, priority=-2)
        engine.step()
        add(engine, 2, 20, new_tokens=2, priority=-1)
        plan = engine.step()
        assert (plan.preempted, plan.seq_ids) == ([], [1, 0])
        while 2 not in plan.seq_ids:
            assert plan.preempted == []
            plan = engine.step()
        assert work(plan)[2] == (8, 12)
        engine.run()


class TestChoices:
    """Sequences of one group: one prompt, computed once, and a token for each from the same logits."""

    def add_choices(self, engine: Engine, count: int, prompt: int, new_tokens: int = 4, first_id: int = 0, **fields):
        return [add(engine, first_id + i, prompt, new_tokens, group=first_id, choice=i, **fields) for i in range(count)]

    @pytest.mark.parametrize("caching", [True, False])
    def test_sixteen_choices_of_a_thousand_tokens(self, caching):
        engine = Engine(make_scheduler(blocks=200, block_size=16, seqs=16, budget=2048, caching=caching))
        choices = self.add_choices(engine, 16, 1000)
        plan = engine.step()
        assert (plan.starts, plan.num_tokens) == ([0] + [1000] * 15, [1000] + [0] * 15)
        assert engine.scheduler.stats().num_used_blocks == 63
        plan = engine.step()
        assert plan.num_tokens == [1] * 16
        assert len(plan.tails) == len(plan.moves) == 15  # the last of them writes where it is
        stats = engine.scheduler.stats()
        assert (stats.num_used_blocks, stats.num_shared_blocks) == (62 + 16, 62)
        assert (stats.num_tokens, stats.num_forks, stats.num_block_copies) == (1000 + 16, 15, 15)
        engine.run()
        assert all(len(choice.tokens) == 1004 for choice in choices)

    def test_a_prompt_of_whole_blocks_needs_no_copy(self):
        engine = Engine(make_scheduler())
        self.add_choices(engine, 3, 8)
        engine.step()
        plan = engine.step()
        assert (plan.moves, plan.tails) == ([], {})
        assert {i: len(blocks) for i, (blocks,) in plan.new_blocks.items()} == {0: 1, 1: 1, 2: 1}

    @pytest.mark.parametrize(("budget", "steps"), [(10, 1), (5, 2), (4, 3), (1, 10)])
    def test_the_budget_is_spent_once(self, budget, steps):
        """Forks need none: those of a prompt that takes the last of it come in all the same."""
        engine = Engine(make_scheduler(budget=budget, caching=False))
        self.add_choices(engine, 4, 10)
        for _ in range(steps):
            plan = engine.step()
        assert plan.seq_ids == [0, 1, 2, 3]
        assert sum(sum(plan.num_tokens) for plan in engine.plans) == 10
        assert all(len(s.tokens) == 11 for s in engine.scheduler.running)

    def test_the_prompt_is_hashed_once_for_all(self, monkeypatch):
        hashed = []
        monkeypatch.setattr(
            block_manager, "block_key", lambda parent, tokens: hashed.append(tokens) or block_key(parent, tokens)
        )
        engine = Engine(make_scheduler(budget=2000, blocks=400, seqs=16))
        self.add_choices(engine, 16, 1000, new_tokens=6)
        engine.run()
        assert len(hashed) == 1000 // 4 + 16  # a block of its own each, which five computed tokens fill

    def test_without_a_seat_a_choice_waits_and_finds_the_prompt(self):
        engine = Engine(make_scheduler(seqs=2))
        self.add_choices(engine, 3, 10, new_tokens=2)
        assert engine.step().seq_ids == [0, 1]
        engine.step()
        assert work(engine.step()) == {2: (8, 2)}
        engine.run()

    def test_without_room_a_choice_waits(self):
        engine = Engine(make_scheduler(blocks=5))
        self.add_choices(engine, 3, 10, new_tokens=4)  # three blocks, and one for each choice
        assert engine.step().seq_ids == [0, 1]
        assert len(engine.run()) == 3
        assert engine.scheduler.stats().num_preemptions == 0

    def test_choices_go_on_without_the_one_that_computed_the_prompt(self):
        engine = Engine(make_scheduler())
        self.add_choices(engine, 3, 10)
        plan = engine.schedule()
        engine.scheduler.abort(0)
        engine.scheduler.update(plan, engine.worker.execute(plan, lambda i, _: i))
        assert [s.tokens[10:] for s in engine.scheduler.running] == [[1], [2]]
        engine.run()

    def test_the_next_choice_computes_the_prompt_of_one_that_was_aborted_while_it_waited(self):
        engine = Engine(make_scheduler())
        self.add_choices(engine, 3, 10)
        engine.scheduler.abort(0)
        assert work(engine.step()) == {1: (0, 10), 2: (10, 0)}

    def test_two_requests_with_equal_prompts_stay_apart(self):
        engine = Engine(make_scheduler())
        self.add_choices(engine, 2, 10)
        self.add_choices(engine, 2, 10, first_id=5)
        assert work(engine.step()) == {0: (0, 10), 1: (10, 0), 5: (8, 2), 6: (10, 0)}
        engine.run()

    def test_replayed_choices_are_computed_each(self):
        """Their tokens differ behind the prompt, however many they are."""
        engine = Engine(make_scheduler())
        for choice in self.add_choices(engine, 2, 10, new_tokens=8):
            choice.tokens += [choice.seq_id] * 3
        assert work(engine.step()) == {0: (0, 13), 1: (8, 5)}
        engine.run()


class TestBranch:
    """What beam search does: end the beams of a group, and go on with what comes of them."""

    @staticmethod
    def beam(seq_id: int, parent: Sequence, token: int) -> Sequence:
        return Sequence(
            seq_id,
            [*parent.tokens, token],
            PARAMS,
            max_length=parent.max_length,
            prompt_length=parent.prompt_length,
            is_beam=True,
        )

    def test_beams_wait_for_their_group_and_share_what_they_have_in_common(self):
        engine = Engine(make_scheduler())
        parent = add(engine, 0, 6, new_tokens=9, is_beam=True)
        assert work(engine.step()) == {0: (0, 6)}
        assert len(parent.tokens) == 6  # what it sampled is for its group to choose from
        assert not engine.scheduler.schedule()
        beams = [self.beam(i, parent, 70 + i) for i in (1, 2, 3)]
        engine.scheduler.branch([parent], [(parent, beam) for beam in beams])
        assert [beam.block_tables for beam in beams] == [beams[0].block_tables] * 3
        plan = engine.step()
        assert (work(plan), plan.finished) == ({1: (6, 1), 2: (6, 1), 3: (6, 1)}, [0])
        assert list(plan.tails) == [1, 2]  # the last of them writes where it is
        assert not engine.scheduler.schedule()
        next_beams = [self.beam(i, beams[1], 80 + i) for i in (4, 5)]
        engine.scheduler.branch(beams, [(beams[1], beam) for beam in next_beams])
        assert engine.scheduler.stats().num_used_blocks == 2
        plan = engine.step()
        assert (work(plan), sorted(plan.finished)) == ({4: (7, 1), 5: (7, 1)}, [1, 2, 3])
        engine.scheduler.branch(next_beams, [])
        assert engine.scheduler.stats().num_used_blocks == 0
        assert not engine.scheduler.sequences

    def test_the_only_child_of_a_beam_copies_nothing(self):
        engine = Engine(make_scheduler())
        parent = add(engine, 0, 6, new_tokens=9, is_beam=True)
        engine.step()
        for i in range(1, 4):
            child = self.beam(i, parent, 7)
            engine.scheduler.branch([parent], [(parent, child)])
            assert engine.step().moves == []
            parent = child

    def test_without_a_seat_a_beam_waits_and_finds_what_is_cached(self):
        engine = Engine(make_scheduler(seqs=1))
        parent = add(engine, 0, 9, new_tokens=3, is_beam=True)
        engine.step()
        beams = [self.beam(i, parent, 70 + i) for i in (1, 2)]
        engine.scheduler.branch([parent], [(parent, beam) for beam in beams])
        assert [beam.status for beam in beams] == [Status.RUNNING, Status.WAITING]
        engine.step()
        assert not engine.scheduler.schedule()  # the seat is taken by one that waits: a group needs a seat for each
        engine.scheduler.abort(1)
        assert work(engine.step()) == {2: (8, 2)}

    def test_a_beam_of_one_that_lost_its_blocks_computes_them_again(self):
        engine = Engine(make_scheduler(blocks=4, policy="priority", caching=False))
        parent = add(engine, 0, 9, new_tokens=3, is_beam=True)
        engine.step()
        engine.scheduler.add(make_sequence(9, prompt=12, new_tokens=1, priority=-1))
        assert work(engine.step()) == {9: (0, 12)}
        child = self.beam(1, parent, 7)
        engine.scheduler.branch([parent], [(parent, child)])
        assert len(engine.scheduler.waiting) == 1
        assert work(engine.step()) == {1: (0, 10)}

    def test_nobody_takes_the_place_of_one_that_had_to_leave_before_its_first_step(self):
        """The workers have not heard of it, so no plan says that it left; all the same it stays first in line."""
        engine = Engine(make_scheduler(blocks=4, caching=False))
        first = add(engine, 0, 4, new_tokens=2)
        parent = add(engine, 1, 5, new_tokens=4, first_token=500, is_beam=True)
        add(engine, 2, 2, new_tokens=1, first_token=700)
        assert engine.step().seq_ids == [0, 1]
        beams = [self.beam(i, parent, 70 + i) for i in (3, 4)]
        engine.scheduler.branch([parent], [(parent, beam) for beam in beams])
        plan = engine.step()  # 0 takes the last free block, and 3 needs a copy of the block that it shares with 4
        assert (plan.seq_ids, plan.preempted, first.num_preemptions) == ([0, 3], [], 0)
        assert engine.scheduler.waiting.peek().seq_id == 4

    def test_what_does_not_go_on_from_the_parent_is_refused(self):
        engine = Engine(make_scheduler())
        parent = add(engine, 0, 6, is_beam=True)
        engine.step()
        for tokens in ([5, 6, 7], parent.tokens[:6], [9, *parent.tokens[1:6], 7]):
            child = make_sequence(1, 1)
            child.tokens[:] = tokens
            with pytest.raises(ValueError, match="does not go on from"):
                engine.scheduler.branch([parent], [(parent, child)])


class TestFailure:
    def test_a_step_that_failed_leaves_nothing_to_be_found(self):
        engine = Engine(make_scheduler())
        add(engine, 0, 13)
        add(engine, 1, 13)  # begins with what the first should have computed
        plan = engine.schedule()
        assert work(plan) == {0: (0, 13), 1: (12, 1)}
        engine.worker.take_differences(plan)
        engine.scheduler.fail(plan)
        stats = engine.scheduler.stats()
        assert (stats.num_free_blocks, stats.num_cached_blocks, stats.num_held_tokens) == (100, 0, 0)
        assert stats.num_preemptions_failure == 2
        plan = engine.step()
        assert (plan.preempted, plan.new) == ([0, 1], [])
        assert work(plan) == {0: (0, 13), 1: (12, 1)}
        engine.run()

    def test_who_ran_before_goes_on_from_where_it_was(self):
        """Even if every other step fails, and prompts come in chunks."""
        engine = Engine(make_scheduler(budget=4, block_size=16))
        sequence = add(engine, 0, 14)
        starts = []
        while engine.scheduler.sequences:
            plan = engine.step()
            starts += plan.starts
            if engine.scheduler.sequences:
                plan = engine.schedule()
                engine.worker.take_differences(plan)
                engine.scheduler.fail(plan)
                assert sequence.num_computed == plan.starts[0]
        assert starts == [0, 4, 8, 12, 14]

    def test_what_an_aborted_sequence_should_have_filled_is_not_found(self):
        engine = Engine(make_scheduler())
        add(engine, 0, 13)
        plan = engine.schedule()
        engine.worker.take_differences(plan)
        engine.scheduler.abort(0)
        assert engine.scheduler.stats().num_cached_blocks == 3
        engine.scheduler.fail(plan)
        assert engine.scheduler.stats().num_cached_blocks == 0
        add(engine, 1, 13)
        assert work(engine.step()) == {1: (0, 13)}

    def test_a_sequence_that_failed_leaves_nothing_behind_that_it_alone_held(self):
        engine = Engine(make_scheduler())
        add(engine, 0, 5, new_tokens=9)
        engine.step()
        add(engine, 1, 13)
        plan = engine.schedule()
        assert work(plan)[1] == (4, 9)
        engine.scheduler.update(plan, engine.worker.execute(plan, lambda *_: 7, failing=1))
        add(engine, 2, 13)
        assert work(engine.step())[2] == (4, 9)


def test_snapshot_of_a_small_pool():
    engine = Engine(make_scheduler(blocks=8))
    add(engine, 7, 6, new_tokens=1)
    engine.run()
    for choice in range(2):
        add(engine, choice, 6, group=0, choice=choice)
    add(engine, 2, 32, new_tokens=1, first_token=500)  # does not fit: waits
    engine.step()
    snapshot = engine.scheduler.kv_snapshot()
    by_id = {s.seq_id: s for s in snapshot.sequences}
    assert snapshot.block_size == 4
    assert [by_id[i].status for i in range(3)] == ["running", "running", "waiting"]
    assert [(len(by_id[i].blocks), by_id[i].num_shared, by_id[i].num_cached_tokens) for i in range(3)] == [
        (2, 2, 4), (2, 2, 4), (0, 0, 0),
    ]  # fmt: skip
    assert snapshot.owners == {block: list(range(2)) for block in by_id[0].blocks}
    assert sorted(snapshot.states) == ["free"] * 6 + ["used"] * 2
    engine.scheduler.abort(0)
    engine.scheduler.abort(1)
    assert sorted(engine.scheduler.kv_snapshot().states) == ["cached"] + ["free"] * 7
