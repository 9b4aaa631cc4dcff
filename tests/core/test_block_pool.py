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
        with pytest.raises(ValueError, match=f"block {block} is not in use"):
            pool.release(block)
        with pytest.raises(ValueError, match=f"block {block} is free"):
            pool.share(block)
    assert pool.num_free == 2


class TestCached:
    def states(self, pool: BlockPool) -> list[str]:
        states = [pool.state(block) for block in range(pool.num_blocks)]
        counts = [states.count(state) for state in ("free", "cached", "used")]
        assert counts == [pool.num_free, pool.num_cached, pool.num_used]
        return states

    def test_a_published_block_is_cached_when_it_is_released_and_found_again(self):
        pool = BlockPool(2)
        block = pool.allocate()
        pool.publish(block, b"key")
        assert (pool.find(b"key"), pool.state(block)) == (block, "used")
        pool.release(block)
        assert (pool.find(b"key"), self.states(pool)) == (block, ["cached", "free"])
        pool.share(block)
        assert (pool.ref_count(block), self.states(pool)) == (1, ["used", "free"])
        with pytest.raises(ValueError, match="block 1 is free"):
            pool.share(1)

    def test_free_blocks_are_taken_before_cached_ones_and_of_those_the_first_released(self):
        pool = BlockPool(4)
        for key in (b"a", b"b", b"c"):
            pool.publish(pool.allocate(), key)
        for block in (1, 0, 2):
            pool.release(block)
        pool.share(1)  # used again, and so the last that was released
        pool.release(1)
        assert [pool.allocate() for _ in range(4)] == [3, 0, 2, 1]
        assert [pool.find(key) for key in (b"a", b"b", b"c")] == [None] * 3
        with pytest.raises(ValueError, match="all 4 blocks are in use"):
            pool.allocate()
        for block in range(4):
            pool.release(block)
        assert self.states(pool) == ["free"] * 4

    def test_the_first_of_two_equal_blocks_is_the_one_that_is_found(self):
        pool = BlockPool(3)
        first, second = pool.allocate(), pool.allocate()
        pool.publish(first, b"key")
        pool.publish(second, b"key")
        pool.release(second)
        assert self.states(pool) == ["used", "free", "free"]
        pool.release(first)
        assert pool.find(b"key") == first

    def test_what_is_withdrawn_is_not_found(self):
        pool = BlockPool(3)
        for key in (b"a", b"b", b"c"):
            pool.publish(pool.allocate(), key)
        pool.withdraw(0)
        pool.withdraw(0)
        for block in range(3):
            pool.release(block)
        assert self.states(pool) == ["free", "cached", "cached"]
        pool.withdraw(1)
        pool.withdraw(2)
        assert self.states(pool) == ["free"] * 3
        assert [pool.find(key) for key in (b"a", b"b", b"c")] == [None] * 3
        assert sorted(pool.allocate() for _ in range(3)) == [0, 1, 2]

    def test_shared_blocks_are_counted(self):
        pool = BlockPool(2)
        block = pool.allocate()
        for shared in (1, 1):
            pool.share(block)
            assert pool.num_shared == shared
        for shared in (1, 0, 0):
            pool.release(block)
            assert pool.num_shared == shared


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
    manager.adopt(sequence, manager.find_prefix(sequence))
    assert manager.missing(sequence, 9) == 3
    assert manager.grow(sequence, 7) == (None, sequence.block_tables)
    assert (manager.missing(sequence, 9), manager.missing(sequence, 8), manager.missing(sequence, 1)) == (1, 0, 0)
    first = list(sequence.block_tables[0])
    assert manager.grow(sequence, 8) == (None, None)
    _, new_blocks = manager.grow(sequence, 9)
    assert new_blocks is not None
    assert first + new_blocks[0] == sequence.block_tables[0]
    manager.free(sequence)
    assert (sequence.block_tables, manager.pool.num_free) == ([], 10)
