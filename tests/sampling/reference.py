"""The sampler's meaning, in Python floats, loops and full sorts: nothing is shared with the code that it judges."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo import SamplingParams
from octavo.sampling import SamplingRows, Shaping

MASK = 2**64 - 1


def splitmix64(state: int) -> int:
    """The output of SplitMix64 in this state, which is the seed plus a multiple of the golden number."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def reference_uniform(seed: int, choice: int, position: int) -> float:
    golden = 0x9E3779B97F4A7C15
    bits = splitmix64((seed + golden) & MASK)
    bits = splitmix64((bits + (choice + 1) * golden) & MASK)
    bits = splitmix64((bits + (position + 1) * golden) & MASK)
    return (bits >> 11) / 2**53


def softmax(logits: Sequence[float], temperature: float) -> list[float]:
    peak = max(logits)
    weights = [math.exp((x - peak) / temperature) for x in logits]
    total = math.fsum(weights)
    return [w / total for w in weights]


def kept_tokens(logits: Sequence[float], temperature: float, top_k: int, top_p: float) -> tuple[list[int], float]:
    """The ids that top_k and then top_p leave, and by how much probability the last of them was decided."""
    probabilities = softmax(logits, temperature)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if top_k > 0:
        order = order[:top_k]
    if top_p >= 1.0:
        return order, 1.0
    total = math.fsum(probabilities[i] for i in order)
    held, margin = 0.0, 1.0
    for count, i in enumerate(order, start=1):
        held += probabilities[i] / total
        margin = min(margin, abs(held - top_p))
        if held >= top_p:
            return order[:count], margin
    return order, margin


def reference_token(
    logits: Sequence[float], temperature: float, top_k: int, top_p: float, draw: float
) -> tuple[int, float]:
    """The token, and the distance of its decision from going another way: rounding may decide what is below 1e-12."""
    if temperature == 0:
        return max(range(len(logits)), key=lambda i: (logits[i], -i)), 1.0
    kept, margin = kept_tokens(logits, temperature, top_k, top_p)
    probabilities = softmax(logits, temperature)
    total = math.fsum(probabilities[i] for i in kept)
    below = 0.0
    for i in sorted(kept):
        below += probabilities[i] / total
        margin = min(margin, abs(below - draw))
        if draw < below:
            return i, margin
    raise AssertionError("a draw of 1")


def log_softmax(logits: Sequence[float]) -> list[float]:
    peak = max(logits)
    log_total = math.log(math.fsum(math.exp(x - peak) for x in logits))
    return [x - peak - log_total for x in logits]


def make_rows(
    params: Sequence[SamplingParams],
    *,
    choice: Sequence[int] | None = None,
    position: Sequence[int] | None = None,
    target: Sequence[int] | None = None,
    shaping: Sequence[Shaping | None] | None = None,
) -> SamplingRows:
    """Rows as the model runner makes them: a greedy request has temperature 0."""
    n = len(params)
    return SamplingRows(
        temperature=np.array([0.0 if p.greedy else p.temperature for p in params], np.float64),
        top_k=np.array([max(p.top_k, 0) for p in params], np.int32),
        top_p=np.array([p.top_p for p in params], np.float64),
        min_p=np.array([p.min_p for p in params], np.float64),
        seed=np.array([p.seed or 0 for p in params], np.uint64),
        choice=np.array(choice or [0] * n, np.uint64),
        position=np.array(position or [0] * n, np.uint64),
        num_logprobs=np.array([-1 if p.logprobs is None else p.logprobs for p in params], np.int32),
        target=np.array(target or [-1] * n, np.int32),
        shaping=shaping or [None] * n,
    )


def random_logits(seed: int, rows: int, vocab: int, *, scale: float = 3.0, step: float = 0.0) -> NDArray[np.float32]:
    """Normal logits; a `step` rounds them, so that many are equal."""
    logits = np.random.default_rng(seed).normal(0.0, scale, (rows, vocab))
    if step:
        logits = np.round(logits / step) * step
    return logits.astype(np.float32)
