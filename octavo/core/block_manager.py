"""Block tables: which blocks of the pool hold the keys and values of which sequence."""

from __future__ import annotations

from octavo.core.block_pool import BlockPool
from octavo.core.sequence import Sequence


class BlockManager:
    """Grows and frees the block tables of sequences.

    Position p of a sequence lives in block `block_table[p // block_size]`, slot `p % block_size`. With blocks of 4
    tokens, sequence A (6 tokens) and sequence B (3 tokens) in a pool of 5::

        A.block_table = [0, 2]     block  0          1          2          3          4
        B.block_table = [1]              [A0 A1 A2 A3][B0 B1 B2 ..][A4 A5 .. ..][free      ][free      ]
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that the table lacks before the first `num_tokens` positions have a place."""
        return max(self.blocks_for(num_tokens) - len(sequence.block_table), 0)

    def grow(self, sequence: Sequence, count: int) -> list[int]:
        """Appends `count` blocks to the table and returns them; the caller has made sure that they are free."""
        blocks = [self.pool.allocate() for _ in range(count)]
        sequence.block_table += blocks
        return blocks

    def free(self, sequence: Sequence) -> None:
        """Gives all blocks of the sequence back."""
        while sequence.block_table:
            self.pool.release(sequence.block_table.pop())
