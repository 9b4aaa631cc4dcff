"""100,000 draws follow the distribution that was asked for, whichever part of the key counts up."""

import math

import numpy as np
import pytest

from octavo.sampling import Sampler, SamplingRows
from tests.sampling.reference import kept_tokens, softmax

DRAWS = 100_000
LOGITS = np.array([0.3, -1.0, 2.0, 1.1, -2.5, 1.9, 0.0, 0.3], np.float32)


def critical_value(degrees: int) -> float:
    """What chi-square exceeds at most once in 10,000 runs, by the approximation of Wilson and Hilferty (1931)."""
    z = 3.719016  # the standard normal's own
    return degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3


def test_the_critical_value_is_right():
    """Against the exact tail for even degrees: exp(-x/2) times the sum of (x/2)^i / i!."""
    for degrees in (2, 4, 8, 20):
        half = critical_value(degrees) / 2
        tail = math.exp(-half) * sum(half**i / math.factorial(i) for i in range(degrees // 2))
        assert 5e-5 < tail <= 1e-4


@pytest.mark.parametrize("axis", ["seed", "choice", "position"])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.6, 4, 1.0), (1.5, 0, 0.8)],
    ids=["plain", "top_k", "top_p"],
)
@pytest.mark.slow
def test_draws_follow_the_distribution(axis, temperature, top_k, top_p):
    keys = {name: np.full(DRAWS, 17, np.uint64) for name in ("seed", "choice", "position")}
    keys[axis] = np.arange(DRAWS, dtype=np.uint64)
    rows = SamplingRows(
        temperature=np.full(DRAWS, temperature),
        top_k=np.full(DRAWS, top_k, np.int32),
        top_p=np.full(DRAWS, top_p),
        min_p=np.zeros(DRAWS),
        num_logprobs=np.full(DRAWS, -1, np.int32),
        target=np.full(DRAWS, -1, np.int32),
        shaping=[None] * DRAWS,
        **keys,
    )
    tokens = Sampler(len(LOGITS))(np.broadcast_to(LOGITS, (DRAWS, len(LOGITS))), rows).token_ids
    observed = np.bincount(tokens, minlength=len(LOGITS))

    logits = LOGITS.astype(float).tolist()
    kept, margin = kept_tokens(logits, temperature, top_k, top_p)
    assert margin > 1e-6
    probabilities = softmax(logits, temperature)
    total = sum(probabilities[i] for i in kept)
    assert sum(observed[i] for i in kept) == DRAWS
    assert len(kept) > 2
    expected = {i: DRAWS * probabilities[i] / total for i in kept}
    chi_square = sum((observed[i] - expected[i]) ** 2 / expected[i] for i in kept)
    assert chi_square < critical_value(len(kept) - 1)
