import tracemalloc

import pytest

from octavo.core import BlockManager, BlockPool
from tests.core.helpers import make_sequence


def test_blocks_are_handed_out_once_and_come_back():
    pool = BlockPool(3)
    assert sorted(pool.allocate() for _ in range(3)) == [0, 1, 2]
    assert (pool.num_free, pool.num_used) == (0, 3)
    with pytest.raises(ValueError, match="all 3 blocks are in use"):
        pool.allocate()
    pool.release(1)
    assert (pool.num_free, pool.num_used, pool.ref_count(1)) == (1, 2, 0)
    assert pool.allocate() == 1


def test_a_shared_block_is_free_when_its_last_holder_releases_it():
    pool = BlockPool(2)
    block = pool.allocate()
    pool.share(block)
    assert pool.ref_count(block) == 2
    pool.release(block)
    assert (pool.ref_count(block), pool.num_used) == (1, 1)
    pool.release(block)
    assert (pool.ref_count(block), pool.num_used) == (0, 0)


def test_a_free_block_cannot_be_released_or_shared():
    pool = BlockPool(2)
    for block in (0, pool.allocate()):
        if pool.ref_count(block):
            pool.release(block)
        with pytest.raises(ValueError, match=f"block {block} is free"):
            pool.release(block)
        with pytest.raises(ValueError, match=f"block {block} is free"):
            pool.share(block)
    assert pool.num_free == 2


def test_peak_is_the_most_at_once_not_the_total():
    pool = BlockPool(10)
    for _ in range(5):
        blocks = [pool.allocate() for _ in range(3)]
        for block in blocks:
            pool.release(block)
    assert (pool.peak_used, pool.num_used) == (3, 0)
    for _ in range(4):
        pool.allocate()
    assert pool.peak_used == 4


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_pool_needs_a_block(num_blocks):
    with pytest.raises(ValueError, match=f"num_blocks={num_blocks}"):
        BlockPool(num_blocks)


def test_a_million_blocks_cost_little():
    tracemalloc.start()
    try:
        pool = BlockPool(1_000_000)
        blocks = [pool.allocate() for _ in range(1000)]
        for block in blocks:
            pool.release(block)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * 2**20
    assert (pool.num_free, pool.peak_used) == (1_000_000, 1000)


def test_block_manager_counts_blocks():
    manager = BlockManager(10, 4)
    assert [manager.blocks_for(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


def test_block_manager_grows_and_frees_a_table():
    manager = BlockManager(10, 4)
    sequence = make_sequence(0, 9)
    assert manager.missing(sequence, 9) == 3
    assert manager.grow(sequence, 2) == sequence.block_table
    assert (manager.missing(sequence, 9), manager.missing(sequence, 8), manager.missing(sequence, 1)) == (1, 0, 0)
    first = list(sequence.block_table)
    assert first + manager.grow(sequence, 1) == sequence.block_table
    manager.free(sequence)
    assert (sequence.block_table, manager.pool.num_free) == ([], 10)
