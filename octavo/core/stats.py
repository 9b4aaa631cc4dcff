"""What the scheduler says of itself: numbers, and a picture of the pool. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.core.block_pool import BlockState
from octavo.core.plan import NOTHING


@dataclass(slots=True)
class Totals:
    """Counted since the scheduler was made."""

    num_steps: int = 0
    num_tokens: int = 0  # computed, prompt tokens and recomputed ones included
    num_forks: int = 0  # sequences that began with what another had computed
    prefix_cache_queries: int = 0  # tokens of sequences that ran for the first time, looked up in the prefix cache
    prefix_cache_hits: int = 0  # of these, found there: they were not computed again
    num_preemptions_growth: int = 0  # a running sequence needed a block
    num_preemptions_admission: int = 0  # a sequence before it in the order came in
    num_preemptions_failure: int = 0  # a step failed
    num_preemptions_swap: int = 0  # of all these, by swap; the others by recompute
    num_preempted_tokens: int = 0  # computed, and given up by preemptions
    num_restored_tokens: int = 0  # found in the prefix cache or the host tier when preempted sequences came back

    @property
    def num_preemptions(self) -> int:
        return self.num_preemptions_growth + self.num_preemptions_admission + self.num_preemptions_failure


class SchedulerStats(NamedTuple):
    """What the scheduler holds now, and totals since it was made; those that `Totals` has are explained there."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int  # hold nothing of use
    num_cached_blocks: int  # held by no sequence, and found again by whoever has the same prefix
    num_used_blocks: int
    num_shared_blocks: int  # of the used ones, held by several sequences
    peak_used_blocks: int
    num_host_blocks: int  # size of the host tier
    num_used_host_blocks: int
    num_swapped_out_blocks: int  # written to the host tier
    num_swapped_in_blocks: int  # read from there
    num_held_tokens: int  # in used blocks, one for each group of layers; what several sequences share is counted once
    num_steps: int
    num_tokens: int
    num_forks: int
    num_block_copies: int  # of shared blocks, before one of those that share them wrote on
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_preemptions: int
    num_preemptions_growth: int
    num_preemptions_admission: int
    num_preemptions_failure: int
    num_preemptions_swap: int
    num_preempted_tokens: int
    num_restored_tokens: int
    slot_utilization: float  # share of the slots in used blocks that held a token, over all steps; 0 before any


@dataclass(slots=True)
class SequenceBlocks:
    """What one unfinished sequence has in the pool."""

    seq_id: int
    status: str  # "waiting", "running" or "preempted"
    num_tokens: int  # known
    num_computed: int
    num_cached_tokens: int  # of the prompt, found in the prefix cache when it first ran
    num_preemptions: int
    block_tables: list[list[int]]  # one for each group of layers, in the order of positions; -1: fell out of the window
    num_shared: int  # of these blocks, in other block tables too
    request_id: str = ""  # filled in by the engine, as is the next
    choice: int = 0

    @property
    def blocks(self) -> list[int]:
        """All that it holds."""
        return [block for table in self.block_tables for block in table if block != NOTHING]


@dataclass(slots=True)
class KVSnapshot:
    """The pool at one moment, between two steps."""

    block_size: int  # tokens
    states: list[BlockState]  # by block
    sequences: list[SequenceBlocks] = field(default_factory=list)  # in no order

    @property
    def owners(self) -> dict[int, list[int]]:
        """The seq_ids that hold each used block."""
        result: dict[int, list[int]] = {}
        for sequence in self.sequences:
            for block in sequence.blocks:
                result.setdefault(block, []).append(sequence.seq_id)
        return result
