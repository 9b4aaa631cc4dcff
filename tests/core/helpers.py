"""A scheduler that needs no model: short ways to make one, and a worker that knows only what the plans tell it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable

from octavo import SamplingParams
from octavo.core import BlockManager, Scheduler, Sequence, StepPlan, StepResult, make_policy

PARAMS = SamplingParams(temperature=0.0)


def make_scheduler(
    *, blocks: int = 100, block_size: int = 4, policy: str = "fcfs", seqs: int = 8, budget: int = 64
) -> Scheduler:
    return Scheduler(
        BlockManager(blocks, block_size),
        make_policy(policy),
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        clock=lambda: 0.0,
    )


def make_sequence(
    seq_id: int, prompt: int, new_tokens: int = 4, *, priority: int = 0, stop: Iterable[int] = ()
) -> Sequence:
    """A sequence of `prompt` known tokens, all different from those of other sequences, and room for `new_tokens`."""
    tokens = [1000 * (seq_id + 1) + i for i in range(prompt)]
    return Sequence(
        seq_id, tokens, PARAMS, max_length=prompt + new_tokens, stop_token_ids=tuple(stop), priority=priority
    )


class ShadowWorker:
    """Keeps tokens, block tables and a KV cache from the plans alone, and fails when a plan asks for the impossible.

    The cache holds (seq_id, position, token) in each slot, and before it samples, a sequence reads its whole context
    back through its block table: a block that was given to two sequences, or lost, is seen at once.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.cache: list[list[tuple[int, int, int] | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}

    def execute(
        self, plan: StepPlan, sample: Callable[[int, list[int]], int], failing: int | None = None
    ) -> StepResult:
        """`sample(seq_id, context)` gives the next token; the sequence `failing` gets an error in its place."""
        self._take_differences(plan)
        result = StepResult([])
        for seq_id, start, count in zip(plan.seq_ids, plan.starts, plan.num_tokens, strict=True):
            tokens = self.tokens[seq_id]
            end = start + count
            assert start == self.computed[seq_id]
            assert start < end <= len(tokens)
            assert end <= len(self.tables[seq_id]) * self.block_size
            for position in range(start, end):
                self._block(seq_id, position)[position % self.block_size] = (seq_id, position, tokens[position])
            self.computed[seq_id] = end
            token = -1
            if seq_id == failing:
                result.errors[seq_id] = "the stub model failed"
            elif end == len(tokens):
                token = sample(seq_id, self._context(seq_id, end))
                tokens.append(token)
            result.token_ids.append(token)
        return result

    def _take_differences(self, plan: StepPlan) -> None:
        for seq_id in plan.finished:
            del self.tokens[seq_id], self.tables[seq_id], self.computed[seq_id]  # KeyError: never heard of, or twice
        for seq_id in plan.preempted:
            self.tables[seq_id].clear()
            self.computed[seq_id] = 0
        for new in plan.new:
            assert new.seq_id not in self.tokens
            self.tokens[new.seq_id] = list(new.tokens)
            self.tables[new.seq_id] = []
            self.computed[new.seq_id] = 0
        for seq_id, blocks in plan.new_blocks.items():
            assert seq_id in plan.seq_ids
            assert blocks
            self.tables[seq_id] += blocks

    def _block(self, seq_id: int, position: int) -> list[tuple[int, int, int] | None]:
        return self.cache[self.tables[seq_id][position // self.block_size]]

    def _context(self, seq_id: int, length: int) -> list[int]:
        context = []
        for position in range(length):
            entry = self._block(seq_id, position)[position % self.block_size]
            assert entry is not None
            assert entry[:2] == (seq_id, position)
            context.append(entry[2])
        return context


def from_context(_seq_id: int, context: list[int]) -> int:
    """A stub model whose token depends on every token that it reads from the cache."""
    return zlib.crc32(repr(context).encode()) % 97 + 3  # 0, 1 and 2 are free to be stop tokens


class Engine:
    """Scheduler and shadow worker in step: `step` runs one plan and `run` all of them."""

    def __init__(self, scheduler: Scheduler, sample: Callable[[int, list[int]], int] = from_context) -> None:
        self.scheduler = scheduler
        self.sample = sample
        self.worker = ShadowWorker(scheduler.blocks.pool.num_blocks, scheduler.blocks.block_size)
        self.plans: list[StepPlan] = []
        self.finished: list[Sequence] = []

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.plans.append(plan)
        self.finished += self.scheduler.update(plan, self.worker.execute(plan, self.sample))
        return plan

    def run(self, limit: int = 1000) -> list[Sequence]:
        for _ in range(limit):
            if not self.scheduler.sequences:
                return self.finished
            self.step()
        raise AssertionError(f"not idle after {limit} steps: {self.scheduler.sequences}")
