"""Block tables: which blocks of the pool hold the keys and values of which sequence."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from collections.abc import Sequence as Many

from octavo.core.block_keys import block_key, root_key
from octavo.core.block_pool import BlockPool
from octavo.core.host_tier import HostTier
from octavo.core.plan import NOTHING, BlockMove
from octavo.core.sequence import Sequence

IN_HOST_TIER = -2  # in what `find_prefix` gives: to be swapped in

BlockTables = list[list[int]]


class BlockManager:
    """Grows, shares and frees the block tables of sequences.

    Position p of a sequence lives in block `table[p // block_size]`, slot `p % block_size`. With blocks of 4 tokens,
    sequence A (6 tokens), B (7 tokens that begin with A's first 4) and C, forked from A, in a pool of 5::

        A  [0, 2]     block  0          1          2          3          4
        B  [0, 1]           [t0 t1 t2 t3][B4 B5 B6 ..][A4 A5 .. ..][free      ][free      ]
        C  [0, 2]     held by A B C       B            A C

    Full blocks never change again. They are *published*: found by a key of all tokens up to their end, by whoever
    begins with the same ones. A block that is not full may be shared too, by forks; before one of them writes into it,
    it gets a copy of its own. So a block that is written to is in one table only.

    Layers come in groups that keep equally much, and a sequence has a table for each group, all equally long. Where the
    layers of a group look back over a window only, what fell out of it is released; with a window of 6, and the token
    at position 13 to be computed next::

        no window     [3, 7, 8, 2]
        window of 6   [-, -, 5, 4]     positions 8 to 13 are in blocks 2 and 3

    What is pushed out of the pool, and is worth it, goes to the host tier and comes back from there.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        caching: bool = True,
        windows: Many[int | None] = (None,),
        max_chunk: int = 1,
        num_host_blocks: int = 0,
    ) -> None:
        """
        Args:
            caching: full blocks are published; without it only forks share.
            windows: one entry a group, of tokens; None, the groups without, come first.
            max_chunk: most tokens of one sequence that a step computes.
            num_host_blocks: size of the host tier, which needs `caching`.
        """
        self.block_size = block_size
        self.caching = caching
        self.windows = tuple(windows)
        self.max_chunk = max_chunk
        self.host = HostTier(num_host_blocks)
        self.pool = BlockPool(num_blocks, self._swap_out)
        self.moves: list[BlockMove] = []  # to be done by the next plan, in order
        self.num_filled_slots = 0  # of blocks in use, a shared one counted once
        self.num_copies = 0  # of shared blocks, since the manager was made; as are the next two
        self.num_swapped_out = 0  # blocks
        self.num_swapped_in = 0
        self._published: list[int] = []  # blocks, for the latest plan
        self._put_in_host: list[bytes] = []  # keys, by the latest plan
        self._tags = [bytes([g]) if g else b"" for g in range(len(self.windows))]
        self._has_windows = any(window is not None for window in self.windows)

    def blocks_for(self, num_tokens: int) -> int:
        """Length of the block tables that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence holds at most on its way to so many computed tokens, in all groups together."""
        return most_blocks(num_tokens, self.block_size, self.windows, self.max_chunk)

    # Beginning

    def find_prefix(self, sequence: Sequence) -> BlockTables:
        """The tables of the longest prefix of the known tokens whose keys and values are published, or in the host
        tier; never the last token's.

        That one is always computed, since its logits are what the next token is sampled from.
        """
        tables: BlockTables = [[] for _ in self.windows]
        if not self.caching or sequence.needs_all_logits:
            return tables
        count = (len(sequence.tokens) - 1) // self.block_size
        for g, window in enumerate(self.windows):
            if window is None:
                count = self._find_run(sequence, g, 0, count, tables[g])
        count = self._fit_windows(sequence, count)
        for g, window in enumerate(self.windows):
            if window is None:
                del tables[g][count:]
            else:
                first = self._first_seen(count * self.block_size, window)
                tables[g] += [NOTHING] * first
                self._find_run(sequence, g, first, count, tables[g])
        return tables

    def still_ends(self, sequence: Sequence, count: int) -> bool:
        """Whether a prefix of `count` blocks that was found earlier still seems to be what `find_prefix` would find:
        its last block is there, and the next one is not. Costs O(1)."""
        most = (len(sequence.tokens) - 1) // self.block_size
        if not self.caching or sequence.needs_all_logits:
            return count == 0
        if count > 0 and self._find(sequence, count - 1, 0) == NOTHING:
            return False
        return count == most or self._find(sequence, count, 0) == NOTHING

    def adopt(self, sequence: Sequence, prefix: BlockTables) -> None:
        """Begins the block tables with what `find_prefix` has just found: its tokens count as computed."""
        sequence.block_tables = prefix
        for block in _held(prefix):
            if self.pool.ref_count(block) == 0:
                self.num_filled_slots += self.block_size
            self.pool.share(block)
        self._swap_in(sequence)
        sequence.num_computed = sequence.room = len(prefix[0]) * self.block_size

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child begins with all that the parent has computed, in the same blocks."""
        length = self.blocks_for(parent.num_computed)
        child.block_keys = parent.block_keys[:]  # its tokens begin with the parent's: nothing is hashed again
        child.block_tables = [table[:length] for table in parent.block_tables]
        for block in _held(child.block_tables):
            self.pool.share(block)
        # Both have to ask for room before they write on: the last block may now be shared.
        child.num_computed = child.room = parent.room = parent.num_computed

    # Going on

    def release_unseen(self, sequence: Sequence) -> None:
        """Gives back what no token from the first that is not computed looks at any more."""
        for table, window in zip(sequence.block_tables, self.windows, strict=True):
            if window is not None:
                index = self._first_seen(sequence.num_computed, window) - 1
                while index >= 0 and table[index] != NOTHING:
                    if self.pool.ref_count(table[index]) == 1:
                        self.num_filled_slots -= self.block_size
                    self.pool.release(table[index])
                    table[index] = NOTHING
                    index -= 1

    def missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks to be taken before the sequence can write up to `num_tokens` positions."""
        more = self.blocks_for(num_tokens) - len(sequence.block_tables[0])
        return (max(more, 0) + self._shares_tail(sequence)) * len(self.windows)

    def growth_bound(self, steps: int) -> int:
        """No sequence that decodes takes more blocks in so many steps."""
        return (2 + steps // self.block_size) * len(self.windows)

    def most_growth(self, sequence: Sequence, steps: int) -> int:
        """Blocks that a sequence that decodes may take in so many steps; `growth_bound` or less."""
        ever = self.blocks_for(sequence.max_length - 1) - len(sequence.block_tables[0])
        growth = min(1 + steps // self.block_size, ever) * len(self.windows)
        if self._has_windows and growth > 0:  # they give back what they take, once they are full
            held = sum(
                self._num_held(table, window) for table, window in zip(sequence.block_tables, self.windows, strict=True)
            )
            growth = min(growth, self.most_blocks(sequence.max_length - 1) - held)
        # One that was just forked has asked for nothing yet: it may have to copy its last block.
        copies = sequence.room == sequence.num_computed and sequence.room % self.block_size > 0
        return growth + copies * len(self.windows)

    def grow(self, sequence: Sequence, num_tokens: int) -> tuple[list[int] | None, BlockTables | None]:
        """Makes room for `num_tokens` positions; the caller has made sure that `missing` blocks are available.

        Returns:
            The copies, one a group, that have taken the place of the blocks that the next token goes into, if those
            were shared; and the blocks that were appended to the tables, if any were.
        """
        tables = sequence.block_tables
        tails = self._copy_tails(sequence) if self._shares_tail(sequence) else None
        more = self.blocks_for(num_tokens) - len(tables[0])
        blocks = [[self.pool.allocate() for _ in range(more)] for _ in tables] if more > 0 else None
        for table, new in zip(tables, blocks or (), strict=False):
            table += new
        sequence.room = len(tables[0]) * self.block_size
        return tails, blocks

    def publish(self, sequence: Sequence, start: int) -> None:
        """Publishes the blocks that computing the tokens from `start` on has filled."""
        if self.caching:
            for index in range(start // self.block_size, sequence.num_computed // self.block_size):
                key = self._key(sequence, index)
                for table, tag in zip(sequence.block_tables, self._tags, strict=True):
                    self.pool.publish(table[index], key + tag)
                    self._published.append(table[index])

    # Ending

    def free(self, sequence: Sequence, *, keep: bool = True, swap: bool = False) -> None:
        """Gives all blocks of the sequence back, the last first: of what is cached, tails go before heads.

        Args:
            keep: False: what no other sequence holds is not to be found again.
            swap: what is found again goes to the host tier when its block is needed for something else.
        """
        tables, pool = sequence.block_tables, self.pool
        for index in range(len(tables[0]) - 1 if tables else -1, -1, -1):
            filled = min(max(sequence.num_computed - index * self.block_size, 0), self.block_size)
            for table in tables:
                block = table[index]
                if block == NOTHING:
                    continue
                if pool.ref_count(block) == 1:
                    self.num_filled_slots -= filled
                    key = None if keep else pool.withdraw(block)
                    if key is not None:
                        self.host.discard(key)  # it may have been there, and come back
                pool.release(block, worth_keeping=swap)
        sequence.block_tables = []

    # Plans

    def begin_plan(self) -> None:
        if not self.moves:  # else the plan before was empty, and this one takes its place
            self._published.clear()
            self._put_in_host.clear()

    def take_moves(self) -> list[BlockMove]:
        """What the plan is to do before anything is computed."""
        moves, self.moves = self.moves, []
        return moves

    def withdraw_latest(self) -> None:
        """The latest plan was not done: what it should have filled, or moved, is not to be found."""
        for block in self._published:
            self.pool.withdraw(block)
        for key in self._put_in_host:
            self.host.discard(key)
        self.begin_plan()

    # Inside

    def _first_seen(self, position: int, window: int) -> int:
        """The first block that the token at `position` sees through the window."""
        return max(position - window + 1, 0) // self.block_size

    def _num_held(self, table: list[int], window: int | None) -> int:
        """Blocks of a table. What a window has left behind are the first ones, so that they need not be counted."""
        return len(table) if window is None else len(table) - bisect_left(table, True, key=lambda block: block >= 0)

    def _find_run(self, sequence: Sequence, group: int, first: int, last: int, table: list[int]) -> int:
        """Appends what is found of blocks [first, last), up to the first that is not; says where that is."""
        for index in range(first, last):
            block = self._find(sequence, index, group)
            if block == NOTHING:
                return index
            table.append(block)
        return last

    def _fit_windows(self, sequence: Sequence, count: int) -> int:
        """The most blocks, `count` or fewer, behind which every window finds all that it looks back at."""
        groups = [(g, window) for g, window in enumerate(self.windows) if window is not None]
        fits = False
        while not fits:
            fits = True
            for g, window in groups:
                first = self._first_seen(count * self.block_size, window)
                gap = (i for i in range(count - 1, first - 1, -1) if self._find(sequence, i, g) == NOTHING)
                missing = next(gap, None)
                if missing is not None:  # whatever ends behind it, and within the window, needs it
                    count, fits = missing, False
        return count

    def _find(self, sequence: Sequence, index: int, group: int) -> int:
        key = self._key(sequence, index) + self._tags[group]
        block = self.pool.find(key)
        if block is not None:
            return block
        return IN_HOST_TIER if key in self.host else NOTHING

    def _swap_in(self, sequence: Sequence) -> None:
        """Puts blocks of the pool in the place of what is in the host tier, and has them filled from there."""
        wanted = []
        for g, table in enumerate(sequence.block_tables):
            for index, block in enumerate(table):
                if block == IN_HOST_TIER:
                    key = self._key(sequence, index) + self._tags[g]
                    wanted.append((table, index, key, self.host.take_out(key)))
        for table, index, key, slot in wanted:
            block = table[index] = self.pool.allocate()
            self.moves.append(BlockMove("swap_in", slot, block))
            self.pool.publish(block, key)
            self._published.append(block)
            self.num_filled_slots += self.block_size
        for _, _, key, slot in wanted:
            self.host.put_back(key, slot)
        self.num_swapped_in += len(wanted)

    def _swap_out(self, block: int, key: bytes) -> None:
        slot = self.host.put(key)
        if slot is not None:
            self.moves.append(BlockMove("swap_out", block, slot))
            self._put_in_host.append(key)
            self.num_swapped_out += 1

    def _shares_tail(self, sequence: Sequence) -> bool:
        """Whether the block that the next token goes into is begun, and in other tables too; in all groups alike."""
        index, begun = divmod(sequence.num_computed, self.block_size)
        return begun > 0 and self.pool.ref_count(sequence.block_tables[0][index]) > 1

    def _copy_tails(self, sequence: Sequence) -> list[int]:
        index, begun = divmod(sequence.num_computed, self.block_size)
        for table in sequence.block_tables:
            source, table[index] = table[index], self.pool.allocate()
            self.pool.release(source)
            self.moves.append(BlockMove("copy", source, table[index]))
            self.num_filled_slots += begun
            self.num_copies += 1
        return [table[index] for table in sequence.block_tables]

    def _key(self, sequence: Sequence, index: int) -> bytes:
        """Of block `index`, whose tokens are known; hashed once."""
        keys, size = sequence.block_keys, self.block_size
        for i in range(len(keys), index + 1):
            parent = keys[-1] if keys else root_key(sequence.cache_salt)
            keys.append(block_key(parent, sequence.tokens[i * size : (i + 1) * size]))
        return keys[index]


def most_blocks(num_tokens: int, block_size: int, windows: Many[int | None], max_chunk: int) -> int:
    """Blocks that a sequence holds at most on its way to `num_tokens` computed ones, in all groups together.

    A group with a window holds what the first token of a step looks back at, up to the last that the step computes.
    """
    length = -(-num_tokens // block_size)
    spans = [None if window is None else window - 1 + max_chunk for window in windows]
    return sum(length if span is None else min(length, (span - 2) // block_size + 2) for span in spans)


def _held(tables: BlockTables) -> Iterator[int]:
    return (block for table in tables for block in table if block >= 0)
