"""What changes logits, against a reference in plain Python; alone, mixed, and through the sampler."""

from __future__ import annotations

import math
import struct
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import SamplingParams
from octavo.sampling import NOT_FINITE, NOTHING_LEFT, History, Sampler, Shaping, features_of
from octavo.sampling_params import Bans
from tests.sampling.reference import log_softmax, make_rows, random_logits, reference_token, reference_uniform, softmax
from tests.sampling.test_distribution import DRAWS, critical_value

VOCAB = 24
EXTRA = 4  # ids that a prompt may hold and the tokeniser does not know


def f32(x: float) -> float:
    """The nearest float32. Of a sum, difference, product or quotient of float32s it is exactly what float32 gives."""
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def reference(
    logits: Sequence[float],
    params: SamplingParams,
    bans: Bans,
    prompt: list[int],
    output: list[int],
    rounded: Callable[[float], float] = float,
) -> list[float]:
    """One row, id by id. `rounded` is applied after each operation and to each parameter."""

    def one(token: int, x: float) -> float:
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            return -math.inf
        for word in bans.words:
            before = word[:-1]
            if token == word[-1] and (not before or tuple(output[-len(before) :]) == before):
                return -math.inf
        if len(output) < params.min_tokens and token in bans.ends:
            return -math.inf
        x = rounded(x + rounded(dict(params.logit_bias).get(token, 0.0)))
        if token in prompt + output:
            r = rounded(params.repetition_penalty)
            x = rounded(x / r) if x > 0 else rounded(x * r)
        x = rounded(x - rounded(rounded(params.frequency_penalty) * output.count(token)))
        return rounded(x - rounded(params.presence_penalty)) if token in output else x

    return [one(token, x) for token, x in enumerate(logits)]


ids = st.integers(0, VOCAB - 1)
penalties = st.floats(-2, 2, width=32)


@st.composite
def requests(draw: st.DrawFn) -> tuple[SamplingParams, Bans]:
    words = draw(st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=4, unique=True))
    params = SamplingParams(
        repetition_penalty=draw(st.just(1.0) | st.floats(0.25, 4.0)),
        presence_penalty=draw(st.just(0.0) | penalties),
        frequency_penalty=draw(st.just(0.0) | penalties),
        logit_bias=draw(st.dictionaries(ids, st.floats(-100, 100), max_size=5)),
        allowed_token_ids=draw(st.none() | st.lists(ids, min_size=1, max_size=VOCAB)),
        bad_words=["x"] * bool(words),
        min_tokens=draw(st.integers(0, 6)),
    )
    return params, Bans(tuple(words), tuple(draw(st.lists(ids, max_size=3, unique=True))))


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    few = st.integers(0, 5) | ids  # so that tokens repeat and words match
    prompt = draw(st.lists(few | st.integers(VOCAB, VOCAB + EXTRA - 1), min_size=1, max_size=8))
    return prompt, draw(st.lists(few, max_size=10))


def shaping(params: SamplingParams, bans: Bans, prompt: list[int], output: list[int]) -> Shaping | None:
    features = features_of(params, bans)
    history = History(np.array(prompt + output, np.int32), len(prompt))
    return Shaping(features, history) if features else None


@settings(max_examples=400, deadline=None)
@given(request=requests(), history=histories(), seed=st.integers(0, 2**32 - 1))
def test_rows_equal_the_reference(request, history, seed):
    """To the bit where each operation is rounded to float32, and closely where nothing is rounded."""
    logits = random_logits(seed, rows=1, vocab=VOCAB)[0]
    logits[seed % 7 :: 7] = -np.inf
    apply = shaping(*request, *history)
    got = logits if apply is None else apply(logits)
    assert got.dtype == np.float32
    assert got.tolist() == reference(logits.tolist(), *request, *history, rounded=f32)
    assert got.tolist() == pytest.approx(reference(logits.tolist(), *request, *history), rel=1e-5, abs=1e-4)


ONE_FEATURE = [
    ({"allowed_token_ids": [3, 5, 3]}, Bans()),
    ({"bad_words": ["x"]}, Bans(words=((2,), (1, 7), (9, 1, 8), (4, 1, 6)))),
    ({"min_tokens": 5}, Bans(ends=(0, 3))),
    ({"logit_bias": {3: -100, 1: 2.5}}, Bans()),
    ({"repetition_penalty": 1.7}, Bans()),
    ({"frequency_penalty": 0.3}, Bans()),
    ({"presence_penalty": -1.1}, Bans()),
]


@pytest.mark.parametrize(("values", "bans"), ONE_FEATURE, ids=[next(iter(values)) for values, _ in ONE_FEATURE])
def test_each_feature_alone(values, bans):
    """By example, so that none of them can be without effect in the test above."""
    params = SamplingParams(**values)
    assert len(features_of(params, bans)) == 1
    prompt, output = [1, 2, 2, VOCAB + 1], [5, 9, 9, 1]
    logits = random_logits(1, rows=1, vocab=VOCAB)[0]
    before = logits.copy()
    got = shaping(params, bans, prompt, output)(logits).tolist()
    assert logits.tolist() == before.tolist()  # a copy was changed
    changed = {i for i in range(VOCAB) if got[i] != before[i]}
    assert (
        changed
        == {
            "allowed_token_ids": set(range(VOCAB)) - {3, 5},
            "bad_words": {2, 7, 8},
            "min_tokens": {0, 3},
            "logit_bias": {1, 3},
            "repetition_penalty": {1, 2, 5, 9},
            "frequency_penalty": {1, 5, 9},
            "presence_penalty": {1, 5, 9},
        }[next(iter(values))]
    )
    assert got == reference(before.tolist(), params, bans, prompt, output, rounded=f32)


def test_most_requests_want_nothing():
    assert features_of(SamplingParams(), Bans()) == ()
    assert features_of(SamplingParams(temperature=0.5, top_k=4, top_p=0.3, min_p=0.1, stop="x"), Bans()) == ()


def test_the_minimum_is_over_when_that_many_tokens_are_there():
    params, bans = SamplingParams(min_tokens=2), Bans(ends=(1,))
    logits = np.array([0.0, 9.0, 1.0], np.float32)
    for length, expected in [(0, -math.inf), (1, -math.inf), (2, 9.0), (3, 9.0)]:
        assert shaping(params, bans, [0], [2] * length)(logits)[1] == expected


@pytest.mark.parametrize("penalty", [1e-6, 1e6])
def test_extreme_penalties_of_extreme_logits_are_infinite_without_a_warning(penalty):
    logits = np.array([3e38, -3e38, 1.0, -1.0], np.float32)
    params = SamplingParams(repetition_penalty=penalty)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = shaping(params, Bans(), [0, 1], [])(logits)
    assert got.tolist() == reference(logits.tolist(), params, Bans(), [0, 1], [], rounded=f32)
    assert math.inf in np.abs(got)


def masked_by_min_p(logits: list[float], temperature: float, min_p: float) -> tuple[list[float], float]:
    """Logits with -inf where min_p drops a token, and the distance of the closest decision."""
    probabilities = softmax(logits, temperature)
    peak = max(probabilities)
    margin = min(abs(p - min_p * peak) for p in probabilities)
    return [x if p >= min_p * peak else -math.inf for x, p in zip(logits, probabilities, strict=True)], margin


@settings(max_examples=300, deadline=None)
@given(
    request=requests(),
    history=histories(),
    seed=st.integers(0, 2**32 - 1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    min_p=st.sampled_from([0.0, 0.0371, 0.3113, 1.0]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([1.0, 0.8931, 0.3077]),
)
def test_tokens_equal_the_reference_whatever_is_combined(request, history, seed, temperature, min_p, top_k, top_p):
    """Features, temperature, min_p, top_k, top_p, in this order; the logprob is of the logits as they were."""
    shaped_by, bans = request
    picks = SamplingParams(temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p, seed=seed, logprobs=2)
    logits = random_logits(seed, rows=1, vocab=VOCAB)
    rows = make_rows([picks], choice=[2], position=[11], shaping=[shaping(shaped_by, bans, *history)])
    logits.flags.writeable = False
    got = Sampler(VOCAB)(logits, rows)
    left = reference(logits[0].tolist(), shaped_by, bans, *history, rounded=f32)
    if max(left) == -math.inf:
        assert (got.token_ids.tolist(), got.logprobs) == ([NOTHING_LEFT], [None])
        return
    margin = 1.0
    if temperature > 0:
        left, margin = masked_by_min_p(left, temperature, min_p)
    token, other = reference_token(left, temperature, top_k, top_p, reference_uniform(seed, 2, 11))
    if min(margin, other) > 1e-12 or min_p == 1.0:
        assert got.token_ids.tolist() == [token]
    raw = log_softmax(logits[0].astype(float).tolist())
    assert got.logprobs[0].logprob == pytest.approx(raw[got.token_ids[0]])
    assert got.logprobs[0].top_logprobs == pytest.approx(sorted(raw, reverse=True)[:2])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_token_left_fails_alone_and_says_which_kind(temperature):
    logits = random_logits(3, rows=4, vocab=VOCAB)
    logits[2, 5] = np.nan
    params = [SamplingParams(temperature=temperature, seed=i, logprobs=0) for i in range(4)]
    nothing = shaping(SamplingParams(allowed_token_ids=[3], bad_words=["x"]), Bans(words=((3,),)), [1], [])
    biased = shaping(SamplingParams(logit_bias={3: 100}), Bans(), [1], [])
    got = Sampler(VOCAB)(logits, make_rows(params, shaping=[None, nothing, biased, biased]))
    alone = Sampler(VOCAB)(logits[:1], make_rows(params[:1]))
    assert got.token_ids.tolist() == [alone.token_ids[0], NOTHING_LEFT, NOT_FINITE, 3]
    assert [entry is None for entry in got.logprobs] == [False, True, True, False]


def test_a_known_token_is_scored_without_features():
    logits = random_logits(3, rows=1, vocab=VOCAB)
    banned = shaping(SamplingParams(allowed_token_ids=[3]), Bans(), [1], [])
    got = Sampler(VOCAB)(logits, make_rows([SamplingParams(logprobs=0)], target=[7], shaping=[banned]))
    assert got.token_ids.tolist() == [7]
    assert got.logprobs[0].logprob == pytest.approx(log_softmax(logits[0].astype(float).tolist())[7])


def mixed_rows(count: int) -> tuple[list[SamplingParams], list[Shaping | None]]:
    """Every third row plain, the others with one to all features, and all ways to pick."""
    rng = np.random.default_rng(5)
    params, shapes = [], []
    for i in range(count):
        values = {
            "repetition_penalty": 1.3,
            "presence_penalty": 0.7,
            "frequency_penalty": -0.4,
            "logit_bias": {
                int(t): float(b) for t, b in zip(rng.permutation(900)[:9], rng.normal(0, 5, 9), strict=True)
            },
            "allowed_token_ids": rng.permutation(1031)[:700].tolist(),
            "bad_words": ["x"],
            "min_tokens": 9,
        }
        wanted = [] if i % 3 == 0 else rng.permutation(list(values))[: 1 + i % 7].tolist()
        picks = {
            "temperature": [0.0, 0.7, 1.4][i % 3 - i % 2],
            "min_p": [0.0, 0.02][i % 2],
            "top_k": [0, 50][i % 5 == 0],
        }
        own = SamplingParams(**{name: values[name] for name in wanted}, **picks, seed=i, logprobs=i % 4)
        bans = Bans(tuple(tuple(rng.integers(0, 1031, n).tolist()) for n in (1, 2, 3)), (0, 5))
        tokens = rng.integers(0, 1031, 3 + i).tolist()
        params.append(own)
        shapes.append(shaping(own, bans, tokens[:3], tokens[3:]))
    return params, shapes


ROWS = 42
MIXED, SHAPES = mixed_rows(ROWS)
MIXED_LOGITS = random_logits(12, rows=ROWS, vocab=1031, step=0.25)
WHOLE = Sampler(1031)(MIXED_LOGITS, make_rows(MIXED, shaping=SHAPES))


@settings(max_examples=100, deadline=None)
@given(picked=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=25))
def test_a_row_s_result_is_the_same_bits_in_any_company(picked):
    """Any subset of the rows, in any order, repeated or alone."""
    rows = make_rows([MIXED[i] for i in picked], shaping=[SHAPES[i] for i in picked])
    got = Sampler(1031)(MIXED_LOGITS[picked], rows)
    assert got.token_ids.tolist() == [WHOLE.token_ids[i] for i in picked]
    assert got.logprobs == [WHOLE.logprobs[i] for i in picked]


def test_the_mixture_is_one():
    assert sum(shape is not None for shape in SHAPES) > ROWS // 2
    assert {type(f).__name__ for shape in SHAPES if shape for f in shape.features} == {
        "AllowedTokenIds", "BadWords", "MinTokens", "LogitBias", "RepetitionPenalty", "FrequencyPenalty",
        "PresencePenalty",
    }  # fmt: skip
    plain = Sampler(1031)(MIXED_LOGITS, make_rows(MIXED))
    assert sum(plain.token_ids != WHOLE.token_ids) > ROWS // 4


LOGITS = np.array([0.3, -1.0, 2.0, 1.1, -2.5, 1.9, 0.0, 0.3], np.float32)
PENALISED = {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "temperature", "min_p"),
    [({}, 1.0, 0.1), ({}, 2.0, 0.45), (PENALISED, 0.7, 0.0), ({**PENALISED, "logit_bias": {4: 3.0}}, 1.3, 0.2)],
    ids=["min_p", "hot min_p", "penalties", "all"],
)
def test_draws_follow_the_distribution(values, temperature, min_p):
    params = SamplingParams(temperature=temperature, min_p=min_p, **values)
    prompt, output = [2, 6], [5, 5, 0]
    rows = make_rows(
        [params] * DRAWS, position=list(range(DRAWS)), shaping=[shaping(params, Bans(), prompt, output)] * DRAWS
    )
    tokens = Sampler(len(LOGITS))(np.broadcast_to(LOGITS, (DRAWS, len(LOGITS))), rows).token_ids
    observed = np.bincount(tokens, minlength=len(LOGITS))
    left, margin = masked_by_min_p(reference(LOGITS.tolist(), params, Bans(), prompt, output), temperature, min_p)
    assert margin > 1e-6
    expected = [DRAWS * p for p in softmax(left, temperature)]
    kept = [i for i in range(len(LOGITS)) if expected[i] > 0]
    assert sum(observed[i] for i in kept) == DRAWS
    assert len(kept) > 2
    chi_square = sum((observed[i] - expected[i]) ** 2 / expected[i] for i in kept)
    assert chi_square < critical_value(len(kept) - 1)
