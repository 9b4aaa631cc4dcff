"""benchmarks/soak.py, as a test: it checks itself that no block, no slot of the host tier and no request is lost."""

import logging
from collections.abc import Iterator

import pytest

from benchmarks.soak import POLICIES, Soak, soak


@pytest.fixture(autouse=True)
def nothing_logged() -> Iterator[None]:
    """pytest would keep what is said of each search that fails, and that is no flat memory."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def check_that_it_happened(result: Soak) -> None:
    stats = result.stats
    assert min(result.aborted, result.searches, stats["num_preemptions"], stats["num_block_copies"]) > 10
    assert min(result.failed, result.failed_steps) > 0
    assert 0 < stats["num_preemptions_swap"] < stats["num_preemptions"]
    assert 0 < stats["num_swapped_in_blocks"] < stats["num_swapped_out_blocks"]
    assert stats["prefix_cache_hits"] > 0.3 * stats["prefix_cache_queries"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_short_life(policy: str) -> None:
    result = soak(2000, policy=policy)
    check_that_it_happened(result)
    assert max(result.memory) < result.memory[0] + 3000  # of so many sequences, not one object each


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_life(policy: str) -> None:
    result = soak(100_000, policy=policy, seed=1)
    assert result.finished > 100_000
    check_that_it_happened(result)
    assert max(result.memory) < result.memory[0] + 3000
