import math

import numpy as np
import pytest

from octavo.sampling.random import request_seed, uniform
from tests.sampling.reference import MASK, reference_uniform, splitmix64


def draws(seed, choice, position) -> np.ndarray:
    arrays = np.broadcast_arrays(*(np.asarray(x, np.uint64) for x in (seed, choice, position)))
    return uniform(*(np.atleast_1d(x).copy() for x in arrays))


def test_the_reference_is_splitmix64():
    """The first outputs of the published generator for the seed 1234567."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    golden = 0x9E3779B97F4A7C15
    assert [splitmix64((1234567 + i * golden) & MASK) for i in range(1, 5)] == published


@pytest.mark.parametrize("seed", [0, 1, 7, 2**32, 2**63, 2**64 - 1])
@pytest.mark.parametrize("choice", [0, 1, 255, 2**64 - 1])
def test_draws_equal_plain_integers(seed, choice):
    positions = [0, 1, 2, 100_000, 2**40, 2**64 - 1]
    got = draws(seed, choice, positions)
    assert got.tolist() == [reference_uniform(seed, choice, position) for position in positions]


def test_draws_lie_in_the_half_open_unit_interval_and_look_even():
    got = draws(3, 0, np.arange(200_000))
    assert got.min() >= 0.0
    assert got.max() < 1.0
    assert len(np.unique(got)) == len(got)
    assert abs(got.mean() - 0.5) < 5 * math.sqrt(1 / 12 / len(got))
    assert abs(got.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / len(got))


@pytest.mark.parametrize("axis", ["seed", "choice", "position"])
@pytest.mark.parametrize("lag", [1, 2, 16, 1024])
def test_neighbouring_keys_are_not_correlated(axis, lag):
    n = 100_000
    got = draws(**{"seed": 5, "choice": 0, "position": 9, axis: np.arange(n)}) - 0.5
    correlation = float((got[:-lag] * got[lag:]).mean() * 12)
    assert abs(correlation) < 4.5 / math.sqrt(n - lag)


def test_all_parts_of_the_key_count():
    keys = [(a, b, c) for a in range(12) for b in range(12) for c in range(12)]
    assert len(set(draws(*(list(x) for x in zip(*keys, strict=True))).tolist())) == len(keys)


def test_request_seeds_are_distinct_and_known():
    seeds = [request_seed(0, arrival) for arrival in range(50_000)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed <= MASK for seed in seeds)
    golden = 0x9E3779B97F4A7C15
    state = splitmix64((42 + golden) & MASK)
    assert request_seed(42, 7) == splitmix64((state + 8 * golden) & MASK)
    assert len({request_seed(engine, arrival) for engine in range(-50, 50) for arrival in range(50)}) == 5000
