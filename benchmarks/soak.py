"""A long life of the scheduler, without a model: many requests, a pool that is too small, and memory that stays flat.

Requests come in waves with common prefixes, several choices and salts; some are aborted, some steps fail. The worker is
a stub. At the end no block is lost, and the process holds no more memory than when the pool was first full.

    python benchmarks/soak.py [--requests 100000] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from octavo import SamplingParams
from octavo.core import BlockManager, Scheduler, SchedulerStats, Sequence, StepResult, make_policy

BLOCK_SIZE = 16
NUM_BLOCKS = 512
PARAMS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


@dataclass
class Soak:
    """What came of it."""

    requests: int
    seconds: float = 0.0
    memory: list[int] = field(default_factory=list)  # Python's allocated blocks at ten moments
    finished: int = 0
    aborted: int = 0
    failed_steps: int = 0
    stats: dict[str, float] = field(default_factory=dict)


def soak(num_requests: int, *, seed: int = 0) -> Soak:
    """Runs that many requests to their ends.

    Raises:
        AssertionError: a block is lost, or a request.
    """
    rng = random.Random(seed)
    result = Soak(num_requests)
    scheduler = Scheduler(
        BlockManager(NUM_BLOCKS, BLOCK_SIZE), make_policy("priority"), max_num_seqs=32, max_num_batched_tokens=512
    )
    systems = [[rng.randrange(1 << 15) for _ in range(rng.randrange(16, 200))] for _ in range(20)]
    added, next_id, start = 0, 0, time.perf_counter()
    while added < num_requests or scheduler.sequences:
        while added < num_requests and len(scheduler.waiting) < 40:
            next_id += add_request(scheduler, rng, systems, next_id)
            added += 1
            if added % (num_requests // 10) == 0:
                gc.collect()
                result.memory.append(sys.getallocatedblocks())
        if rng.random() < 0.05:
            victim = rng.choice(list(scheduler.sequences))
            result.aborted += scheduler.abort(victim) is not None
        step(scheduler, rng, result)
    result.seconds = time.perf_counter() - start
    stats = scheduler.stats()
    check(stats, scheduler)
    assert result.finished + result.aborted == next_id
    result.stats = stats._asdict()
    return result


def add_request(scheduler: Scheduler, rng: random.Random, systems: list[list[int]], next_id: int) -> int:
    """Adds one request; returns how many sequences it has."""
    prompt = rng.choice(systems) + [rng.randrange(1 << 15) for _ in range(rng.randrange(1, 40))]
    choices = rng.choice((1, 1, 1, 1, 4))
    length = len(prompt) + rng.randrange(1, 40)
    priority, salt = rng.choice((0, 0, 0, -1)), rng.choice((None, None, None, "a"))
    for choice in range(choices):
        scheduler.add(
            Sequence(
                next_id + choice, list(prompt), PARAMS, max_length=length, stop_token_ids=(0,), priority=priority,
                cache_salt=salt, group=next_id, choice=choice,
            )
        )  # fmt: skip
    return choices


def step(scheduler: Scheduler, rng: random.Random, result: Soak) -> None:
    plan = scheduler.schedule()
    if not plan:
        return
    if rng.random() < 0.005:
        scheduler.fail(plan)
        result.failed_steps += 1
        return
    tokens = []
    for seq_id in plan.seq_ids:
        sequence = scheduler.sequences[seq_id]
        tokens.append(rng.randrange(50) if sequence.num_computed == len(sequence.tokens) else -1)
    result.finished += len(scheduler.update(plan, StepResult(tokens)))


def check(stats: SchedulerStats, scheduler: Scheduler) -> None:
    assert stats.num_used_blocks == stats.num_held_tokens == stats.num_shared_blocks == 0
    assert stats.num_free_blocks + stats.num_cached_blocks == NUM_BLOCKS
    assert stats.num_running == stats.num_waiting == 0
    states = scheduler.kv_snapshot().states
    assert (states.count("free"), states.count("cached")) == (stats.num_free_blocks, stats.num_cached_blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--json", type=Path, help="write the figures and the machine's facts to this file")
    args = parser.parse_args()
    result = soak(args.requests)
    stats = result.stats
    first, last = result.memory[0], result.memory[-1]
    print(f"{result.requests} requests, {result.finished + result.aborted} sequences in {result.seconds:.0f} s")
    print(
        f"{stats['num_steps']} steps ({result.failed_steps} more failed), {stats['num_tokens']} tokens computed, "
        f"{stats['prefix_cache_hits']} of {stats['prefix_cache_queries']} found in the prefix cache"
    )
    print(
        f"{stats['num_preemptions']} preemptions: {stats['num_preempted_tokens']} tokens given up, "
        f"{stats['num_restored_tokens']} found again; {stats['num_forks']} forks, "
        f"{stats['num_block_copies']} blocks copied"
    )
    print(f"Python's allocated blocks after a tenth: {first}, at the end: {last}")
    if args.json:
        facts = {"python": platform.python_version(), "machine": platform.machine()}
        args.json.write_text(json.dumps({"facts": facts, "soak": asdict(result)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
