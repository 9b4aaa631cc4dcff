"""benchmarks/soak.py, as a test: it checks itself that no block and no request is lost."""

import pytest

from benchmarks.soak import soak


def test_a_short_life():
    result = soak(2000)
    assert min(result.aborted, result.failed_steps, result.stats["num_preemptions"]) > 10
    assert result.stats["prefix_cache_hits"] > 0.3 * result.stats["prefix_cache_queries"]
    assert max(result.memory) < 1.05 * result.memory[0]


@pytest.mark.slow
def test_a_long_life():
    result = soak(100_000, seed=1)
    assert result.finished > 100_000
    assert max(result.memory) < 1.02 * result.memory[0]
