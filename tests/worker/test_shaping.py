"""What the worker hands to the sampler of the requests whose logits are changed: their features and their tokens."""

from __future__ import annotations

import pytest

from octavo.core import NewSequence
from octavo.sampling import NOT_FINITE, NOTHING_LEFT
from octavo.sampling_params import Bans, SamplingParams
from octavo.worker.model_runner import ModelRunner
from tests.worker.test_model_runner import Recorder, new, plan


@pytest.fixture
def runner() -> ModelRunner:
    return ModelRunner(Recorder(), block_size=4, max_num_seqs=2, max_model_len=32)


class Reader(Recorder):
    """Notes the histories while the step runs, as a sampler would read them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[list[int] | None]] = []

    def execute(self, batch, rows):
        self.seen.append([None if s is None else s.history.tokens.tolist() for s in rows.shaping])
        return super().execute(batch, rows)


def test_rows_that_want_nothing_get_nothing(runner: ModelRunner) -> None:
    runner.execute(plan({0: (0, 2), 1: (0, 2)}, new=[new(0, [1, 2]), new(1, [3, 4])], new_blocks={0: [[0]], 1: [[1]]}))
    assert runner.backend.rows[-1].shaping == [None, None]


def test_the_history_grows_by_what_was_sampled() -> None:
    runner = ModelRunner(Reader(), block_size=4, max_num_seqs=2, max_model_len=32)
    wants = new(1, [3, 4, 5], presence_penalty=1.0)
    runner.execute(plan({0: (0, 2), 1: (0, 2)}, new=[new(0, [1, 2]), wants], new_blocks={0: [[0]], 1: [[1]]}))
    runner.execute(plan({0: (2, 1), 1: (2, 1)}))
    runner.execute(plan({0: (3, 1), 1: (3, 1)}))
    assert runner.backend.seen == [[None], [None, [3, 4, 5]], [None, [3, 4, 5, 101]]]
    shaping = runner.backend.rows[-1].shaping[1]
    assert [type(feature).__name__ for feature in shaping.features] == ["PresencePenalty"]
    assert shaping.history.prompt_length == 3
    assert shaping.history.output.tolist() == [101]
    assert shaping.history.tokens.base is runner.slots.tokens  # a view


def test_preemption_and_new_tenants_of_a_slot_change_nothing() -> None:
    runner = ModelRunner(Reader(), block_size=4, max_num_seqs=1, max_model_len=32)
    wants = new(0, [3, 4], min_p=0.25, repetition_penalty=1.5)
    runner.execute(plan({0: (0, 2)}, new=[wants], new_blocks={0: [[0]]}))
    runner.execute(plan({1: (0, 2)}, new=[new(1, [7, 8])], new_blocks={1: [[1]]}, preempted=[0]))
    assert runner.backend.rows[-1].min_p.tolist() == [0.0]
    runner.execute(plan({0: (0, 3)}, new_blocks={0: [[2]]}, finished=[1]))
    assert runner.backend.seen == [[[3, 4]], [None], [[3, 4, 100]]]
    assert runner.backend.rows[-1].min_p.tolist() == [0.25]
    assert runner.backend.rows[-1].shaping[0].history.prompt_length == 2


def test_a_replayed_sequence_keeps_the_border_between_prompt_and_output(runner: ModelRunner) -> None:
    """Its tokens go past its prompt when it arrives."""
    params = SamplingParams(frequency_penalty=1.0)
    replayed = NewSequence(0, [1, 2, 3, 4, 5], 2, params, seed=0, choice=0)
    runner.execute(plan({0: (0, 5)}, new=[replayed], new_blocks={0: [[0, 1]]}))
    assert runner.backend.rows[0].shaping[0].history.output.tolist() == [3, 4, 5]


def test_bans_reach_the_features(runner: ModelRunner) -> None:
    params = SamplingParams(bad_words=["x"], min_tokens=3)
    banned = NewSequence(0, [1], 1, params, seed=0, choice=0, bans=Bans(words=((5,), (6, 7)), ends=(0, 2)))
    runner.execute(plan({0: (0, 1)}, new=[banned], new_blocks={0: [[0]]}))
    words, ends = runner.backend.rows[0].shaping[0].features
    assert (words.single.tolist(), dict(words.longer)) == ([5], {6: [(6, 7)]})
    assert ends.ends.tolist() == [0, 2]


@pytest.mark.parametrize(("code", "says"), [(NOT_FINITE, "not finite"), (NOTHING_LEFT, "no token is left to sample")])
def test_each_failure_says_what_it_was(runner: ModelRunner, code: int, says: str) -> None:
    runner.backend.bad_rows = {0: code}
    both = plan({0: (0, 2), 1: (0, 2)}, new=[new(0, [1, 2]), new(1, [3, 4])], new_blocks={0: [[0]], 1: [[1]]})
    result = runner.execute(both)
    assert result.token_ids == [-1, 101]
    assert list(result.errors) == [0]
    assert says in result.errors[0]
