"""The native sampler against the meaning of docs/sampling.md in extended precision, and what holds for its bits."""

from __future__ import annotations

import decimal
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from octavo import SamplingParams
from octavo._native import sampling as native
from octavo.outputs import TokenLogprobs
from octavo.sampling import Sampled, Sampler
from octavo.sampling.random import uniform
from tests.sampling.reference import make_rows, reference_uniform
from tests.sampling.test_distribution import critical_value

COLUMNS = {
    "temperature": (np.float64, 1.0),
    "top_k": (np.int32, 0),
    "top_p": (np.float64, 1.0),
    "min_p": (np.float64, 0.0),
    "seed": (np.uint64, 0),
    "choice": (np.uint64, 0),
    "position": (np.uint64, 0),
    "num_logprobs": (np.int32, -1),
    "target": (np.int32, -1),
}


def sample(logits, vocab_size=None, **values):
    """As the binding, but a scalar stands for a whole column, and what is not given for its default."""
    columns = {
        name: np.ascontiguousarray(np.broadcast_to(np.asarray(values.pop(name, default), dtype), len(logits)))
        for name, (dtype, default) in COLUMNS.items()
    }
    assert not values
    return native.sample(logits, logits.shape[1] if vocab_size is None else vocab_size, **columns)


def as_sampled(answer, num_logprobs) -> Sampled:
    tokens, logprobs, ranks, offsets, top_ids, top_logprobs = (a.tolist() for a in answer)
    entries = [
        TokenLogprobs(token, logprobs[i], ranks[i], top_ids[begin:end], top_logprobs[begin:end])
        if num_logprobs[i] >= 0 and token >= 0
        else None
        for i, (token, begin, end) in enumerate(zip(tokens, offsets, offsets[1:], strict=False))
    ]
    return Sampled(answer[0], entries)


def bits_of(answer) -> list[bytes]:
    return [a.tobytes() for a in answer]


def rounding_bound(vocab: int) -> float:
    """What csrc/sampling.h allows of a sum, as a share of the total."""
    return (vocab + 64) * 2.0**-52


def reference_token(logits, temperature, top_k, top_p, min_p, u) -> tuple[int, float]:
    """The token, and how far its decision is from going another way, as a share of the total."""
    x = logits.astype(np.longdouble)
    if temperature == 0:
        return int(np.argmax(x)), math.inf
    weights = np.exp((x - x.max()) / np.longdouble(temperature))
    margin = np.abs(weights - min_p).min() if min_p > 0 else math.inf
    weights[weights < min_p] = 0
    order = np.lexsort((np.arange(len(x)), -x))
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        held = np.cumsum(weights[order]) / weights[order].sum()
        margin = min(margin, np.abs(held - top_p).min())
        order = order[: int(np.argmax(held >= top_p)) + 1]
    kept = np.sort(order)
    below = np.cumsum(weights[kept]) / weights[kept].sum()
    index = int(np.argmax(below > u))
    edges = [abs(below[index] - u)] + ([abs(u - below[index - 1])] if index else [])
    return int(kept[index]), float(min([margin, *edges]))


def random_rows(rng, kind: str, rows: int, vocab: int):
    x = rng.normal(0.0, 3.0, (rows, vocab))
    match kind:
        case "ties":
            x = np.round(x)
        case "banned":
            x[rng.random(x.shape) < 0.6] = -np.inf
            x[:, rng.integers(vocab)] = 0.5
        case "equal":
            x[:] = x[:, :1]
        case "tiny":
            x *= 1e-30
        case "huge":
            x *= 2e37
        case "zeros":
            x = np.where(rng.random(x.shape) < 0.5, -0.0, 0.0)
        case "peaked":
            x *= 30
        case "offset":
            x += 1e4
    return x.astype(np.float32)


KINDS = ["normal", "ties", "banned", "equal", "tiny", "huge", "zeros", "peaked", "offset"]
DISTINCT = ["normal", "huge", "peaked", "offset"]
FILTERS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.0011},
    {"temperature": 1e308},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 290},
    {"top_k": -1, "top_p": 0.8931},
    {"top_p": 0.3077},
    {"top_p": 1e-9},
    {"top_p": 1 - 2.0**-53},
    {"min_p": 0.0831},
    {"min_p": 1.0},
    {"temperature": 1.7, "top_k": 40, "top_p": 0.8123, "min_p": 0.0123},
]


def check_tokens(logits, params, position) -> int:
    """How many decisions were clear of rounding."""
    got = sample(logits, seed=17, position=position, **params)[0].tolist()
    clear = 0
    for row, token, place in zip(logits, got, position.tolist(), strict=True):
        full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **params}
        expected, margin = reference_token(row, **full, u=reference_uniform(17, 0, place))
        assert token == expected or margin <= rounding_bound(len(row)), (params, token, expected, margin)
        clear += margin > rounding_bound(len(row))
    return clear


@pytest.mark.parametrize("params", FILTERS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_follow_the_reference(kind, params):
    rng = np.random.default_rng(KINDS.index(kind))
    clear = total = 0
    for vocab in (*range(1, 40), 63, 64, 65, 127, 200, 255, 256, 257, 270, 300):
        logits = random_rows(rng, kind, 3, vocab)
        clear += check_tokens(logits, params, rng.integers(2**63, size=3).astype(np.uint64))
        total += 3
    # Distinct weights leave nothing to rounding; equal ones may sum to top_p exactly, or be min_p.
    if "min_p" not in params and (params.get("top_p", 1.0) == 1.0 or (params["top_p"] < 0.999 and kind in DISTINCT)):
        assert clear >= total - 2


@pytest.mark.parametrize("kind", ["normal", "ties", "banned", "equal", "peaked", "tiny"])
def test_wide_rows_follow_the_reference(kind):
    rng = np.random.default_rng(5)
    logits = random_rows(rng, kind, 2, 50_000)
    cases = [*FILTERS, {"top_k": 3125}, {"top_k": 3136}, {"top_k": 20_000}, {"top_k": 49_999}, {"top_p": 0.9999}]
    for params in cases:
        check_tokens(logits, params, rng.integers(2**63, size=2).astype(np.uint64))


def test_boundaries_between_close_tokens():
    """50,000 tokens of some 2e-5 each: to pick 2,000 of them right, a sum may be off by 1e-8 at most."""
    logits = random_rows(np.random.default_rng(15), "normal", 1, 50_000) * np.float32(0.1)
    got = sample(np.broadcast_to(logits, (2000, 50_000)), position=range(2000))[0]
    x = logits[0].astype(np.longdouble)
    held = np.cumsum(np.exp(x - x.max()))
    wanted = held[-1] * np.array([reference_uniform(0, 0, i) for i in range(2000)])
    expected = np.searchsorted(held, wanted, side="right")
    margin = np.minimum(held[expected] - wanted, wanted - np.where(expected > 0, held[expected - 1], -np.inf))
    assert (margin > rounding_bound(50_000) * held[-1]).all()
    assert got.tolist() == expected.tolist()


def test_the_random_number_has_the_bits_of_the_package():
    keys = np.random.default_rng(0).integers(2**64, size=(3, 2000), dtype=np.uint64)
    keys[:, 0], keys[:, 1] = 0, 2**64 - 1
    expected = uniform(*keys)
    got = np.array([native.uniform(*key) for key in keys.T.tolist()])
    assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_ranks_and_top_lists(kind):
    rng = np.random.default_rng(11)
    for vocab in (1, 2, 17, 256, 300, 50_000):
        logits = random_rows(rng, kind, 4, vocab)
        target = rng.integers(vocab, size=4).astype(np.int32)
        num_logprobs = np.array([0, 1, 5, 400], np.int32)
        sampled = as_sampled(sample(logits, target=target, num_logprobs=num_logprobs), num_logprobs)
        assert sampled.token_ids.tolist() == target.tolist()
        for row, token, count, got in zip(
            logits, target.tolist(), num_logprobs.tolist(), sampled.logprobs, strict=True
        ):
            x = row.astype(np.longdouble)
            expected = (x - x.max()) - np.log(np.exp(x - x.max()).sum())
            order = np.lexsort((np.arange(vocab), -x))
            assert got.token_id == token
            assert got.rank == 1 + order.tolist().index(token)
            assert got.top_ids == order[:count].tolist()
            reported = np.array([got.logprob, *got.top_logprobs])
            wanted = expected[[token, *got.top_ids]]
            finite = np.isfinite(wanted)
            assert np.array_equal(reported[~finite], wanted[~finite])  # -inf
            error = np.abs(reported[finite] - wanted[finite])
            assert (error <= rounding_bound(vocab) + 2.0**-51 * np.abs(wanted[finite])).all()


def test_logprobs_describe_the_model_before_temperature_and_filters():
    logits = random_rows(np.random.default_rng(2), "normal", 1, 100)
    token, *plain = sample(logits, num_logprobs=3, top_k=1)
    _, *shaped = sample(logits, num_logprobs=3, temperature=0.3, top_p=0.4, min_p=0.1, target=token)
    assert bits_of(plain) == bits_of(shaped)


@pytest.mark.parametrize("bad", [np.nan, -np.float32(np.nan), np.inf])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"target": 3, "num_logprobs": 4}])
def test_a_row_without_a_finite_peak_gets_no_token(bad, params):
    logits = random_rows(np.random.default_rng(3), "normal", 300, 300)
    logits[np.arange(300), np.arange(300)] = bad
    logits[7] = -np.inf
    tokens, *_ = sample(logits, **params)
    assert tokens.tolist() == [-1] * 300


def test_ids_past_the_vocabulary_do_not_count():
    logits = random_rows(np.random.default_rng(4), "normal", 6, 300)
    expected = bits_of(sample(logits[:, :270].copy(), position=range(6), num_logprobs=5, top_p=0.9))
    for padding in (np.nan, np.inf, 1e9):
        logits[:, 270:] = padding
        assert bits_of(sample(logits, 270, position=range(6), num_logprobs=5, top_p=0.9)) == expected


def test_a_row_depends_on_nothing_but_itself():
    rng = np.random.default_rng(6)
    keys = {
        "temperature": rng.choice([0, 0.7, 1.3], 60),
        "top_k": rng.choice([0, 5, 500], 60),
        "top_p": rng.choice([0.5, 0.95, 1], 60),
        "min_p": rng.choice([0, 0.01], 60),
        "position": rng.integers(1000, size=60),
        "num_logprobs": rng.choice([-1, 0, 4], 60),
        "target": rng.choice([-1, 9], 60),
    }
    logits = random_rows(rng, "normal", 60, 1003)
    together = as_sampled(sample(logits, **keys), keys["num_logprobs"])
    scattered = np.full((60, 1111), np.nan, np.float32)[:, 1:1004]  # another alignment, and rows apart
    scattered[::-1] = logits
    backwards = {name: value[::-1] for name, value in keys.items()}
    again = as_sampled(sample(scattered, **backwards), backwards["num_logprobs"])
    assert again.token_ids[::-1].tolist() == together.token_ids.tolist()
    assert again.logprobs[::-1] == together.logprobs
    for i in range(60):
        own = {name: value[i : i + 1] for name, value in keys.items()}
        alone = as_sampled(sample(logits[i : i + 1], **own), own["num_logprobs"])
        assert alone.token_ids[0] == together.token_ids[i]
        assert alone.logprobs[0] == together.logprobs[i]


def test_many_threads_give_the_bits_of_one():
    logits = random_rows(np.random.default_rng(8), "normal", 8, 20_000)
    keys = {"position": range(8), "top_k": 900, "top_p": 0.9, "num_logprobs": 5}
    expected = bits_of(sample(logits, **keys))
    with ThreadPoolExecutor(4) as pool:
        for answer in pool.map(lambda _: sample(logits, **keys), range(12)):
            assert bits_of(answer) == expected


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_flushing_subnormals_changes_no_bit(params):
    """The pool's threads flush them. Logits below 2^-126 must neither tie nor vanish."""
    rng = np.random.default_rng(9)
    logits = rng.integers(-40, 40, (20, 400)).astype(np.float32) * np.float32(1e-44)
    logits[10:, ::3] -= rng.integers(0, 900, (10, 134)).astype(np.float32)
    keys = {"position": range(20), "num_logprobs": 6, **params}
    expected = bits_of(sample(logits, **keys))
    assert torch.set_flush_denormal(True)
    try:
        got = bits_of(sample(logits, **keys))
    finally:
        torch.set_flush_denormal(False)
    assert got == expected
    assert sample(logits, temperature=0.0)[0].tolist() == logits.argmax(axis=1).tolist()


def test_draws_follow_the_distribution():
    draws = 100_000
    logits = np.linspace(-2.0, 2.0, 12, dtype=np.float32)[np.random.default_rng(1).permutation(12)]
    for params in ({}, {"temperature": 0.6, "top_k": 9}, {"top_p": 0.83}, {"min_p": 0.11}):
        rows = np.broadcast_to(logits, (draws, 12))
        counts = np.bincount(sample(rows, seed=99, position=np.arange(draws), **params)[0], minlength=12)
        x = logits.astype(float)
        weights = np.exp((x - x.max()) / params.get("temperature", 1.0))
        weights[weights < params.get("min_p", 0)] = 0
        order = np.argsort(-x)[: params.get("top_k", 12)]
        held = np.cumsum(weights[order]) / weights[order].sum()
        kept = order[: int(np.argmax(held >= params.get("top_p", 1.0) - 1e-9)) + 1]
        expected = draws * weights[kept] / weights[kept].sum()
        assert counts.sum() == counts[kept].sum()
        expected, observed = expected[expected > 0], counts[kept][expected > 0]
        chi_square = ((observed - expected) ** 2 / expected).sum()
        assert chi_square < critical_value(len(expected) - 1)


def test_exponentials_are_as_exact_as_stated():
    rng = np.random.default_rng(10)
    x = np.concatenate(
        [
            rng.uniform(-708, 0, 3000),
            rng.uniform(-1, 1, 2000),
            rng.uniform(0, 709, 500),
            (np.arange(-1020, 1020, 8) + 0.5) * math.log(2),
            np.array([0.0, -0.0, -708.0, 709.0, 1e-17, -1e-300]),
        ]
    )
    with decimal.localcontext(prec=40):
        for argument, got in zip(x.tolist(), native.exponentials(x).tolist(), strict=True):
            exact = decimal.Decimal(argument).exp()
            assert abs(decimal.Decimal(got) - exact) <= exact * decimal.Decimal(2.0**-51)
    assert native.exponentials(np.array([0.0, -708.1, -1e9, -math.inf, -1.7e308])).tolist() == [1.0, 0, 0, 0, 0]


def test_logarithms_are_as_exact_as_stated():
    rng = np.random.default_rng(12)
    x = np.concatenate(
        [
            np.exp(rng.uniform(-700, 700, 2000)),
            rng.uniform(1, 50_000, 2000),
            1 + rng.uniform(0, 1, 500) * 2.0 ** -rng.integers(0, 52, 500),
            1 - rng.uniform(0, 0.5, 500) * 2.0 ** -rng.integers(0, 52, 500),
            np.sqrt(0.5) * (1 + np.arange(-8, 9) * 2.0**-52),
            np.array([2.0**-1022, np.finfo(float).max, 2.0, 0.5]),
        ]
    )
    with decimal.localcontext(prec=40):
        for argument, got in zip(x.tolist(), native.logarithms(x).tolist(), strict=True):
            exact = decimal.Decimal(argument).ln()
            assert abs(decimal.Decimal(got) - exact) <= abs(exact) * decimal.Decimal(2.0**-51)
    assert native.logarithms(np.array([1.0])).tolist() == [0.0]


def test_agrees_with_the_sampler_in_numpy():
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m, seed=i, logprobs=i % 4)
        for i, (t, k, p, m) in enumerate(
            (t, k, p, m)
            for t in (0.0, 0.6, 1.0, 2.5)
            for k in (0, 3, 77)
            for p in (0.31, 0.97, 1.0)
            for m in (0.0, 0.02)
        )
    ]
    logits = random_rows(np.random.default_rng(13), "normal", len(params), 777)
    rows = make_rows(params)
    expected = Sampler(770)(logits, rows)
    got = as_sampled(native.sample(logits, 770, **{name: getattr(rows, name) for name in COLUMNS}), rows.num_logprobs)
    assert got.token_ids.tolist() == expected.token_ids.tolist()
    for mine, theirs in zip(got.logprobs, expected.logprobs, strict=True):
        assert (mine.token_id, mine.rank, mine.top_ids) == (theirs.token_id, theirs.rank, theirs.top_ids)
        assert [mine.logprob, *mine.top_logprobs] == pytest.approx([theirs.logprob, *theirs.top_logprobs], abs=1e-12)


def test_no_rows_give_no_answers():
    assert [len(a) for a in sample(np.empty((0, 5), np.float32))] == [0, 0, 0, 1, 0, 0]


def test_filters_past_their_range_act_as_its_ends():
    logits = random_rows(np.random.default_rng(14), "normal", 5, 700)
    best = logits.argmax(axis=1).tolist()
    for params in ({"min_p": 1.5}, {"min_p": math.inf}, {"top_p": 0.0}, {"top_p": -3.0}, {"temperature": 1e-320}):
        assert sample(logits, position=range(5), **params)[0].tolist() == best
    flat = sample(logits, position=range(5), temperature=math.inf)[0]
    assert flat.tolist() == sample(np.zeros_like(logits), position=range(5))[0].tolist()


def test_what_is_refused():
    logits = np.zeros((2, 8), np.float32)
    with pytest.raises(ValueError, match=r"vocab_size 9 is not in 1 \.\. 8"):
        sample(logits, 9)
    with pytest.raises(ValueError, match=r"vocab_size 0 is not in 1 \.\. 8"):
        sample(logits, 0)
    with pytest.raises(ValueError, match="target 7 is not below vocab_size 7"):
        sample(logits, 7, target=[-1, 7])
    with pytest.raises(ValueError, match="must be contiguous"):
        sample(np.zeros((2, 16), np.float32)[:, ::2])
    columns = {name: np.zeros(2, dtype) for name, (dtype, _) in COLUMNS.items()}
    with pytest.raises(ValueError, match="top_p has 3 entries for 2 rows"):
        native.sample(logits, 8, **{**columns, "top_p": np.zeros(3)})
    with pytest.raises(TypeError):
        native.sample(logits.astype(np.float64), 8, **columns)  # never converted silently
