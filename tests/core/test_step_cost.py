"""What steps cost, against weighted least squares by numpy, and what the scheduler makes of it."""

import random

import numpy as np
import pytest

from octavo.core.step_cost import FORGET, StepCost


def fitted(steps: list[tuple[int, float]]) -> float:
    """The slope of seconds over tokens; a step counts FORGET times as much as the one after it."""
    tokens, seconds = np.array(steps).T
    weights = FORGET ** np.arange(len(steps))[::-1]
    return float(np.polyfit(tokens, seconds, 1, w=np.sqrt(weights))[0])  # polyfit squares its weights


def measured(steps: list[tuple[int, float]]) -> StepCost:
    cost = StepCost()
    for tokens, seconds in steps:
        cost.add_step(tokens, seconds)
    return cost


@pytest.mark.parametrize("count", [2, 3, 50, 1000])
def test_the_slope_is_that_of_weighted_least_squares(count: int) -> None:
    rng = random.Random(count)
    sizes = [1, 2048, *(rng.choice((1, 8, 64, 2048)) for _ in range(count - 2))]
    steps = [(size, 0.01 + 0.002 * size * rng.uniform(0.5, 1.5)) for size in sizes]
    assert measured(steps).per_token == pytest.approx(fitted(steps), rel=1e-6)


def test_what_was_long_ago_is_forgotten() -> None:
    rng = random.Random(0)
    slow = [(n, 0.5 + 0.1 * n) for n in (rng.randrange(1, 500) for _ in range(1000))]
    fast = [(n, 0.5 + 0.001 * n) for n in (rng.randrange(1, 500) for _ in range(1000))]
    assert measured(slow).per_token == pytest.approx(0.1)
    assert measured(slow + fast).per_token == pytest.approx(0.001, rel=1e-3)


@pytest.mark.parametrize("size", [1, 7, 2048])
def test_steps_of_one_size_say_nothing_of_the_slope(size: int) -> None:
    rng = random.Random(size)
    cost = measured([(size, rng.random()) for _ in range(500)])
    assert cost.per_token is None
    cost.add_step(size + 1, 1.0)
    assert cost.per_token is not None


def test_more_tokens_never_seem_to_take_less_time() -> None:
    assert fitted([(1, 2.0), (100, 1.0)]) < 0
    assert measured([(1, 2.0), (100, 1.0)]).per_token == 0.0


def test_moves_are_a_running_mean_per_block() -> None:
    cost = StepCost()
    assert cost.per_move is None
    expected = 0.5
    cost.add_moves(4, 2.0)
    for count, seconds in ((1, 3.0), (10, 1.0), (2, 0.0)):
        assert cost.per_move == pytest.approx(expected)
        cost.add_moves(count, seconds)
        expected = FORGET * expected + (1 - FORGET) * seconds / count
    assert cost.per_move == pytest.approx(expected)


class TestSwapPays:
    STEPS = ((1, 1.001), (100, 1.1))  # a token costs a millisecond

    def test_yes_while_nothing_is_known(self) -> None:
        assert StepCost().swap_pays(1, 1000)
        assert measured([*self.STEPS]).swap_pays(1, 1000)  # no block was moved yet
        cost = measured([(10, 1.0)] * 3)
        cost.add_moves(1, 1000.0)
        assert cost.swap_pays(1, 1000)  # the slope is unknown

    @pytest.mark.parametrize(("per_move", "pays"), [(0.0079, True), (0.0081, False)])
    def test_out_and_back_against_computing_again(self, per_move: float, pays: bool) -> None:
        """A block of 16 tokens costs 16 ms to compute again: it may take 8 ms each way."""
        cost = measured([*self.STEPS])
        cost.add_moves(5, 5 * per_move)
        assert cost.swap_pays(160, 10) is pays

    def test_tokens_that_cost_nothing_are_computed_again(self) -> None:
        cost = measured([(1, 1.0), (100, 1.0)])
        cost.add_moves(1, 1e-9)
        assert not cost.swap_pays(1000, 1)
