"""What the scheduler costs: schedule() + update() with stub tokens, per running sequence and step.

Nothing else runs: no model, no tokeniser. Sequences decode at their own phase of a block, so that every step allocates
for about one sequence in sixteen, and publishes a full block for as many; whoever finishes is replaced from the queue,
so that allocation, release, admission and the look into the prefix cache are in the figure. All tokens differ: nothing
is found there. Then the same under the other policies, with requests of 1,000 users; and what it costs longest-prefix
to fill one seat from 64 candidates, whose prompts of 1,024 tokens begin with 512 that are cached.

    python benchmarks/scheduler.py [--running 256] [--waiting 100000] [--blocks 1000000] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from pathlib import Path

from octavo import SamplingParams
from octavo.core import BlockManager, Scheduler, Sequence, StepResult, make_policy

BLOCK_SIZE = 16
PARAMS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


def make_scheduler(policy: str, running: int, waiting: int, blocks: int) -> tuple[Scheduler, int]:
    scheduler = Scheduler(
        BlockManager(blocks, BLOCK_SIZE),
        make_policy(policy),
        max_num_seqs=running,
        max_num_batched_tokens=max(8192, 64 * running),
    )
    for i in range(running + waiting):
        scheduler.add(make_sequence(i))
    while len(scheduler.running) < running:
        step(scheduler)
    return scheduler, running + waiting


def make_sequence(i: int) -> Sequence:
    prompt = 17 + i % BLOCK_SIZE  # every phase of a block
    length = prompt + 128 + i % 64
    return Sequence(i, [i] * prompt, PARAMS, max_length=length, stop_token_ids=(0,), cache_salt=str(i % 1000))


def step(scheduler: Scheduler) -> int:
    plan = scheduler.schedule()
    scheduler.update(plan, StepResult([1] * len(plan.seq_ids)))
    return len(plan.seq_ids)


def measure(policy: str, running: int, waiting: int, blocks: int, steps: int) -> float:
    """Microseconds per running sequence and step, without the time to add the replacements."""
    scheduler, next_id = make_scheduler(policy, running, waiting, blocks)
    gc.collect()
    spent, served = 0.0, 0
    for _ in range(steps):
        start = time.perf_counter()
        served += step(scheduler)
        spent += time.perf_counter() - start
        while len(scheduler.sequences) < running + waiting:
            scheduler.add(make_sequence(next_id))
            next_id += 1
    return spent / served * 1e6


def measure_choice(seats: int) -> list[float]:
    """Milliseconds of each `schedule` that fills one seat under longest-prefix."""
    scheduler = Scheduler(
        BlockManager(100_000, BLOCK_SIZE), make_policy("longest-prefix"), max_num_seqs=1, max_num_batched_tokens=8192
    )
    spent = []
    for i in range(64 + seats):
        scheduler.add(Sequence(i, [1] * 512 + [i + 2] * 512, PARAMS, max_length=1025))
    for _ in range(seats):
        start = time.perf_counter()
        plan = scheduler.schedule()
        spent.append((time.perf_counter() - start) * 1e3)
        scheduler.update(plan, StepResult([0]))
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=100_000)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures and the machine's facts to this file")
    args = parser.parse_args()

    cases = {"none": ("fcfs", 0), "many": ("fcfs", args.waiting)}
    cases |= {policy: (policy, args.waiting) for policy in ("priority", "fair", "longest-prefix")}
    results: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(args.repeats):  # interleaved, since machines are noisy
        for name, (policy, waiting) in cases.items():
            results[name].append(measure(policy, args.running, waiting, args.blocks, args.steps))
    medians = {name: statistics.median(values) for name, values in results.items()}
    for name, (policy, waiting) in cases.items():
        low, high = min(results[name]), max(results[name])
        load = f"{policy:>14}, {args.running} running, {waiting:>7} waiting"
        print(f"{load}: {medians[name]:.2f} us ({low:.2f} to {high:.2f})")
    print(f"ratio many / none waiting: {medians['many'] / medians['none']:.2f}")
    first, *others = measure_choice(64)
    print(f"longest-prefix, a seat and 64 prompts: {statistics.median(others):.2f} ms, the first time {first:.2f} ms")
    if args.json:
        facts = {"python": platform.python_version(), "machine": platform.machine(), **vars(args), "json": None}
        args.json.write_text(json.dumps({"facts": facts, "us_per_sequence": results}, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
