"""A scheduler that needs no model: short ways to make one, and a worker that knows only what the plans tell it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from octavo import SamplingParams
from octavo.core import BlockManager, BlockMove, Scheduler, Sequence, StepPlan, StepResult, make_policy
from octavo.core.scheduler import PreemptionMode

PARAMS = SamplingParams(temperature=0.0)


def make_scheduler(
    *,
    blocks: int = 100,
    block_size: int = 4,
    policy: str = "fcfs",
    seqs: int = 8,
    budget: int = 64,
    caching: bool = True,
    windows: tuple[int | None, ...] = (None,),
    host: int = 0,
    mode: PreemptionMode = "auto",
    depth: int = 1,
) -> Scheduler:
    return Scheduler(
        BlockManager(blocks, block_size, caching=caching, windows=windows, max_chunk=budget, num_host_blocks=host),
        make_policy(policy),
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        preemption_mode=mode,
        depth=depth,
        clock=lambda: 0.0,
    )


def make_sequence(
    seq_id: int,
    prompt: int,
    new_tokens: int = 4,
    *,
    first_token: int | None = None,
    priority: int = 0,
    stop: Iterable[int] = (),
    **fields: Any,
) -> Sequence:
    """A sequence of `prompt` known tokens, `first_token` and those that count up from it, and room for `new_tokens`.

    Where `first_token` is not given, the tokens are all different from those of other sequences.
    """
    first = 1000 * (seq_id + 1) if first_token is None else first_token
    return Sequence(
        seq_id,
        [first + i for i in range(prompt)],
        PARAMS,
        max_length=prompt + new_tokens,
        stop_token_ids=tuple(stop),
        priority=priority,
        **fields,
    )


class Slot(NamedTuple):
    """What a slot of the shadow cache holds: whose keys and values they are, by all that they depend on."""

    salt: str | None
    group: int
    tokens: int  # a hash of the token and all tokens before it


class ShadowWorker:
    """Keeps tokens, block tables, a KV cache and a host tier from the plans alone, and fails when a plan asks for the
    impossible.

    A step first stores all of its tokens, as a layer does, then each of its sequences reads all that it sees back
    through its block tables. A slot holds a hash of all tokens up to its own, so a block that was given to two
    sequences, lost, not copied in time or found for another prefix is seen at once.
    """

    def __init__(self, scheduler: Scheduler, salt_of: Callable[[int], str | None] = lambda _: None) -> None:
        blocks = scheduler.blocks
        self.block_size = blocks.block_size
        self.windows = blocks.windows
        self.salt_of = salt_of
        self.cache: list[list[Slot | None]] = [[None] * self.block_size for _ in range(blocks.pool.num_blocks)]
        self.host: list[list[Slot | None] | None] = [None] * blocks.host.num_blocks
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[list[int]]] = {}  # by group; what fell out of a window stays, and is never read
        self.computed: dict[int, int] = {}  # 0 while it has no table
        self.beams: set[int] = set()

    def execute(
        self, plan: StepPlan, sample: Callable[[int, list[int]], int], failing: int | None = None
    ) -> StepResult:
        """`sample(seq_id, context)` gives the next token; the sequence `failing` gets an error in its place."""
        self.take_differences(plan)
        self._store(plan)
        result = StepResult([])
        for seq_id, start, count in zip(plan.seq_ids, plan.starts, plan.num_tokens, strict=True):
            tokens, end = self.tokens[seq_id], start + count
            self._read(seq_id, start, end)
            self.computed[seq_id] = end
            token = -1
            if seq_id == failing:
                result.errors[seq_id] = "the stub model failed"
            elif end == len(tokens):
                token = sample(seq_id, tokens[:end])
                if seq_id not in self.beams:
                    tokens.append(token)
            result.token_ids.append(token)
        return result

    def take_differences(self, plan: StepPlan) -> None:
        for seq_id in plan.finished:
            del self.tokens[seq_id], self.tables[seq_id], self.computed[seq_id]  # KeyError: never heard of, or twice
        for seq_id in plan.preempted:
            self.tables[seq_id] = [[] for _ in self.windows]
            self.computed[seq_id] = 0
        for new in plan.new:
            assert new.seq_id not in self.tokens
            self.tokens[new.seq_id] = list(new.tokens)
            self.tables[new.seq_id] = [[] for _ in self.windows]
            self.computed[new.seq_id] = 0
            if new.is_beam:
                self.beams.add(new.seq_id)
        for move in plan.moves:
            self._move(move)
        for seq_id, blocks in plan.tails.items():
            index = plan.starts[plan.seq_ids.index(seq_id)] // self.block_size
            for table, block in zip(self.tables[seq_id], blocks, strict=True):
                if table:
                    assert BlockMove("copy", table[index], block) in plan.moves
                    table[index] = block
        for seq_id, appended in plan.new_blocks.items():
            assert seq_id in plan.seq_ids
            assert len({len(blocks) for blocks in appended}) == 1
            assert appended[0]
            for table, blocks in zip(self.tables[seq_id], appended, strict=True):
                table += blocks

    def _move(self, move: BlockMove) -> None:
        match move.kind:
            case "copy":
                self.cache[move.destination] = list(self.cache[move.source])
            case "swap_out":
                self.host[move.destination] = list(self.cache[move.source])
            case "swap_in":
                swapped = self.host[move.source]
                assert swapped is not None
                self.cache[move.destination] = list(swapped)

    def _store(self, plan: StepPlan) -> None:
        writers: dict[int, int] = {}  # by block
        previous = None
        for seq_id, start, count in zip(plan.seq_ids, plan.starts, plan.num_tokens, strict=True):
            tokens, end = self.tokens[seq_id], start + count
            assert self.computed[seq_id] in (start, 0)  # 0: it may begin with blocks that others have computed
            assert start < end <= len(tokens) or (count == 0 and end == len(tokens) == previous)
            for group, table in enumerate(self.tables[seq_id]):
                assert end <= len(table) * self.block_size
                for position in range(start, end):
                    block, slot = table[position // self.block_size], position % self.block_size
                    assert writers.setdefault(block, seq_id) == seq_id
                    self.cache[block][slot] = self._slot(seq_id, group, position)
            previous = end  # of the one that a fork without a token of its own samples with
        for seq_id, start, count in zip(plan.seq_ids, plan.starts, plan.num_tokens, strict=True):
            if self.computed[seq_id] > 0 or start == 0:
                continue  # only who begins in this very step may read what others write in it
            for table in self.tables[seq_id]:
                for index, block in enumerate(table):
                    if writers.get(block, seq_id) != seq_id:  # and it will write behind it
                        assert start >= (index + 1) * self.block_size or count == 0
        self._check_others(plan, writers)

    def _check_others(self, plan: StepPlan, writers: dict[int, int]) -> None:
        """Nobody else's block is written to, as far as it still looks at it."""
        starts = dict(zip(plan.seq_ids, plan.starts, strict=True))
        for seq_id, tables in self.tables.items():
            if self.computed[seq_id] == 0:
                continue
            position = starts.get(seq_id, self.computed[seq_id])
            for window, table in zip(self.windows, tables, strict=True):
                for block in table[self._first_seen(position, window) // self.block_size :]:
                    assert writers.get(block, seq_id) == seq_id

    def _first_seen(self, position: int, window: int | None) -> int:
        return 0 if window is None else max(position - window + 1, 0)

    def _read(self, seq_id: int, start: int, end: int) -> None:
        for group, (table, window) in enumerate(zip(self.tables[seq_id], self.windows, strict=True)):
            for position in range(self._first_seen(min(start, end - 1), window), end):
                found = self.cache[table[position // self.block_size]][position % self.block_size]
                assert found == self._slot(seq_id, group, position)

    def _slot(self, seq_id: int, group: int, position: int) -> Slot:
        return Slot(self.salt_of(seq_id), group, hash(tuple(self.tokens[seq_id][: position + 1])))


def from_context(_seq_id: int, context: list[int]) -> int:
    """A stub model whose token depends on every token that it reads from the cache."""
    return zlib.crc32(repr(context).encode()) % 97 + 3  # 0, 1 and 2 are free to be stop tokens


class Engine:
    """Scheduler and shadow worker in step: `step` runs one plan and `run` all of them."""

    def __init__(self, scheduler: Scheduler, sample: Callable[[int, list[int]], int] = from_context) -> None:
        self.scheduler = scheduler
        self.sample = sample
        self.worker = ShadowWorker(scheduler, self._salt)
        self.plans: list[StepPlan] = []
        self.finished: list[Sequence] = []
        self._salts: dict[int, str | None] = {}

    def step(self) -> StepPlan:
        plan = self.schedule()
        self.plans.append(plan)
        self.finished += self.scheduler.update(plan, self.worker.execute(plan, self.sample))
        return plan

    def run(self, limit: int = 1000) -> list[Sequence]:
        for _ in range(limit):
            if not self.scheduler.sequences:
                return self.finished
            self.step()
        raise AssertionError(f"not idle after {limit} steps: {self.scheduler.sequences}")

    def schedule(self) -> StepPlan:
        self._salts |= {s.seq_id: s.cache_salt for s in self.scheduler.sequences.values()}
        return self.scheduler.schedule()

    def _salt(self, seq_id: int) -> str | None:
        return self._salts[seq_id]
