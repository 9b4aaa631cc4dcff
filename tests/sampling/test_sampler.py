"""The sampler against a reference in plain Python, and what holds whatever the logits are."""

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import SamplingParams
from octavo.sampling import Sampled, Sampler
from octavo.sampling.sampler import most_likely
from tests.sampling.reference import (
    kept_tokens,
    log_softmax,
    make_rows,
    random_logits,
    reference_token,
    reference_uniform,
)

# The values of top_p are no sums of equal probabilities, which rounding may put on either side of them.
FILTERS = [(0, 1.0), (-1, 1.0), (1, 1.0), (5, 1.0), (10_000, 1.0), (0, 0.8931), (0, 0.3077), (0, 1e-9), (40, 0.8123)]


def sample(logits, params, **keys) -> Sampled:
    return Sampler(logits.shape[1])(logits, make_rows(params, **keys))


@pytest.mark.parametrize(("top_k", "top_p"), FILTERS)
@pytest.mark.parametrize("temperature", [0.0, 0.0011, 0.2, 1.0, 3.0, 1e6, 1e308])
@pytest.mark.parametrize("step", [0.0, 1.0], ids=["distinct", "ties"])
def test_tokens_equal_the_reference(temperature, top_k, top_p, step):
    logits = random_logits(7, rows=24, vocab=50, step=step)
    logits[::3, ::2] = -np.inf
    params = [SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=i) for i in range(24)]
    choices, positions = [i % 3 for i in range(24)], [i * 11 for i in range(24)]
    got = sample(logits, params, choice=choices, position=positions).token_ids
    clear = 0
    for i in range(24):
        draw = reference_uniform(i, choices[i], positions[i])
        expected, margin = reference_token(logits[i].astype(float).tolist(), temperature, top_k, top_p, draw)
        if margin > 1e-12:
            assert got[i] == expected
            clear += 1
    assert clear >= 22


@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0], ids=["flat", "middling", "peaked"])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95, 0.9999])
def test_wide_vocabularies_with_small_and_large_nuclei(scale, top_p):
    logits = random_logits(3, rows=6, vocab=3000, scale=scale)
    params = [SamplingParams(top_p=top_p, seed=i) for i in range(6)]
    got = sample(logits, params).token_ids
    for i in range(6):
        expected, margin = reference_token(logits[i].astype(float).tolist(), 1.0, 0, top_p, reference_uniform(i, 0, 0))
        assert margin > 1e-12
        assert got[i] == expected


@pytest.mark.parametrize(("top_k", "top_p"), [(4, 1.0), (11, 1.0), (0, 0.6), (6, 0.7)])
def test_the_kept_set_is_exactly_the_reference_s(top_k, top_p):
    logits = random_logits(5, rows=1, vocab=12, scale=1.0)
    params = [SamplingParams(top_k=top_k, top_p=top_p, seed=i) for i in range(3000)]
    seen = set(sample(np.repeat(logits, 3000, axis=0), params).token_ids.tolist())
    kept, margin = kept_tokens(logits[0].astype(float).tolist(), 1.0, top_k, top_p)
    assert margin > 1e-6
    assert seen == set(kept)


def test_greedy_takes_the_lowest_of_equals():
    logits = np.array([[1, 5, 5, 0], [2, 2, 2, 2], [-np.inf, -np.inf, -3, -3]], np.float32)
    assert sample(logits, [SamplingParams(temperature=0)] * 3).token_ids.tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    "filters", [{}, {"top_p": 1e-4}, {"top_k": 7}, {"top_k": 7, "top_p": 0.5}], ids=["none", "p", "k", "kp"]
)
@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-4, 1e-3])
def test_tiny_temperatures_are_greedy(temperature, filters):
    """Case 6: and nothing is NaN, nor warns."""
    logits = random_logits(1, rows=16, vocab=64, scale=30.0)
    params = [SamplingParams(temperature=temperature, seed=i, logprobs=3, **filters) for i in range(16)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = sample(logits, params)
    assert got.token_ids.tolist() == logits.argmax(axis=1).tolist()
    assert all(math.isfinite(entry.logprob) for entry in got.logprobs)


def test_the_lowest_temperature_that_is_not_greedy_holds_up():
    logits = random_logits(1, rows=16, vocab=64, scale=1e30)
    params = [SamplingParams(temperature=0.0010001, top_p=1e-4, seed=i) for i in range(16)]
    assert not params[0].greedy
    assert sample(logits, params).token_ids.tolist() == logits.argmax(axis=1).tolist()


def test_top_k_1_is_greedy_at_any_temperature():
    logits = random_logits(2, rows=50, vocab=20, step=1.0)
    params = [SamplingParams(temperature=1e6, top_k=1, seed=i) for i in range(50)]
    assert sample(logits, params).token_ids.tolist() == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=["nan", "inf"])
@pytest.mark.parametrize(("top_k", "top_p"), FILTERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_row_is_reported_and_its_neighbours_are_untouched(bad, top_k, top_p, temperature):
    logits = random_logits(4, rows=3, vocab=16)
    params = [SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=i, logprobs=2) for i in range(3)]
    expected = sample(logits, params)
    broken = logits.copy()
    broken[1, 9] = bad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = sample(broken, params)
    assert got.token_ids.tolist() == [expected.token_ids[0], -1, expected.token_ids[2]]
    assert got.logprobs == [expected.logprobs[0], None, expected.logprobs[2]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_nothing_but_minus_infinity_is_broken(temperature):
    logits = np.full((1, 8), -np.inf, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = sample(logits, [SamplingParams(temperature=temperature, top_k=3, top_p=0.5, logprobs=1)])
    assert (got.token_ids.tolist(), got.logprobs) == ([-1], [None])


def test_masked_tokens_are_never_drawn():
    logits = random_logits(6, rows=1, vocab=10).repeat(2000, axis=0)
    logits[:, [0, 4, 9]] = -np.inf
    for filters in ({}, {"top_k": 9}, {"top_p": 0.9999999}):
        params = [SamplingParams(temperature=1e6, seed=i, **filters) for i in range(2000)]
        assert set(sample(logits, params).token_ids.tolist()) == {1, 2, 3, 5, 6, 7, 8}


@pytest.mark.parametrize(("draw", "expected"), [(0.0, 2), (1 - 2.0**-53, 6)], ids=["smallest", "largest"])
def test_the_outermost_draws_take_no_masked_token(monkeypatch, draw, expected):
    """The total of the weights may be any number from 1 up, powers of two among them; ids 0, 1 and 7 up are masked."""
    monkeypatch.setattr("octavo.sampling.sampler.uniform", lambda *_: np.array([draw]))
    for seed in range(300):
        logits = random_logits(seed, rows=1, vocab=10, scale=[0.0, 0.5, 2.0][seed % 3])
        logits[:, 7:] = logits[:, :2] = -np.inf
        logits[0, 3 : 3 + seed % 4] = -np.inf  # a flat row then has a total of 5, 4, 3 or 2
        for filters in ({}, {"top_k": 9}, {"top_p": 0.9999999999}):
            assert sample(logits, [SamplingParams(**filters)]).token_ids.tolist() == [expected]


def test_padding_is_never_sampled_nor_counted():
    """Case 11: 10 tokens in the tokeniser, 16 logits."""
    logits = random_logits(8, rows=400, vocab=16)
    logits[:, 10:] = 1e4
    logits[::7, 12] = np.nan
    params = [SamplingParams(temperature=[0.0, 1.0, 2.0][i % 3], seed=i, logprobs=20) for i in range(400)]
    padded = Sampler(10)(logits, make_rows(params))
    exact = Sampler(10)(logits[:, :10].copy(), make_rows(params))
    assert 0 <= padded.token_ids.min() <= padded.token_ids.max() < 10
    assert padded.token_ids.tolist() == exact.token_ids.tolist()
    assert padded.logprobs == exact.logprobs
    assert all(sorted(entry.top_ids) == list(range(10)) for entry in padded.logprobs)


@pytest.mark.parametrize("count", [0, 1, 5, 20])
@pytest.mark.parametrize("step", [0.0, 2.0], ids=["distinct", "ties"])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_logprobs_ranks_and_top_lists(count, step, temperature):
    """Of the model's own distribution: temperature and filters do not touch them."""
    logits = random_logits(9, rows=20, vocab=40, step=step)
    logits[::4, ::3] = -np.inf
    params = [SamplingParams(temperature=temperature, top_k=7, logprobs=count, seed=i) for i in range(20)]
    got = sample(logits, params)
    for i, entry in enumerate(got.logprobs):
        row = logits[i].astype(float).tolist()
        expected = log_softmax(row)
        order = sorted(range(40), key=lambda t: (-row[t], t))
        assert entry.token_id == got.token_ids[i]
        assert entry.logprob == pytest.approx(expected[entry.token_id], rel=1e-13, abs=1e-13)
        assert entry.rank == order.index(entry.token_id) + 1
        assert entry.top_ids == order[:count]
        assert entry.top_logprobs == pytest.approx([expected[t] for t in order[:count]], rel=1e-13, abs=1e-13)


def test_logprobs_of_extreme_logits():
    logits = np.array([[3e38, -3e38, 0.0], [-3e38, -3e38, -np.inf]], np.float32)
    got = sample(logits, [SamplingParams(temperature=0, logprobs=3)] * 2)
    assert got.logprobs[0].top_logprobs == [0.0, -float(np.float32(3e38)), -2 * float(np.float32(3e38))]
    assert got.logprobs[1].top_logprobs == pytest.approx([-math.log(2), -math.log(2), -math.inf], rel=1e-15)


def test_no_logprobs_unless_asked_for():
    got = sample(random_logits(1, rows=3, vocab=9), [SamplingParams(), SamplingParams(logprobs=0), SamplingParams()])
    assert [entry is None for entry in got.logprobs] == [True, False, True]
    assert (got.logprobs[1].top_ids, got.logprobs[1].top_logprobs) == ([], [])


def test_a_target_is_scored_and_nothing_is_drawn():
    logits = random_logits(2, rows=4, vocab=12)
    logits[3, 2] = np.nan
    got = sample(logits, [SamplingParams(logprobs=1)] * 4, target=[5, 0, 11, 5])
    assert got.token_ids.tolist() == [5, 0, 11, -1]
    for i, target in enumerate([5, 0, 11]):
        assert got.logprobs[i].token_id == target
        assert got.logprobs[i].logprob == pytest.approx(log_softmax(logits[i].astype(float).tolist())[target])


def test_no_rows_give_no_tokens():
    got = sample(np.empty((0, 8), np.float32), [])
    assert (got.token_ids.tolist(), got.logprobs) == ([], [])


MIXED = [
    SamplingParams(temperature=t, top_k=k, top_p=p, seed=s, logprobs=count)
    for s, (t, k, p, count) in enumerate(
        [(0.0, 0, 1.0, None), (1.0, 0, 1.0, 3), (0.7, 20, 1.0, 0), (1.3, 0, 0.8, 20), (2.0, 50, 0.9, None)] * 4
    )
]
MIXED_LOGITS = random_logits(11, rows=len(MIXED), vocab=1031, step=0.25)
MIXED_KEYS = {"choice": [i % 2 for i in range(len(MIXED))], "position": [3 * i for i in range(len(MIXED))]}
MIXED_RESULT = sample(MIXED_LOGITS, MIXED, **MIXED_KEYS)


@settings(max_examples=100, deadline=None)
@given(picked=st.lists(st.integers(0, len(MIXED) - 1), min_size=1, max_size=30))
def test_a_row_s_result_is_the_same_bits_in_any_company(picked):
    """Any subset of the rows, in any order, repeated or alone."""
    got = sample(
        MIXED_LOGITS[picked],
        [MIXED[i] for i in picked],
        **{name: [keys[i] for i in picked] for name, keys in MIXED_KEYS.items()},
    )
    assert got.token_ids.tolist() == [MIXED_RESULT.token_ids[i] for i in picked]
    assert got.logprobs == [MIXED_RESULT.logprobs[i] for i in picked]


def test_slices_of_rows_concatenate_to_the_whole():
    rows, sampler = make_rows(MIXED, **MIXED_KEYS), Sampler(1031)
    parts = [sampler(MIXED_LOGITS[a:b], rows.slice(a, b)) for a, b in [(0, 1), (1, 9), (9, 9), (9, 20)]]
    whole = Sampled.concatenate(parts)
    assert whole.token_ids.tolist() == MIXED_RESULT.token_ids.tolist()
    assert whole.logprobs == MIXED_RESULT.logprobs
    assert len(rows) == 20
    assert len(rows.slice(3, 7)) == 4
    assert len(Sampled.concatenate([]).token_ids) == 0


def test_a_key_draws_the_same_again_and_other_keys_differ():
    flat = np.zeros((8, 1000), np.float32)
    one = SamplingParams(seed=5)
    keys = {"choice": [0, 0, 1, 1, 2, 2, 0, 0], "position": [0, 0, 0, 0, 0, 0, 1, 1]}
    tokens = sample(flat, [one] * 8, **keys).token_ids.tolist()
    assert tokens[::2] == tokens[1::2]
    other = sample(flat[:1], [SamplingParams(seed=6)]).token_ids.tolist()
    assert len({*tokens, *other}) == 5


@pytest.mark.parametrize("count", [1, 2, 7, 29, 30, 31, 100])
def test_most_likely_equals_a_full_sort(count):
    for seed in range(20):
        logits = random_logits(seed, rows=1, vocab=30, step=[0.0, 2.0][seed % 2])[0]
        logits[:: 3 + seed % 5] = -np.inf
        expected = sorted(range(30), key=lambda i: (-float(logits[i]), i))[:count]
        assert most_likely(logits, count).tolist() == expected
