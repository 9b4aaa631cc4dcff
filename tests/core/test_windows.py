"""Layers that look back over a window only: what fell out of it serves others, and nothing else changes."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core import NOTHING, BlockManager, Sequence, most_blocks
from octavo.errors import RequestError
from tests.core.helpers import PARAMS, Engine, make_scheduler, make_sequence
from tests.core.test_host_tier import Clockwork
from tests.core.test_scheduler import work

Windows = tuple[int | None, ...]

GEMMA: Windows = (None, 16, 16)
MISTRAL: Windows = (16,)


def add(engine: Engine, seq_id: int, prompt: int, new_tokens: int = 2, **fields: Any) -> Sequence:
    sequence = make_sequence(seq_id, prompt, new_tokens, **fields)
    engine.scheduler.add(sequence)
    return sequence


def held(sequence: Sequence, group: int) -> list[int]:
    """Indices in the table of a group that hold a block."""
    return [i for i, block in enumerate(sequence.block_tables[group]) if block != NOTHING]


def finish_all(engine: Engine) -> None:
    engine.run()
    assert engine.scheduler.stats().num_used_blocks == engine.scheduler.stats().num_held_tokens == 0


class TestMostBlocks:
    @staticmethod
    def brute_force(num_tokens: int, block_size: int, window: int | None, max_chunk: int) -> int:
        """Over every step that may lead to so many tokens: the blocks of all positions that it sees or writes."""
        most = 0
        for start in range(num_tokens):
            for end in range(start + 1, min(start + max_chunk, num_tokens) + 1):
                first = 0 if window is None else max(start - window + 1, 0)
                most = max(most, len({position // block_size for position in range(first, end)}))
        return most

    @pytest.mark.parametrize("block_size", [1, 2, 3, 4, 7])
    @pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 5, 8, 9, 15, 16])
    def test_is_exactly_what_the_worst_alignment_needs(self, window: int | None, block_size: int) -> None:
        for max_chunk in (1, 2, 3, 5, 8, 17):
            for num_tokens in (*range(30), 60):
                expected = self.brute_force(num_tokens, block_size, window, max_chunk)
                assert most_blocks(num_tokens, block_size, (window,), max_chunk) == expected, (max_chunk, num_tokens)

    @pytest.mark.parametrize(
        ("windows", "tokens", "decoding", "in_large_steps"),
        [
            ((None, *[512] * 5), 8192, 677, 1317),
            ((None, *[512] * 5), 32768, 2213, 2853),
            ((4096,), 8192, 257, 385),
            ((4096,), 32768, 257, 385),
        ],
    )
    def test_figures_of_the_docs(self, windows: Windows, tokens: int, decoding: int, in_large_steps: int) -> None:
        """docs/kv-memory.md: Gemma 3 270M and Mistral 7B."""
        assert [most_blocks(tokens, 16, windows, chunk) for chunk in (1, 2048)] == [decoding, in_large_steps]
        line = rf"\| {tokens:,} \| [^|]* \| {decoding:,} \| [^|]* \| {in_large_steps:,} \|"
        assert re.search(line, (Path(__file__).parents[2] / "docs" / "kv-memory.md").read_text())

    def test_groups_add_up(self) -> None:
        each = [most_blocks(100, 4, (window,), 7) for window in (None, 16, 5)]
        assert most_blocks(100, 4, (None, 16, 5), 7) == sum(each)
        assert BlockManager(10, 4, windows=(None, 16, 5), max_chunk=7).most_blocks(100) == sum(each)

    @pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 7, 16])
    @pytest.mark.parametrize("window", [1, 2, 5, 6, 16, 17])
    def test_a_lone_sequence_reaches_it_and_never_holds_more(self, window: int, budget: int) -> None:
        """Prompts of all lengths, so that their chunks meet all alignments."""
        most = most_blocks(60, 4, (window,), budget)
        highest = expected = 0
        for prompt in range(1, 57):
            engine = Engine(make_scheduler(blocks=most, budget=budget, windows=(window,), caching=False))
            sequence = add(engine, 0, prompt, new_tokens=61 - prompt)
            while engine.scheduler.sequences:
                plan = engine.schedule()
                highest = max(highest, len(held(sequence, 0)))
                first, end = max(plan.starts[0] - window + 1, 0), plan.starts[0] + plan.num_tokens[0]
                expected = max(expected, len({position // 4 for position in range(first, end)}))
                engine.scheduler.update(plan, engine.worker.execute(plan, engine.sample))
            assert sequence.num_preemptions == 0
        assert highest == expected <= most
        if budget % 2:
            assert highest == most  # others do not meet every alignment


@pytest.mark.parametrize("windows", [GEMMA, MISTRAL])
class TestMemory:
    def test_stays_the_same_while_a_long_sequence_decodes(self, windows: Windows) -> None:
        """But for the group that keeps everything."""
        engine = Engine(make_scheduler(windows=windows, budget=8, blocks=200))
        sequence = add(engine, 0, 40, new_tokens=160)
        seen: dict[int, set[int]] = {g: set() for g, window in enumerate(windows) if window is not None}
        while len(sequence.tokens) < 199:
            engine.step()
            manager = engine.scheduler.blocks
            total = sum(len(held(sequence, g)) for g in range(len(windows)))
            assert total == engine.scheduler.stats().num_used_blocks <= manager.most_blocks(len(sequence.tokens))
            for g in seen:
                if sequence.num_computed > 40 + 16:
                    seen[g].add(len(held(sequence, g)))
        assert all(counts == {5} for counts in seen.values())  # 16 positions, wherever they begin
        if None in windows:
            assert len(held(sequence, 0)) == 50
        finish_all(engine)

    def test_a_pool_of_what_it_needs_at_most_is_enough(self, windows: Windows) -> None:
        needed = most_blocks(199, 4, windows, 8)
        assert needed < len(windows) * 50
        engine = Engine(make_scheduler(windows=windows, budget=8, blocks=needed))
        sequence = add(engine, 0, 40, new_tokens=160)
        finish_all(engine)
        assert (len(sequence.tokens), sequence.num_preemptions) == (200, 0)
        assert engine.scheduler.stats().peak_used_blocks <= needed

    def test_what_needs_one_block_more_is_refused_with_the_numbers(self, windows: Windows) -> None:
        needed = most_blocks(199, 4, windows, 8)
        engine = Engine(make_scheduler(windows=windows, budget=8, blocks=needed - 1))
        with pytest.raises(RequestError, match=rf"needs {needed} KV blocks for 200 tokens .* has {needed - 1}$"):
            add(engine, 0, 40, new_tokens=160)
        assert not engine.scheduler.sequences

    def test_what_fell_out_is_given_back_before_new_blocks_are_asked_for(self, windows: Windows) -> None:
        """So a pool that is full serves a sequence that moves on; nobody is preempted for it."""
        needed = most_blocks(100, 4, windows, 1)
        engine = Engine(make_scheduler(windows=windows, budget=1, blocks=needed, caching=False))
        sequence = add(engine, 0, 60, new_tokens=41)
        free = []
        while engine.scheduler.sequences:
            engine.step()
            free.append(engine.scheduler.stats().num_free_blocks)
        assert sequence.num_preemptions == 0
        assert min(free) == 0

    def test_a_victim_computes_again_what_its_window_lost(self, windows: Windows) -> None:
        """Of what fell out before the preemption only what nobody took meanwhile is found; the answer stays."""
        roomy = Engine(make_scheduler(windows=windows, budget=8, blocks=300))
        alone = add(roomy, 0, 40, new_tokens=20)
        finish_all(roomy)
        blocks = most_blocks(59, 4, windows, 8) + len(windows)
        engine = Engine(make_scheduler(windows=windows, budget=8, blocks=blocks, policy="priority"))
        victim = add(engine, 0, 40, new_tokens=20)
        for _ in range(8):
            engine.step()
        add(engine, 1, 41, new_tokens=3, priority=-1)
        finish_all(engine)
        assert victim.num_preemptions == 1
        assert victim.tokens == alone.tokens

    @pytest.mark.parametrize("host", [0, 4, 100])
    def test_swaps_bring_back_what_the_window_sees_and_no_more(self, windows: Windows, host: int) -> None:
        blocks = most_blocks(60, 4, windows, 8) + len(windows)
        engine = Engine(
            make_scheduler(windows=windows, budget=8, blocks=blocks, policy="priority", host=host, mode="swap")
        )
        victim = add(engine, 0, 40, new_tokens=20)
        for _ in range(8):
            engine.step()
        computed = victim.num_computed
        held_before = sum(len(held(victim, g)) for g in range(len(windows)))
        add(engine, 1, 50, new_tokens=3, priority=-1)
        engine.run()
        assert victim.num_preemptions == 1
        back = next(plan for plan in engine.plans[8:] if 0 in plan.new_blocks and plan.starts[plan.seq_ids.index(0)])
        swapped = [move for move in back.moves if move.kind == "swap_in"]
        if host == 100:
            assert work(back)[0][0] == computed // 4 * 4
            assert 0 < len(swapped) < held_before
        finish_all(engine)


class TestPrefix:
    """A hit needs what the windows look back at from its end, and all of what other groups keep."""

    @staticmethod
    def cached(windows: Windows, prompt: int = 41, **options: Any) -> tuple[Engine, dict[int, Sequence]]:
        """An engine that has computed one prompt, nothing of which is lost."""
        engine = Engine(make_scheduler(windows=windows, **options))
        first = add(engine, 0, prompt, first_token=5)
        engine.run()
        return engine, {0: first}

    @staticmethod
    def forget(engine: Engine, sequence: Sequence, group: int, *indices: int) -> None:
        """As if these blocks had been needed for something else."""
        manager = engine.scheduler.blocks
        for index in indices:
            block = manager.pool.find(manager._key(sequence, index) + (bytes([group]) if group else b""))
            assert block is not None
            manager.pool.withdraw(block)

    def hit(self, engine: Engine) -> int:
        """Tokens of the prompt that a second request finds."""
        sequence = add(engine, 1, 41, first_token=5)
        engine.run()
        return sequence.num_cached_tokens

    @pytest.mark.parametrize("windows", [GEMMA, MISTRAL, (None, 1), (7,), (1000,)])
    def test_all_of_a_prompt_is_found(self, windows: Windows) -> None:
        engine, _ = self.cached(windows)
        assert self.hit(engine) == 40

    def test_blocks_before_the_window_are_not_needed(self) -> None:
        """The token at 40 sees back to 25, which is in block 6."""
        engine, first = self.cached(MISTRAL)
        self.forget(engine, first[0], 0, 0, 1, 2, 3, 4, 5)
        assert self.hit(engine) == 40
        begun = engine.plans[-2].new_blocks[1]
        assert [block == NOTHING for block in begun[0]] == [True] * 6 + [False] * 5

    @pytest.mark.parametrize(("hole", "found"), [(9, 36), (8, 32), (6, 24), (5, 40)])
    def test_a_hole_in_the_window_shortens_the_hit(self, hole: int, found: int) -> None:
        engine, first = self.cached(MISTRAL)
        self.forget(engine, first[0], 0, hole)
        assert self.hit(engine) == found

    def test_a_hole_before_a_shorter_hit_counts_too(self) -> None:
        """Block 8 is gone, so a hit ends there at most: it needs blocks 4 to 7, and 5 is gone. So it ends at 5."""
        engine, first = self.cached(MISTRAL)
        self.forget(engine, first[0], 0, 8, 5)
        assert self.hit(engine) == 20

    def test_a_group_without_a_window_needs_everything(self) -> None:
        engine, first = self.cached(GEMMA)
        self.forget(engine, first[0], 0, 3)
        assert self.hit(engine) == 12

    def test_a_hole_in_one_group_shortens_all(self) -> None:
        engine, first = self.cached(GEMMA)
        self.forget(engine, first[0], 2, 7)
        assert self.hit(engine) == 28
        assert {len(table) for table in engine.plans[-2].new_blocks[1]} == {11}

    def test_what_fell_out_while_the_first_ran_is_still_found(self) -> None:
        """It is cached like what a finished sequence leaves, and by a shorter prompt found too."""
        engine = Engine(make_scheduler(windows=MISTRAL, budget=8))
        add(engine, 0, 60, new_tokens=10, first_token=5)
        for _ in range(10):
            engine.step()
        other = add(engine, 1, 21, first_token=5)
        engine.step()
        assert other.num_cached_tokens == 20
        finish_all(engine)

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(
        windows=st.lists(st.one_of(st.none(), st.integers(1, 14)), min_size=1, max_size=3),
        block_size=st.integers(1, 5),
        length=st.integers(1, 40),
        seed=st.integers(0, 2**32 - 1),
        share=st.floats(0.0, 0.4),
    )
    def test_it_is_the_longest_that_every_group_can_serve(
        self, windows: list[int | None], block_size: int, length: int, seed: int, share: float
    ) -> None:
        """Restated: of all lengths, the longest behind which each position that a group looks at is there."""
        rng = random.Random(seed)
        windows.sort(key=lambda window: window is not None)
        manager = BlockManager(300, block_size, windows=windows, max_chunk=40)
        first = Sequence(0, list(range(5, 5 + length)), PARAMS, max_length=length + 1)
        manager.adopt(first, manager.find_prefix(first))
        manager.grow(first, length)
        first.num_computed = length
        manager.publish(first, 0)
        full = length // block_size
        gone = {(g, i) for g in range(len(windows)) for i in range(full) if rng.random() < share}
        for g, i in gone:
            manager.pool.withdraw(first.block_tables[g][i])

        def served(count: int) -> bool:
            end = count * block_size
            for g, window in enumerate(windows):
                begin = 0 if window is None else max(end - window + 1, 0)
                if any((g, position // block_size) in gone for position in range(begin, end)):
                    return False
            return True

        second = Sequence(1, list(first.tokens), PARAMS, max_length=length + 1)
        tables = manager.find_prefix(second)
        expected = max(count for count in range((length - 1) // block_size + 1) if served(count))
        assert [len(table) for table in tables] == [expected] * len(windows)
        for g, (table, window) in enumerate(zip(tables, windows, strict=True)):
            begin = 0 if window is None else max(expected * block_size - window + 1, 0) // block_size
            assert table == [NOTHING] * begin + first.block_tables[g][begin:expected]


class TestForks:
    @pytest.mark.parametrize("windows", [GEMMA, MISTRAL, (None, 3)])
    @pytest.mark.parametrize("prompt", [5, 16, 30, 31, 32])
    def test_choices_share_what_the_window_sees_and_part_ways(self, windows: Windows, prompt: int) -> None:
        engine = Engine(
            make_scheduler(windows=windows, blocks=300, budget=64), lambda seq_id, context: seq_id * 100 + len(context)
        )
        choices = [add(engine, i, prompt, new_tokens=40, first_token=5, group=0, choice=i) for i in range(4)]
        engine.step()
        assert engine.plans[0].num_tokens == [prompt, 0, 0, 0]
        assert engine.scheduler.stats().num_forks == 3
        assert all(choice.block_tables == choices[0].block_tables for choice in choices)
        engine.step()
        copies = 3 * len(windows) if prompt % 4 else 0
        assert engine.scheduler.stats().num_block_copies == copies
        for _ in range(30):
            engine.step()
            used = {b for c in choices for table in c.block_tables for b in table if b != NOTHING}
            assert len(used) == engine.scheduler.stats().num_used_blocks
        for g, window in enumerate(windows):
            if window is not None:  # nothing of the prompt is seen any more, so nothing is shared
                blocks = [b for choice in choices for b in choice.block_tables[g] if b != NOTHING]
                assert len(blocks) == len(set(blocks)) <= 4 * most_blocks(99, 4, (window,), 1)
        finish_all(engine)

    def test_a_block_that_one_gives_back_stays_for_the_other(self) -> None:
        """The first goes on by itself; the other stays where it was, behind its fork, and reads all of its window."""
        manager = BlockManager(20, 4, windows=MISTRAL)
        parent = Sequence(0, list(range(5, 25)), PARAMS, max_length=60)
        manager.adopt(parent, manager.find_prefix(parent))
        manager.grow(parent, 20)
        parent.num_computed = 20
        child = Sequence(1, list(parent.tokens), PARAMS, max_length=60)
        manager.fork(parent, child)
        assert manager.pool.num_shared == 5
        for end in range(21, 41):
            manager.release_unseen(parent)
            manager.grow(parent, end)
            parent.num_computed = end
        assert child.block_tables == [[0, 1, 2, 3, 4]]
        assert [manager.pool.ref_count(block) for block in range(5)] == [1] * 5
        manager.release_unseen(child)
        assert child.block_tables == [[NOTHING, 1, 2, 3, 4]]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    windows=st.sampled_from([GEMMA, MISTRAL, (1,), (None, 3), (2, 9), (None, None, 5)]),
    block_size=st.integers(1, 6),
    slack=st.integers(0, 30),
    budget=st.integers(1, 30),
    caching=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_results_do_not_depend_on_memory(
    windows: Windows, block_size: int, slack: int, budget: int, caching: bool, seed: int
) -> None:
    """A pool that is large enough for one, whatever comes; nobody ever holds more than `most_blocks`."""
    rng = random.Random(seed)
    shapes = [(rng.randrange(1, 50), rng.randrange(1, 30), 1000 * rng.randrange(3)) for _ in range(8)]
    blocks = max(most_blocks(prompt + new - 1, block_size, windows, budget) for prompt, new, _ in shapes) + slack
    engine = Engine(
        make_scheduler(
            windows=windows, block_size=block_size, blocks=blocks, budget=budget, caching=caching, policy="priority"
        )
    )
    manager = engine.scheduler.blocks
    for i, (prompt, new, first) in enumerate(shapes):
        add(engine, i, prompt, new, first_token=first, priority=-rng.randrange(3))
        for _ in range(rng.randrange(6)):
            if engine.scheduler.sequences:
                engine.step()
                for s in engine.scheduler.running:
                    own = sum(len(held(s, g)) for g in range(len(windows)))
                    assert own <= manager.most_blocks(s.max_length - 1)
    engine.run(limit=5000)
    for sequence, (prompt, new, first) in zip(sorted(engine.finished, key=lambda s: s.seq_id), shapes, strict=True):
        alone = Engine(make_scheduler(blocks=1000, block_size=block_size, caching=False))
        expected = add(alone, 0, prompt, new, first_token=first)
        alone.run()
        assert sequence.tokens == expected.tokens


class TestEstimates:
    def test_swaps_are_estimated_by_what_is_held(self) -> None:
        """33 tokens of 10 ms against 13 blocks of 8 ms, out and back: 9 of the first group, 2 of each of the others.

        Three whole tables would be 27 blocks.
        """
        engine = Clockwork(
            windows=(None, 4, 4), blocks=16, budget=4, policy="priority", host=100, per_token=0.01, per_move=0.008
        )
        for round_ in (0, 10):
            victim = add(engine, round_, 33, new_tokens=3)
            while victim.num_computed < 33:
                engine.step()
            assert sum(len(held(victim, g)) for g in range(3)) == 13
            before = engine.scheduler.stats().num_preemptions_swap
            add(engine, round_ + 1, 30, new_tokens=3, priority=-1)
            engine.run()
            assert victim.num_preemptions == 1
        assert engine.scheduler.stats().num_preemptions_swap == before + 1

    @pytest.mark.parametrize("windows", [(None,), GEMMA])
    def test_growth_is_bounded(self, windows: Windows) -> None:
        """By what one block a group more, and a copy, would take, and by what a sequence does not hold yet."""
        engine = Engine(make_scheduler(windows=windows, blocks=500, budget=32))
        manager, at_bound = engine.scheduler.blocks, 0
        for seq_id, (prompt, new) in enumerate([(1, 30), (9, 90), (70, 40), (70, 40)]):
            add(engine, seq_id, prompt, new, first_token=0, group=prompt)
        while engine.scheduler.sequences:
            engine.step()
            for s in engine.scheduler.running:
                left = manager.most_blocks(s.max_length - 1) - sum(len(held(s, g)) for g in range(len(windows)))
                for steps in (1, 3, 4, 9):
                    growth = manager.most_growth(s, steps)
                    assert growth <= manager.growth_bound(steps)
                    assert growth <= left + len(windows)
                    at_bound += growth == manager.growth_bound(steps)
        assert at_bound > 0

    def test_who_comes_into_a_roomy_pool_costs_no_look_at_those_that_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        looks = []
        exact = BlockManager.most_growth
        monkeypatch.setattr(BlockManager, "most_growth", lambda *args: looks.append(args) or exact(*args))
        engine = Engine(make_scheduler(blocks=500, seqs=50))
        for seq_id in range(50):
            add(engine, seq_id, 5)
        engine.run()
        assert not looks
