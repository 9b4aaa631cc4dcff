"""A long life of the scheduler, without a model: many requests, a pool that is too small, and memory that stays flat.

Requests come in waves with common prefixes, several choices or beams, and salts; some are aborted, some fail, and so do
some steps. Two of three groups of layers look back over a window only, and what is pushed out of the pool goes to a
host tier that is too small as well. The worker is a stub. At the end no block is lost, neither of the pool nor of the
host tier, and the process holds no more memory than when both were first full.

    python benchmarks/soak.py [--requests 100000] [--policy fair] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import platform
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from octavo import BeamSearchParams, SamplingParams
from octavo.core import BlockManager, Scheduler, Sequence, StepPlan, StepResult, make_policy
from octavo.engine.beams import BeamSearches
from octavo.engine.messages import BeamRequest
from octavo.outputs import TokenLogprobs

POLICIES = ("fcfs", "priority", "fair", "longest-prefix")
BLOCK_SIZE = 16
NUM_BLOCKS = 700
NUM_HOST_BLOCKS = 400
WINDOWS = (None, 40, 40)
MAX_SEQS = 32
BUDGET = 512  # tokens a step
QUEUE = 40  # so many sequences wait at all times
VOCABULARY = 1 << 15
PARAMS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


@dataclass
class Soak:
    """What came of it."""

    policy: str
    requests: int
    seconds: float = 0.0
    memory: list[int] = field(default_factory=list)  # Python's allocated blocks at ten moments
    finished: int = 0  # sequences, a beam search being one
    aborted: int = 0
    failed: int = 0  # of those that finished
    failed_steps: int = 0
    searches: int = 0
    stats: dict[str, float] = field(default_factory=dict)


def soak(num_requests: int, *, policy: str = "priority", seed: int = 0) -> Soak:
    """Runs that many requests to their ends.

    Raises:
        AssertionError: a block is lost, or a request.
    """
    life = Life(policy, seed)
    result = life.result
    start = time.perf_counter()
    while result.requests < num_requests or life.scheduler.sequences:
        while result.requests < num_requests and life.scheduler.stats().num_waiting < QUEUE:
            life.add_request()
            result.requests += 1
            if result.requests % (num_requests // 10) == 0:
                gc.collect()
                result.memory.append(sys.getallocatedblocks())
        if life.rng.random() < 0.05:
            life.abort_one()
        life.step()
    result.seconds = time.perf_counter() - start
    life.check()
    result.stats = life.scheduler.stats()._asdict()
    return result


class Life:
    """A scheduler and its searches, and a stub in the place of a worker."""

    def __init__(self, policy: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.result = Soak(policy, 0)
        self.now = 0.0
        blocks = BlockManager(
            NUM_BLOCKS, BLOCK_SIZE, windows=WINDOWS, max_chunk=BUDGET, num_host_blocks=NUM_HOST_BLOCKS
        )
        self.scheduler = Scheduler(
            blocks,
            make_policy(policy),
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=BUDGET,
            clock=lambda: self.now,
        )
        self.searches = BeamSearches(self.scheduler)
        self.systems = [self.tokens(self.rng.randrange(16, 200)) for _ in range(20)]
        self.added = 0  # sequences, a beam search being one
        self.next_id = 0
        self.open_searches: dict[int, BeamRequest] = {}

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]

    def add_request(self) -> None:
        rng = self.rng
        prompt = rng.choice(self.systems) + self.tokens(rng.randrange(1, 40))
        length = len(prompt) + rng.randrange(1, 40)
        priority = rng.choice((0, 0, 0, -1))
        salt = rng.choice((None, None, None, None, "a", "b", f"only {self.next_id}"))
        if rng.random() < 0.1:
            self.add_search(prompt, length, priority, salt)
            return
        choices = rng.choice((1, 1, 1, 1, 4))
        for choice in range(choices):
            self.scheduler.add(
                Sequence(
                    self.next_id + choice, list(prompt), PARAMS, max_length=length, stop_token_ids=(0,),
                    priority=priority, cache_salt=salt, group=self.next_id, choice=choice,
                )
            )  # fmt: skip
        self.next_id += choices
        self.added += choices

    def add_search(self, prompt: list[int], length: int, priority: int, salt: str | None) -> None:
        params = BeamSearchParams(beam_width=self.rng.randrange(1, 5), max_tokens=length - len(prompt))
        request = BeamRequest(self.next_id, prompt, params, length, frozenset((0,)), priority, self.now, salt)
        self.searches.add(request)
        self.open_searches[self.next_id] = request
        self.next_id += request.num_seq_ids
        self.added += 1
        self.result.searches += 1

    def abort_one(self) -> None:
        victim = self.rng.choice(list(self.scheduler.sequences))
        if victim not in self.searches:
            assert self.scheduler.abort(victim) is not None
        else:
            (victim,) = (i for i in self.open_searches if victim in (self.searches.live_seq_ids(i) or ()))
            assert self.searches.abort(victim, "abort") is not None
            del self.open_searches[victim]
        self.result.aborted += 1

    def step(self) -> None:
        plan = self.scheduler.schedule()
        if not plan:
            return
        self.now += 0.01 + 0.0001 * sum(plan.num_tokens)
        if self.rng.random() < 0.005:
            self.scheduler.fail(plan)
            self.result.failed_steps += 1
            return
        result = self.work(plan)
        finished = self.scheduler.update(plan, result)
        ended = self.searches.take(result)
        for output in ended:
            del self.open_searches[output.seq_id]
        self.result.finished += sum(not sequence.is_beam for sequence in finished) + len(ended)
        self.result.failed += len(result.errors)

    def work(self, plan: StepPlan) -> StepResult:
        """As if a model had sampled: any token, and for beams any candidates."""
        rng = self.rng
        per_move = 0.0001 if self.now % 100 < 50 else 0.01  # so that now swap pays, now recompute
        result = StepResult([], move_seconds=per_move * len(plan.moves))
        self.now += result.move_seconds
        for seq_id in plan.seq_ids:
            sequence = self.scheduler.sequences[seq_id]
            samples = sequence.num_computed == len(sequence.tokens)
            token = rng.randrange(50) if samples else -1
            if rng.random() < 0.0005:
                token, result.errors[seq_id] = -1, "the stub model failed"
            elif samples and sequence.is_beam:
                best = rng.sample(range(50), sequence.params.logprobs or 0)
                chances = sorted((-rng.random() for _ in best), reverse=True)
                result.logprobs[seq_id] = TokenLogprobs(token, chances[0], 1, best, chances)
            result.token_ids.append(token)
        return result

    def check(self) -> None:
        """Nothing is lost: every sequence has ended, and every block of the pool and of the host tier can be had."""
        scheduler, result = self.scheduler, self.result
        stats, pool, host = scheduler.stats(), scheduler.blocks.pool, scheduler.blocks.host
        assert result.finished + result.aborted == self.added
        assert not self.open_searches
        assert stats.num_running == stats.num_waiting == 0
        assert stats.num_used_blocks == stats.num_held_tokens == stats.num_shared_blocks == 0
        assert stats.num_free_blocks + stats.num_cached_blocks == NUM_BLOCKS
        states = scheduler.kv_snapshot().states
        assert (states.count("free"), states.count("cached")) == (stats.num_free_blocks, stats.num_cached_blocks)
        assert 0 < stats.num_used_host_blocks <= NUM_HOST_BLOCKS
        slots = {host.put(f"new {i}".encode()) for i in range(NUM_HOST_BLOCKS)}
        assert slots == set(range(NUM_HOST_BLOCKS))
        assert {pool.allocate() for _ in range(NUM_BLOCKS)} == set(range(NUM_BLOCKS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--policy", choices=POLICIES, help="one of the four; all in turn without it")
    parser.add_argument("--json", type=Path, help="write the figures and the machine's facts to this file")
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # of the searches that fail
    results = [soak(args.requests, policy=policy) for policy in ([args.policy] if args.policy else POLICIES)]
    for result in results:
        report(result)
    if args.json:
        facts = {"python": platform.python_version(), "machine": platform.machine()}
        args.json.write_text(json.dumps({"facts": facts, "soaks": [asdict(one) for one in results]}, indent=1) + "\n")


def report(result: Soak) -> None:
    stats = result.stats
    print(
        f"{result.policy}: {result.requests} requests, {result.searches} of them beam searches, in "
        f"{result.seconds:.0f} s; {result.aborted} aborted, {result.failed} failed"
    )
    print(
        f"  {stats['num_steps']} steps ({result.failed_steps} more failed), {stats['num_tokens']} tokens computed, "
        f"{stats['prefix_cache_hits']} of {stats['prefix_cache_queries']} found in the prefix cache"
    )
    print(
        f"  {stats['num_preemptions']} preemptions, {stats['num_preemptions_swap']} of them swaps: "
        f"{stats['num_preempted_tokens']} tokens given up, {stats['num_restored_tokens']} found again"
    )
    print(
        f"  {stats['num_forks']} forks, {stats['num_block_copies']} blocks copied, {stats['num_swapped_out_blocks']} "
        f"swapped out, {stats['num_swapped_in_blocks']} swapped in"
    )
    print(f"  Python's allocated blocks after a tenth: {result.memory[0]}, at the end: {result.memory[-1]}")


if __name__ == "__main__":
    main()
