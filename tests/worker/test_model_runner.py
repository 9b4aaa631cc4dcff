"""The arrays of a step, checked against the plan by hand, with a backend that only records what it is given."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from octavo.backends.base import Backend, Batch
from octavo.core import NOTHING, BlockMove, NewSequence, StepPlan
from octavo.graph import KVGroup
from octavo.sampling import NOT_FINITE, Sampled, SamplingRows
from octavo.sampling_params import SamplingParams
from octavo.worker.model_runner import ModelRunner


class Recorder(Backend):
    """Samples 100, 101, ... and keeps what it was given."""

    description = "recorder"
    weight_bytes = 0
    kv_bytes_per_token = 1
    block_bytes = 4

    def __init__(self, num_groups: int = 1) -> None:
        self._num_groups = num_groups
        self.batches: list[Batch] = []
        self.moves: list[tuple[int, list[BlockMove]]] = []  # and how many steps had run before
        self.rows: list[SamplingRows] = []
        self.bad_rows: dict[int, int] = {}  # what comes instead of a token, by row

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return tuple(KVGroup(None, (i,)) for i in range(self._num_groups))

    def memory_limit(self) -> int:
        return 1 << 30

    def allocate_kv_cache(self, num_blocks: int) -> None:
        pass

    def allocate_swap_space(self, num_blocks: int, directory: Path | None) -> None:
        pass

    def move_blocks(self, moves: Sequence[BlockMove]) -> None:
        self.moves.append((len(self.batches), list(moves)))
        time.sleep(0.01)

    def execute(self, batch: Batch, rows: SamplingRows) -> Sampled:
        self.batches.append(batch)
        self.rows.append(rows)
        tokens = np.where(rows.target >= 0, rows.target, 100 + np.arange(len(rows))).astype(np.int32)
        for row, code in self.bad_rows.items():
            tokens[row] = code
        return Sampled(tokens, [None] * len(rows))


@pytest.fixture
def runner() -> ModelRunner:
    return ModelRunner(Recorder(), block_size=4, max_num_seqs=3, max_model_len=32)


def new(seq_id: int, tokens: list[int], **params: object) -> NewSequence:
    return NewSequence(seq_id, tokens, len(tokens), SamplingParams(**params), seed=seq_id + 40, choice=0)


def plan(starts: dict[int, tuple[int, int]], **fields: object) -> StepPlan:
    return StepPlan(
        seq_ids=list(starts),
        starts=[start for start, _ in starts.values()],
        num_tokens=[count for _, count in starts.values()],
        **fields,
    )


def test_the_example_of_the_batch_docstring(runner: ModelRunner) -> None:
    first = plan({0: (0, 5), 1: (0, 4)}, new=[new(0, [1, 2, 3, 4, 5]), new(1, [7, 8, 9, 10, 11, 12, 13, 14])],
                 new_blocks={0: [[7, 2]], 1: [[5]]})  # fmt: skip
    assert runner.execute(first).token_ids == [100, -1]
    second = plan({0: (5, 1), 1: (4, 3)}, new_blocks={1: [[9]]})
    assert runner.execute(second).token_ids == [100, -1]
    batch = runner.backend.batches[1]
    np.testing.assert_array_equal(batch.token_ids, [100, 11, 12, 13])
    np.testing.assert_array_equal(batch.positions, [5, 4, 5, 6])
    np.testing.assert_array_equal(batch.query_starts, [0, 1, 4])
    np.testing.assert_array_equal(batch.context_lens, [6, 7])
    np.testing.assert_array_equal(batch.block_tables, [[[7, 2], [5, 9]]])
    np.testing.assert_array_equal(batch.slot_mapping, [[9, 36, 37, 38]])
    np.testing.assert_array_equal(batch.logit_rows, [0])
    rows = runner.backend.rows[1]
    assert (rows.seed.tolist(), rows.position.tolist(), rows.target.tolist()) == ([40], [6], [-1])


def test_a_preempted_sequence_keeps_its_tokens_and_gets_a_new_table(runner: ModelRunner) -> None:
    runner.execute(plan({0: (0, 2), 1: (0, 2)}, new=[new(0, [1, 2]), new(1, [3, 4])], new_blocks={0: [[0]], 1: [[1]]}))
    runner.execute(plan({0: (2, 1)}, preempted=[1]))
    runner.execute(plan({0: (3, 1), 1: (0, 3)}, new_blocks={1: [[2]]}))
    batch = runner.backend.batches[-1]
    np.testing.assert_array_equal(batch.token_ids, [100, 3, 4, 101])
    np.testing.assert_array_equal(batch.block_tables, [[[0], [2]]])
    np.testing.assert_array_equal(batch.logit_rows, [0, 3])


def test_choices_sample_from_the_row_of_their_prompt_and_get_copies_of_its_last_block(runner: ModelRunner) -> None:
    """Three choices of a prompt of six, the third one's block table one step later than the second's."""
    prompt = [1, 2, 3, 4, 5, 6]
    choices = [NewSequence(i, prompt, 6, SamplingParams(temperature=1.0), seed=40, choice=i) for i in range(3)]
    fork = {0: (0, 6), 1: (6, 0), 2: (6, 0)}
    result = runner.execute(plan(fork, new=choices, new_blocks={0: [[7, 2]], 1: [[7, 2]], 2: [[7, 2]]}))
    assert result.token_ids == [100, 101, 102]
    batch, rows = runner.backend.batches[0], runner.backend.rows[0]
    np.testing.assert_array_equal(batch.query_starts, [0, 6])
    np.testing.assert_array_equal(batch.block_tables, [[[7, 2]]])
    np.testing.assert_array_equal(batch.logit_rows, [5, 5, 5])
    assert (rows.choice.tolist(), rows.seed.tolist(), rows.position.tolist()) == ([0, 1, 2], [40] * 3, [6] * 3)
    moves = [BlockMove("copy", 2, 5), BlockMove("copy", 2, 3)]
    moved = runner.execute(plan(dict.fromkeys(range(3), (6, 1)), moves=moves, tails={0: [5], 1: [3]}))
    assert runner.backend.moves == [(1, moves)]
    assert result.move_seconds == 0.0
    assert 0.01 <= moved.move_seconds < 1.0
    batch = runner.backend.batches[1]
    np.testing.assert_array_equal(batch.token_ids, [100, 101, 102])
    np.testing.assert_array_equal(batch.block_tables, [[[7, 5], [7, 3], [7, 2]]])
    np.testing.assert_array_equal(batch.slot_mapping, [[22, 14, 10]])


def test_a_sequence_that_begins_with_a_copy_brings_it_in_its_table(runner: ModelRunner) -> None:
    runner.execute(plan({0: (0, 6)}, new=[new(0, [1, 2, 3, 4, 5, 6])], new_blocks={0: [[7, 2]]}))
    beam = new(1, [1, 2, 3, 4, 5, 6, 9])
    runner.execute(plan({0: (6, 1), 1: (6, 1)}, new=[beam], tails={1: [5]}, new_blocks={1: [[7, 5]]}))
    batch = runner.backend.batches[1]
    np.testing.assert_array_equal(batch.token_ids, [100, 9])
    np.testing.assert_array_equal(batch.block_tables, [[[7, 2], [7, 5]]])


def test_slots_of_finished_sequences_are_used_again_and_hold_nothing_back(runner: ModelRunner) -> None:
    for seq_id in range(9):
        fields = {"finished": [seq_id - 1]} if seq_id else {}
        step = plan({seq_id: (0, 6)}, new=[new(seq_id, [seq_id] * 6)], new_blocks={seq_id: [[8, 9]]}, **fields)
        runner.execute(step)
        runner.execute(plan({seq_id: (6, 1)}))
    assert len(runner.slots) == 1
    step = plan({50: (0, 2)}, new=[new(50, [1, 2])], new_blocks={50: [[3]]}, finished=[8])
    runner.execute(step)
    np.testing.assert_array_equal(runner.backend.batches[-1].block_tables, [[[3]]])


def test_stale_blocks_of_a_slot_are_never_named(runner: ModelRunner) -> None:
    runner.execute(plan({0: (0, 8)}, new=[new(0, [1] * 8)], new_blocks={0: [[5, 6]]}))
    both = plan({1: (0, 2), 2: (0, 5)}, new=[new(1, [1, 2]), new(2, [1] * 5)], new_blocks={1: [[1]], 2: [[2, 3]]},
                finished=[0])  # fmt: skip
    runner.execute(both)
    np.testing.assert_array_equal(runner.backend.batches[-1].block_tables, [[[1, 0], [2, 3]]])


def test_prompt_logprobs_ask_for_each_prompt_token_once(runner: ModelRunner) -> None:
    """Over chunks, and not again when the sequence is recomputed after a preemption."""
    asks = new(0, [1, 2, 3, 4, 5], prompt_logprobs=2, logprobs=1)
    other = new(1, [9, 8])
    runner.execute(plan({0: (0, 3), 1: (0, 2)}, new=[asks, other], new_blocks={0: [[0]], 1: [[1]]}))
    rows, batch = runner.backend.rows[-1], runner.backend.batches[-1]
    np.testing.assert_array_equal(batch.logit_rows, [0, 1, 2, 4])
    np.testing.assert_array_equal(rows.target, [2, 3, 4, -1])
    np.testing.assert_array_equal(rows.num_logprobs, [2, 2, 2, -1])
    runner.execute(plan({0: (3, 2)}, new_blocks={0: [[2]]}))
    rows, batch = runner.backend.rows[-1], runner.backend.batches[-1]
    np.testing.assert_array_equal(batch.logit_rows, [0, 1])
    np.testing.assert_array_equal(rows.target, [5, -1])
    np.testing.assert_array_equal(rows.num_logprobs, [2, 1])
    runner.execute(plan({1: (2, 1)}, preempted=[0]))
    runner.execute(plan({0: (0, 6)}, new_blocks={0: [[4, 5]]}))
    rows, batch = runner.backend.rows[-1], runner.backend.batches[-1]
    np.testing.assert_array_equal(batch.logit_rows, [5])
    np.testing.assert_array_equal(rows.target, [-1])


def test_a_step_in_the_middle_of_a_prompt_needs_no_logits(runner: ModelRunner) -> None:
    result = runner.execute(plan({0: (0, 3)}, new=[new(0, [1, 2, 3, 4, 5])], new_blocks={0: [[0]]}))
    assert len(runner.backend.batches[0].logit_rows) == 0
    assert result.token_ids == [-1]


def test_logits_that_are_not_finite_are_an_error_of_that_sequence(runner: ModelRunner) -> None:
    runner.backend.bad_rows = {0: NOT_FINITE}
    both = plan({0: (0, 2), 1: (0, 2)}, new=[new(0, [1, 2]), new(1, [3, 4])], new_blocks={0: [[0]], 1: [[1]]})
    result = runner.execute(both)
    assert result.token_ids == [-1, 101]
    assert list(result.errors) == [0]
    assert "not finite" in result.errors[0]


def test_greedy_and_unlimited_parameters(runner: ModelRunner) -> None:
    sequences = [new(0, [1], temperature=1e-4, top_k=-1), new(1, [1], top_k=2**31 - 1, top_p=0.5)]
    runner.execute(plan({0: (0, 1), 1: (0, 1)}, new=sequences, new_blocks={0: [[0]], 1: [[1]]}))
    rows = runner.backend.rows[0]
    assert rows.temperature.tolist() == [0.0, 1.0]
    assert rows.top_k.tolist() == [0, 2**31 - 1]
    assert rows.top_p.tolist() == [1.0, 0.5]


class TestGroups:
    """Of layers: each has its block tables, all equally long."""

    @pytest.fixture
    def runner(self) -> ModelRunner:
        return ModelRunner(Recorder(num_groups=2), block_size=4, max_num_seqs=3, max_model_len=32)

    def test_the_example_of_the_batch_docstring(self, runner: ModelRunner) -> None:
        """The second group has a window of 2: positions 0 to 3 are not there when their sequence comes back."""
        sequences = [new(0, [1, 2, 3, 4, 5]), new(1, [7, 8, 9, 10, 11, 12, 13, 14])]
        runner.execute(plan({0: (0, 5), 1: (0, 4)}, new=sequences, new_blocks={0: [[7, 2], [6, 8]], 1: [[5], [4]]}))
        batch = runner.backend.batches[0]
        np.testing.assert_array_equal(batch.block_tables, [[[7, 2], [5, 0]], [[6, 8], [4, 0]]])
        runner.execute(plan({1: (4, 1)}, preempted=[0], new_blocks={1: [[9], [3]]}))
        runner.execute(plan({0: (5, 1), 1: (5, 3)}, new_blocks={0: [[7, 2], [NOTHING, 1]]}))
        batch = runner.backend.batches[2]
        np.testing.assert_array_equal(batch.block_tables, [[[7, 2], [5, 9]], [[0, 1], [4, 3]]])
        np.testing.assert_array_equal(batch.slot_mapping, [[9, 37, 38, 39], [5, 13, 14, 15]])
        assert batch.slot_mapping.flags.c_contiguous
        assert batch.block_tables.flags.c_contiguous

    def test_a_plan_for_other_groups_is_refused(self, runner: ModelRunner) -> None:
        """One table for all would have the groups overwrite each other's blocks."""
        for i, tables in enumerate(([[7]], [[7], [6], [5]])):
            with pytest.raises(ValueError, match="zip"):
                runner.execute(plan({i: (0, 2)}, new=[new(i, [1, 2])], new_blocks={i: tables}))

    def test_tails_are_of_each_group(self, runner: ModelRunner) -> None:
        prompt = [1, 2, 3, 4, 5, 6]
        choices = [NewSequence(i, prompt, 6, SamplingParams(temperature=1.0), seed=40, choice=i) for i in range(2)]
        tables = [[7, 2], [NOTHING, 1]]
        runner.execute(plan({0: (0, 6), 1: (6, 0)}, new=choices, new_blocks={0: tables, 1: tables}))
        runner.execute(plan({0: (6, 1), 1: (6, 1)}, tails={0: [5, 3]}))
        batch = runner.backend.batches[1]
        np.testing.assert_array_equal(batch.block_tables, [[[7, 5], [7, 2]], [[0, 3], [0, 1]]])
        np.testing.assert_array_equal(batch.slot_mapping, [[22, 10], [14, 6]])


def test_what_a_beam_samples_is_not_its_next_token(runner: ModelRunner) -> None:
    """Its group says which tokens go on, as new sequences; it may be preempted, and then samples the same again."""
    beam = NewSequence(0, [1, 2, 3], 3, SamplingParams(temperature=0, logprobs=4), seed=0, choice=0, is_beam=True)
    both = plan({0: (0, 3), 1: (0, 2)}, new=[beam, new(1, [8, 9])], new_blocks={0: [[0]], 1: [[1]]})
    assert runner.execute(both).token_ids == [100, 101]
    runner.execute(plan({1: (2, 1)}, preempted=[0]))
    result = runner.execute(plan({0: (0, 3), 1: (3, 1)}, new_blocks={0: [[4]]}))
    assert result.token_ids == [100, 101]
    np.testing.assert_array_equal(runner.backend.batches[-1].token_ids, [1, 2, 3, 100])
    child = new(2, [1, 2, 3, 55])
    runner.execute(plan({2: (3, 1), 1: (4, 1)}, new=[child], new_blocks={2: [[4]]}, finished=[0]))
    np.testing.assert_array_equal(runner.backend.batches[-1].token_ids, [55, 101])
