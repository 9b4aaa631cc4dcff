"""Block tables: which blocks of the pool hold the keys and values of which sequence."""

from __future__ import annotations

from octavo.core.block_keys import block_key, root_key
from octavo.core.block_pool import BlockPool
from octavo.core.sequence import Sequence


class BlockManager:
    """Grows, shares and frees the block tables of sequences.

    Position p of a sequence lives in block `block_table[p // block_size]`, slot `p % block_size`. With blocks of 4
    tokens, sequence A (6 tokens), B (7 tokens that begin with A's first 4) and C, forked from A, in a pool of 5::

        A.block_table = [0, 2]     block  0          1          2          3          4
        B.block_table = [0, 1]           [t0 t1 t2 t3][B4 B5 B6 ..][A4 A5 .. ..][free      ][free      ]
        C.block_table = [0, 2]     held by A B C       B            A C

    Full blocks never change again. They are *published*: found by a key of all tokens up to their end, by whoever
    begins with the same ones. A block that is not full may be shared too, by forks; before one of them writes into it,
    it gets a copy of its own. So a block that is written to is in one table only.
    """

    def __init__(self, num_blocks: int, block_size: int, *, caching: bool = True) -> None:
        """`caching`: full blocks are published; without it only forks share."""
        self.block_size = block_size
        self.caching = caching
        self.pool = BlockPool(num_blocks)
        self.num_filled_slots = 0  # of blocks in use, a shared one counted once
        self.published: list[int] = []  # blocks, for the latest plan
        self.num_copies = 0  # of shared blocks, since the manager was made

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """The published blocks that hold the longest prefix of the known tokens; never the last token's.

        That one is always computed, since its logits are what the next token is sampled from.
        """
        blocks: list[int] = []
        if self.caching and not sequence.needs_all_logits:
            for index in range((len(sequence.tokens) - 1) // self.block_size):
                block = self.pool.find(self._key(sequence, index))
                if block is None:
                    break
                blocks.append(block)
        return blocks

    def adopt(self, sequence: Sequence, prefix: list[int]) -> None:
        """Begins a block table with blocks of `find_prefix`: their tokens count as computed."""
        for block in prefix:
            if self.pool.ref_count(block) == 0:
                self.num_filled_slots += self.block_size
            self.pool.share(block)
        sequence.block_table += prefix
        sequence.num_computed = sequence.room = len(prefix) * self.block_size

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child begins with all that the parent has computed, in the same blocks."""
        child.block_table += parent.block_table[: self.blocks_for(parent.num_computed)]
        for block in child.block_table:
            self.pool.share(block)
        # Both have to ask for room before they write on: the last block may now be shared.
        child.num_computed = child.room = parent.room = parent.num_computed

    def missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks to be taken before the sequence can write up to `num_tokens` positions."""
        more = self.blocks_for(num_tokens) - len(sequence.block_table)
        return max(more, 0) + self._shares_tail(sequence)

    def grow(self, sequence: Sequence, num_tokens: int) -> tuple[tuple[int, int] | None, list[int]]:
        """Makes room for `num_tokens` positions; the caller has made sure that `missing` blocks are available.

        Returns:
            (source, destination) where the block that the next token goes into is shared and is to be copied first; the
            copy has taken its place in the table. And the blocks that were appended to the table.
        """
        copy = self._copy_tail(sequence) if self._shares_tail(sequence) else None
        blocks = [self.pool.allocate() for _ in range(self.blocks_for(num_tokens) - len(sequence.block_table))]
        sequence.block_table += blocks
        sequence.room = len(sequence.block_table) * self.block_size
        return copy, blocks

    def publish(self, sequence: Sequence, start: int) -> None:
        """Publishes the blocks that computing the tokens from `start` on has filled."""
        if self.caching:
            for index in range(start // self.block_size, sequence.num_computed // self.block_size):
                self.pool.publish(sequence.block_table[index], self._key(sequence, index))
                self.published.append(sequence.block_table[index])

    def withdraw_latest(self) -> None:
        """The latest plan was not done: what it should have filled is not to be found."""
        for block in self.published:
            self.pool.withdraw(block)
        self.published.clear()

    def free(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Gives all blocks of the sequence back, the last first: of what is cached, tails go before heads.

        `keep=False`: what no other sequence holds is not to be found again.
        """
        table, pool = sequence.block_table, self.pool
        while table:
            block = table.pop()
            if pool.ref_count(block) == 1:
                filled = sequence.num_computed - len(table) * self.block_size
                self.num_filled_slots -= min(max(filled, 0), self.block_size)
                if not keep:
                    pool.withdraw(block)
            pool.release(block)

    def _shares_tail(self, sequence: Sequence) -> bool:
        """Whether the block that the next token goes into is begun, and in another table too."""
        index, begun = divmod(sequence.num_computed, self.block_size)
        return begun > 0 and self.pool.ref_count(sequence.block_table[index]) > 1

    def _copy_tail(self, sequence: Sequence) -> tuple[int, int]:
        index, begun = divmod(sequence.num_computed, self.block_size)
        source, destination = sequence.block_table[index], self.pool.allocate()
        sequence.block_table[index] = destination
        self.pool.release(source)
        self.num_filled_slots += begun
        self.num_copies += 1
        return source, destination

    def _key(self, sequence: Sequence, index: int) -> bytes:
        """Of block `index`, whose tokens are known; hashed once."""
        keys, size = sequence.block_keys, self.block_size
        for i in range(len(keys), index + 1):
            parent = keys[-1] if keys else root_key(sequence.cache_salt)
            keys.append(block_key(parent, sequence.tokens[i * size : (i + 1) * size]))
        return keys[index]
