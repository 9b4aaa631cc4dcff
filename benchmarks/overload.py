"""Far more requests than the KV pool holds: what preemption costs, by recompute, by swap, and by the cheaper of both.

All requests arrive at once, and the pool holds a quarter of the blocks that they take together at their full length.
The modes run in turn, several times; `roomy` has a pool for all of them, and shows what overload costs at all. Every
run has to give the same tokens.

    python benchmarks/overload.py [--model M] [--requests 200] [--runs 3] [--swap-directory DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from octavo import LLMEngine, SamplingParams
from octavo.config import DEMO_MODEL

BLOCK_SIZE = 16
COUNTERS = (
    "num_tokens", "num_preemptions", "num_preemptions_swap", "num_preempted_tokens", "num_restored_tokens",
    "num_swapped_out_blocks", "num_swapped_in_blocks",
)  # fmt: skip


@dataclass
class Run:
    mode: str
    seconds: float
    output_tokens: int
    counters: dict[str, float]

    @property
    def rate(self) -> float:
        return self.output_tokens / self.seconds


def workload(count: int) -> list[tuple[list[int], int]]:
    """Short prompts, long outputs: what is admitted grows, and so has to be preempted."""
    rng = random.Random(0)
    return [
        ([rng.randrange(1000, 40000) for _ in range(rng.randint(16, 64))], rng.randint(96, 160)) for _ in range(count)
    ]


def measure(mode: str, options: dict[str, Any], args: argparse.Namespace) -> tuple[Run, dict[str, list[int]]]:
    """One run, and each request's tokens."""
    engine = LLMEngine.from_options(args.model, max_num_seqs=args.requests, max_model_len=512, **options)
    for i, (prompt, output) in enumerate(workload(args.requests)):
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    tokens: dict[str, list[int]] = {}
    start = time.perf_counter()
    for done in track(range(1, args.requests + 1), description=f"{mode:<10}", console=Console(stderr=True)):
        while len(tokens) < done:  # several may finish in one step
            tokens |= {output.request_id: output.outputs[0].token_ids for output in engine.step() if output.finished}
    seconds = time.perf_counter() - start
    stats = engine.stats()
    engine.close()
    run = Run(mode, seconds, sum(map(len, tokens.values())), {name: stats[name] for name in COUNTERS})
    return run, tokens


def report(runs: list[Run], modes: dict[str, dict[str, Any]], num_blocks: int) -> None:
    table = Table(title=f"Overload: a pool of {num_blocks} blocks, a quarter of the working set")
    names = ("mode", "tokens/s", "of roomy", "preempted", "by swap", "computed", "blocks out", "in")
    for name in names:
        table.add_column(name, justify="left" if name == "mode" else "right")
    rates = {mode: [run.rate for run in runs if run.mode == mode] for mode in modes}
    for mode in modes:
        counters = next(run.counters for run in runs if run.mode == mode)
        table.add_row(
            mode,
            f"{statistics.median(rates[mode]):.0f} ({min(rates[mode]):.0f} to {max(rates[mode]):.0f})",
            f"{100 * statistics.median(rates[mode]) / statistics.median(rates['roomy']):.0f} %",
            *(f"{counters[name]:.0f}" for name in COUNTERS[1:3]),
            f"{counters['num_tokens']:.0f}",
            *(f"{counters[name]:.0f}" for name in COUNTERS[5:]),
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--swap-directory", help="keep the host tier in a file there, not in RAM")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    requests = workload(args.requests)
    working_set = sum(-(-(len(prompt) + output - 1) // BLOCK_SIZE) for prompt, output in requests)
    tight = {"num_kv_blocks": working_set // 4}
    swap = {"swap_space_bytes": 2 << 30, "swap_directory": args.swap_directory}
    modes: dict[str, dict[str, Any]] = {
        "roomy": {"num_kv_blocks": working_set},
        "recompute": tight,
        "swap": {**tight, **swap, "preemption_mode": "swap"},
        "auto": {**tight, **swap},
    }
    runs: list[Run] = []
    expected: dict[str, list[int]] | None = None
    for _ in range(args.runs):
        for mode, options in modes.items():
            run, tokens = measure(mode, options, args)
            runs.append(run)
            expected = expected or tokens
            if tokens != expected:
                raise SystemExit(f"{mode} gave other tokens than {runs[0].mode}")
    report(runs, modes, working_set // 4)
    if args.json:
        facts = {"machine": platform.processor() or platform.machine(), "model": args.model, "blocks": working_set // 4}
        args.json.write_text(json.dumps({**facts, "runs": [asdict(run) for run in runs]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
