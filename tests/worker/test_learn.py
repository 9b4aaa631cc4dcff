"""Workers that do not sample learn the tokens later, and are then where the one that samples is."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

from octavo.backends.base import Batch
from octavo.core import NewSequence, StepPlan, StepResult
from octavo.sampling import Sampled, SamplingRows
from octavo.sampling_params import SamplingParams
from octavo.worker.model_runner import ModelRunner
from tests.worker.test_model_runner import Recorder, new, plan


class Elsewhere(Recorder):
    """Another worker samples."""

    def execute(self, batch: Batch, rows: SamplingRows) -> Sampled | None:  # type: ignore[override]
        super().execute(batch, rows)
        return None


class Pair:
    """Two workers, of which the second is told the tokens `late` steps after they were sampled."""

    def __init__(self, late: int) -> None:
        self.samples, self.learns = (
            ModelRunner(backend, block_size=4, max_num_seqs=3, max_model_len=32)
            for backend in (Recorder(), Elsewhere())
        )
        self.late = late
        self.untold: deque[list[int]] = deque()

    def execute(self, step: StepPlan) -> StepResult:
        while len(self.untold) > self.late:
            self.learns.learn(self.untold.popleft())
        result = self.samples.execute(step)
        assert result is not None
        assert self.learns.execute(step) is None
        self.untold.append(result.token_ids)
        for mine, theirs in zip(
            vars_of(self.samples.backend.batches[-1]), vars_of(self.learns.backend.batches[-1]), strict=True
        ):
            np.testing.assert_array_equal(mine, theirs)
        return result

    def check(self) -> None:
        """Both know the same once everything is told."""
        while self.untold:
            self.learns.learn(self.untold.popleft())
        known = [runner.slots for runner in (self.samples, self.learns)]
        assert len(known[0]) == len(known[1])
        np.testing.assert_array_equal(known[0].length, known[1].length)
        for slot, length in enumerate(known[0].length):
            np.testing.assert_array_equal(known[0].tokens[slot, :length], known[1].tokens[slot, :length])


def vars_of(batch: Batch) -> list[Any]:
    names = ("token_ids", "positions", "slot_mapping", "query_starts", "context_lens", "block_tables", "logit_rows")
    return [getattr(batch, name) for name in names]


@pytest.mark.parametrize("late", [0, 1])
def test_a_sequence_that_runs_on(late: int) -> None:
    """Two in turns, as with two plans in flight."""
    pair = Pair(late)
    pair.execute(plan({0: (0, 2)}, new=[new(0, [1, 2])], new_blocks={0: [[0]]}))
    pair.execute(plan({1: (0, 3)}, new=[new(1, [3, 4, 5])], new_blocks={1: [[1]]}))
    for i in range(2):
        assert pair.execute(plan({0: (2 + i, 1)})).token_ids == [100]
        pair.execute(plan({1: (3 + i, 1)}, new_blocks={1: [[2]]} if i else {}))
    pair.check()


def test_a_chunk_samples_nothing() -> None:
    pair = Pair(1)
    pair.execute(plan({0: (0, 4)}, new=[new(0, [1, 2, 3, 4, 5, 6])], new_blocks={0: [[0]]}))
    pair.execute(plan({0: (4, 2)}, new_blocks={0: [[1]]}))
    pair.learns.learn(pair.untold.popleft())
    pair.learns.learn(pair.untold.popleft())
    pair.execute(plan({0: (6, 1)}))
    np.testing.assert_array_equal(pair.learns.backend.batches[-1].token_ids, [100])
    pair.check()


def test_a_sequence_that_was_preempted_since() -> None:
    pair = Pair(1)
    pair.execute(plan({1: (0, 2)}, new=[new(1, [3, 4])], new_blocks={1: [[1]]}))
    pair.execute(plan({0: (0, 2)}, new=[new(0, [1, 2])], new_blocks={0: [[0]]}, preempted=[1]))
    pair.execute(plan({1: (0, 3)}, new_blocks={1: [[2]]}))  # its token is known by now
    np.testing.assert_array_equal(pair.learns.backend.batches[-1].token_ids, [3, 4, 100])
    pair.check()


def test_one_that_ended_since_is_forgotten() -> None:
    pair = Pair(1)
    pair.execute(plan({1: (0, 2)}, new=[new(1, [3, 4])], new_blocks={1: [[1]]}))
    pair.execute(plan({0: (0, 2)}, new=[new(0, [1, 2])], new_blocks={0: [[0]]}, finished=[1]))
    pair.execute(plan({2: (0, 2)}, new=[new(2, [7, 8])], new_blocks={2: [[1]]}))
    pair.check()
    assert len(pair.learns.slots) == 2


def test_a_beams_token_is_its_groups_to_choose() -> None:
    pair = Pair(0)
    params = SamplingParams.reporting(2)
    beam = NewSequence(0, [1, 2], 2, params, seed=4, choice=0, is_beam=True)
    pair.execute(plan({0: (0, 2)}, new=[beam], new_blocks={0: [[0]]}))
    child = NewSequence(1, [1, 2, 55], 2, params, seed=4, choice=0, is_beam=True)
    pair.execute(plan({1: (2, 1)}, new=[child], new_blocks={1: [[0]]}, finished=[0]))
    np.testing.assert_array_equal(pair.learns.backend.batches[-1].token_ids, [55])
    pair.check()


def test_prompt_logprobs_are_asked_for_once_everywhere() -> None:
    pair = Pair(0)
    pair.execute(plan({0: (0, 4)}, new=[new(0, [1, 2, 3, 4], prompt_logprobs=1)], new_blocks={0: [[0]]}))
    pair.execute(plan({0: (0, 5)}, preempted=[0], new_blocks={0: [[1, 2]]}))
    np.testing.assert_array_equal(pair.learns.backend.batches[-1].logit_rows, [4])
    pair.check()
