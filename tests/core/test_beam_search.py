"""BeamGroup against two references in float64: the beams of transformers' rules over the dense [beam, token] table of
all logprobs, and, where the width leaves nothing out, the best of all continuations that there are."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from octavo.core.beam_search import BeamGroup, Hypothesis
from octavo.outputs import TokenLogprobs
from octavo.sampling_params import BeamSearchParams

Logprobs = Callable[[tuple[int, ...]], NDArray[np.float64]]  # of the next token, after these generated ones: [V]
ABSENT = -1.0e9  # the score of a place that holds no beam


def markov(seed: int, vocab: int, step: float | None = None) -> Logprobs:
    """Logprobs that depend on the last two tokens; rounded to multiples of `step` (ties then, and no sum of 1)."""
    table = np.random.default_rng(seed).normal(0.0, 1.5, (vocab + 1, vocab + 1, vocab))
    table -= np.log(np.exp(table).sum(-1, keepdims=True))
    if step is not None:
        table = np.round(table / step) * step
    return lambda tokens: table[(vocab, vocab, *tokens)[-2], (vocab, vocab, *tokens)[-1]]


def top(logprobs: NDArray[np.float64], count: int) -> TokenLogprobs:
    ids = np.argsort(-logprobs, kind="stable")[:count]
    return TokenLogprobs(int(ids[0]), float(logprobs[ids[0]]), 1, ids.tolist(), logprobs[ids].tolist())


def search(model: Logprobs, params: BeamSearchParams, stops: set[int], max_tokens: int) -> list[Hypothesis]:
    group = BeamGroup(params, max_tokens=max_tokens, stop_token_ids=stops)
    while group.live:
        before = group.live
        chosen = group.advance([top(model(tuple(beam.token_ids)), group.num_candidates) for beam in before])
        assert len(chosen) == len(group.live) <= params.beam_width
        for (parent, token), beam in zip(chosen, group.live, strict=True):
            assert beam.token_ids == [*before[parent].token_ids, token]
    return group.finished


def reference(
    model: Logprobs, params: BeamSearchParams, stops: set[int], max_tokens: int
) -> list[tuple[float, tuple[int, ...]]]:
    """transformers' `_beam_search`, step by step, in float64 and with stable sorts; (score, tokens), best first."""
    width, penalty = params.beam_width, params.length_penalty
    running: list[tuple[float, tuple[int, ...]]] = [(0.0, ())] + [(ABSENT, ())] * (width - 1)
    finished: list[tuple[float, tuple[int, ...], bool]] = [(ABSENT, (), False)] * width
    for length in range(1, max_tokens + 1):
        table = np.stack([score + model(tokens) for score, tokens in running])
        order = np.argsort(-table.ravel(), kind="stable")[: max(2, 1 + len(stops)) * width]
        candidates = []
        for index in order.tolist():
            beam, token = divmod(index, table.shape[1])
            candidates.append((float(table.ravel()[index]), (*running[beam][1], token)))
        hits = [tokens[-1] in stops or length == max_tokens for _, tokens in candidates]
        open_ones = [(s + (ABSENT if hit else 0.0), tokens) for (s, tokens), hit in zip(candidates, hits, strict=True)]
        running = sorted(open_ones, key=lambda one: -one[0])[:width]
        ended = [(s / length**penalty, tokens, True) for (s, tokens), hit in zip(candidates, hits, strict=True) if hit]
        best_ended = [e for e in ended if e[1] in {tokens for _, tokens in candidates[:width]}]
        finished = sorted(finished + best_ended, key=lambda one: -one[0])[:width]
        reach = max_tokens if params.early_stopping == "never" and penalty > 0 else length
        full = all(there for _, _, there in finished)
        worst = min(score for score, _, _ in finished) if full else ABSENT
        if all(hits) or (full and params.early_stopping is True) or not running[0][0] / reach**penalty > worst:
            break
    return [(score, tokens) for score, tokens, there in finished if there]


def equal(found: list[Hypothesis], expected: list[tuple[float, tuple[int, ...]]]) -> None:
    assert [tuple(one.token_ids) for one in found] == [tokens for _, tokens in expected]
    np.testing.assert_allclose([one.score for one in found], [score for score, _ in expected], rtol=1e-12, atol=1e-12)


EARLY = st.sampled_from([False, True, "never"])
PENALTIES = st.sampled_from([-1.5, 0.0, 0.5, 1.0, 2.0])


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    width=st.integers(1, 5),
    num_stops=st.integers(0, 3),
    max_tokens=st.integers(1, 9),
    penalty=PENALTIES,
    early=EARLY,
    step=st.sampled_from([None, 0.5]),
)
def test_the_beams_of_transformers_rules(
    seed: int, width: int, num_stops: int, max_tokens: int, penalty: float, early: bool, step: float | None
) -> None:
    model, stops = markov(seed, 24, step), set(range(0, 3 * num_stops, 3))
    params = BeamSearchParams(beam_width=width, length_penalty=penalty, early_stopping=early)
    found = search(model, params, stops, max_tokens)
    equal(found, reference(model, params, stops, max_tokens))
    for one in found:
        total, tokens = 0.0, tuple(one.token_ids)
        for i, token in enumerate(tokens):
            total += model(tokens[:i])[token]
        assert one.logprob == pytest.approx(total, rel=1e-12)
        assert one.score == pytest.approx(total / len(tokens) ** penalty, rel=1e-12)
        assert one.finish_reason == ("stop" if tokens[-1] in stops else "length")
        assert stops.isdisjoint(tokens[:-1])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), penalty=PENALTIES)
def test_the_best_of_all_when_the_width_leaves_nothing_out(seed: int, penalty: float) -> None:
    vocab, max_tokens, stops = 3, 4, {0}
    model, scored = markov(seed, vocab), []
    for length in range(1, max_tokens + 1):
        for tokens in itertools.product(range(vocab), repeat=length):
            if stops.isdisjoint(tokens[:-1]) and (tokens[-1] in stops or length == max_tokens):
                logprob = sum(model(tokens[:i])[token] for i, token in enumerate(tokens))
                scored.append((float(logprob) / length**penalty, tokens))
    params = BeamSearchParams(beam_width=100, length_penalty=penalty, early_stopping="never")
    equal(search(model, params, stops, max_tokens), sorted(scored, key=lambda one: -one[0]))


@pytest.mark.parametrize("early", [False, True, "never"])
def test_a_width_of_one_without_an_end_is_greedy(early: bool) -> None:
    model, tokens = markov(3, 24), ()
    for _ in range(12):
        tokens = (*tokens, int(model(tokens).argmax()))
    (found,) = search(model, BeamSearchParams(beam_width=1, early_stopping=early), set(), 12)
    assert tuple(found.token_ids) == tokens


def test_ties_go_to_the_earlier_beam_and_then_to_the_lower_id() -> None:
    group = BeamGroup(BeamSearchParams(beam_width=3), max_tokens=5, stop_token_ids=())
    assert group.advance([TokenLogprobs(4, -1.0, 1, [4, 5, 6], [-1.0, -1.0, -1.0])]) == [(0, 4), (0, 5), (0, 6)]
    same = TokenLogprobs(2, -1.0, 1, [2, 7, 9], [-1.0, -1.0, -2.0])
    assert group.advance([same, same, same]) == [(0, 2), (0, 7), (1, 2)]


def test_a_token_that_cannot_come_makes_no_beam() -> None:
    group = BeamGroup(BeamSearchParams(beam_width=3), max_tokens=5, stop_token_ids=())
    assert group.advance([TokenLogprobs(4, 0.0, 1, [4, 5, 6], [0.0, -np.inf, -np.inf])]) == [(0, 4)]
    assert len(group.live) == 1


def test_the_best_so_far() -> None:
    """Finished and live ones by their scores; before the first token, one that is empty."""
    group = BeamGroup(BeamSearchParams(beam_width=2), max_tokens=5, stop_token_ids={0})
    assert group.best("abort") == [Hypothesis([], 0.0, 0.0, "abort")]
    group.advance([TokenLogprobs(3, -0.5, 1, [3, 0, 5], [-0.5, -1.5, -2.5])])
    assert group.best("abort") == [Hypothesis([3], -0.5, -0.5, "abort"), Hypothesis([0], -1.5, -1.5, "stop")]
    group.advance([TokenLogprobs(1, -3.5, 1, [1, 2, 4], [-3.5, -4.5, -5.5])] * 2)
    assert group.best("error") == [Hypothesis([0], -1.5, -1.5, "stop"), Hypothesis([3, 1], -4.0, -2.0, "error")]
