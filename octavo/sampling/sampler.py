"""Rows of logits to tokens and logprobs.

A row is sampled by inverting its cumulative distribution, taken in the order of token ids, at one random number. So
a draw needs no sort, and min_p, top_k and top_p only take tokens out of the sum. Everything is computed in float64 from
float32 logits (which features.py may have changed), row by row: a row's result cannot depend on its neighbours.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.outputs import TokenLogprobs
from octavo.sampling.random import uniform
from octavo.sampling.rows import NOT_FINITE, NOTHING_LEFT, Sampled, SamplingRows

Logits = NDArray[np.float32]
Ids = NDArray[np.intp]


class Sampler:
    """Samples rows of logits; `vocab_size` is the tokeniser's, so that padding ids past it are never sampled."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def __call__(self, logits: Logits, rows: SamplingRows) -> Sampled:
        """Logits [S, V] with V at least `vocab_size`; see SamplingRows for what is done with each row."""
        logits = logits[:, : self.vocab_size]
        best = logits.argmax(axis=1)  # the first of equals, and a NaN before anything else
        broken = ~np.isfinite(logits[np.arange(len(logits)), best])
        token_ids = np.where(rows.target >= 0, rows.target, best).astype(np.int32)
        token_ids[broken] = NOT_FINITE
        plain = (rows.target < 0) & ~broken
        for i, shaping in enumerate(rows.shaping):
            if shaping is not None and plain[i]:
                plain[i] = False
                token_ids[i] = _pick(shaping(logits[i]), rows, i)
        for i in np.flatnonzero(plain & (rows.temperature > 0)).tolist():
            token_ids[i] = _draw(logits[i], rows, i)
        logprobs = [
            _logprobs(logits[i], int(token), int(count)) if count >= 0 and token >= 0 else None
            for i, (token, count) in enumerate(zip(token_ids, rows.num_logprobs, strict=True))
        ]
        return Sampled(token_ids, logprobs)


def _pick(logits: Logits, rows: SamplingRows, i: int) -> int:
    """One token of one row whose logits were changed; greedy or drawn."""
    best = int(logits.argmax())
    if not np.isfinite(logits[best]):
        return NOTHING_LEFT
    return _draw(logits, rows, i) if rows.temperature[i] > 0 else best


def _draw(logits: Logits, rows: SamplingRows, i: int) -> int:
    """One token of one row: temperature, then min_p, top_k and top_p, then the draw."""
    scaled = logits.astype(np.float64) / rows.temperature[i]
    weights = np.exp(scaled - scaled.max())
    if rows.min_p[i] > 0:
        weights[weights < rows.min_p[i]] = 0.0  # the largest weight is 1
    top_k, top_p = int(rows.top_k[i]), float(rows.top_p[i])
    kept = None
    if 0 < top_k < len(logits):
        kept = most_likely(logits, top_k)
    if top_p < 1.0:
        kept = _nucleus(logits, weights, top_p, kept)
    if kept is not None:
        kept = np.sort(kept)
        weights = weights[kept]
    cumulative = np.cumsum(weights)
    u = uniform(rows.seed[i : i + 1], rows.choice[i : i + 1], rows.position[i : i + 1])[0]
    # As u is at most 1 - 2^-53, u * total rounds to less than the total: the draw lands on a token of some weight.
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return index if kept is None else int(kept[index])


def most_likely(logits: Logits, count: int) -> Ids:
    """Ids of the `count` largest logits, descending; ties go to the lower id. No full sort."""
    if count >= len(logits):
        return np.argsort(-logits, kind="stable")
    threshold = np.partition(logits, len(logits) - count)[len(logits) - count]
    above = np.flatnonzero(logits > threshold)
    equal = np.flatnonzero(logits == threshold)[: count - len(above)]
    above = above[np.argsort(-logits[above], kind="stable")]
    return np.concatenate([above, equal])


def _nucleus(logits: Logits, weights: NDArray[np.float64], top_p: float, kept: Ids | None) -> Ids:
    """The fewest most likely ids (of `kept`, descending, or of all) that hold at least `top_p` of the probability.

    Most nuclei are small: a few hundred candidates are tried before the whole row is sorted.
    """
    if kept is not None:
        wanted = top_p * weights[kept].sum()
        return kept[: _first_reaching(weights[kept], wanted)]
    wanted = top_p * weights.sum()
    candidates = most_likely(logits, 512)
    if weights[candidates].sum() < wanted:
        candidates = most_likely(logits, len(logits))
    return candidates[: _first_reaching(weights[candidates], wanted)]


def _first_reaching(weights: NDArray[np.float64], wanted: float) -> int:
    return int(np.searchsorted(np.cumsum(weights), wanted, side="left")) + 1


def _logprobs(logits: Logits, token: int, count: int) -> TokenLogprobs:
    x = logits.astype(np.float64)
    below_peak = x - x.max()
    log_total = np.log(np.exp(below_peak).sum())
    rank = 1 + int((x > x[token]).sum()) + int((x[:token] == x[token]).sum())
    top = most_likely(logits, count) if count else np.empty(0, np.intp)
    logprob = float(below_peak[token] - log_total)
    return TokenLogprobs(token, logprob, rank, top.tolist(), (below_peak[top] - log_total).tolist())
