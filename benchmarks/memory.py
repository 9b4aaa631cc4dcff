"""How much of the KV memory holds tokens: contiguous reservation of the longest context against paging.

Both are real runs of one engine over one mixed workload and the same KV memory. A block as long as the context is what
a server without paging does: each request reserves room for the longest context when it starts. Blocks of 16 tokens are
paging. A slot (room for one token) is *used* when it holds a token, *wasted* when it is reserved and holds none, and
free otherwise. Full load is every step at which some request had to wait.

    python benchmarks/memory.py [--model M] [--backend B] [--json FILE] [--png FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from octavo import LLMEngine, SamplingParams
from octavo.config import DEMO_MODEL

CONTEXT = 2048  # tokens
POOL = 4 * CONTEXT  # tokens of KV memory, the same for both


@dataclass
class Run:
    """One run over the workload; a sample a step."""

    name: str
    block_size: int
    used: list[int] = field(default_factory=list)  # slots that hold a token
    reserved: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    seconds: float = 0.0
    output_tokens: int = 0
    preemptions: int = 0

    def at_full_load(self, values: list[int]) -> float:
        loaded = [value for value, waiting in zip(values, self.waiting, strict=True) if waiting]
        return sum(loaded) / max(len(loaded), 1)

    @property
    def used_share(self) -> float:
        """Of the reserved slots, at full load."""
        return self.at_full_load(self.used) / self.at_full_load(self.reserved)


def workload(count: int) -> list[tuple[list[int], int]]:
    """Prompts of 32 to 512 tokens, outputs of 16 to 128: short questions and long documents, mixed."""
    rng = random.Random(0)
    return [
        ([rng.randrange(1000, 40000) for _ in range(rng.randint(32, 512))], rng.randint(16, 128)) for _ in range(count)
    ]


def measure(name: str, block_size: int, requests: list[tuple[list[int], int]], args: argparse.Namespace) -> Run:
    engine = LLMEngine.from_options(
        args.model, backend=args.backend, block_size=block_size, num_kv_blocks=POOL // block_size, max_model_len=CONTEXT
    )
    for i, (prompt, output) in enumerate(requests):
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    run = Run(name, block_size)
    start = time.perf_counter()
    for _ in track(requests, description=f"{name:<10}", console=Console(stderr=True)):
        finished = False
        while engine.has_unfinished_requests and not finished:
            outputs = engine.step()
            stats = engine.stats()
            run.used.append(int(stats["num_held_tokens"]))
            run.reserved.append(int(stats["num_used_blocks"]) * block_size)
            run.running.append(int(stats["num_running"]))
            run.waiting.append(int(stats["num_waiting"]))
            run.output_tokens += len(outputs)
            finished = any(output.finished for output in outputs)
    run.seconds = time.perf_counter() - start
    run.preemptions = int(engine.stats()["num_preemptions"])
    engine.close()
    return run


def report(runs: list[Run]) -> None:
    table = Table(title=f"KV memory at full load, {POOL} slots, context {CONTEXT}")
    for column in ("reservation", "used", "wasted", "requests at once", "preemptions", "output tokens/s"):
        table.add_column(column, justify="left" if column == "reservation" else "right")
    for run in runs:
        table.add_row(
            f"{run.name} ({run.block_size} tokens)",
            f"{100 * run.used_share:.1f} %",
            f"{100 * (1 - run.used_share):.1f} %",
            f"{run.at_full_load(run.running):.1f}",
            str(run.preemptions),
            f"{run.output_tokens / run.seconds:.0f}",
        )
    Console().print(table)


def draw(runs: list[Run], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(runs), figsize=(10, 3.6), sharey=True, layout="constrained")
    for axis, run in zip(axes, runs, strict=True):
        steps = range(len(run.used))
        wasted = [reserved - used for used, reserved in zip(run.used, run.reserved, strict=True)]
        free = [POOL - reserved for reserved in run.reserved]
        axis.stackplot(
            steps, run.used, wasted, free, labels=["holds a token", "reserved, empty", "free"],
            colors=["#2a7f62", "#e07a5f", "#eeeeee"],
        )  # fmt: skip
        axis.set_title(f"{run.name}: {100 * run.used_share:.0f} % used, {run.at_full_load(run.running):.0f} at once")
        axis.set_xlabel("step")
        axis.margins(0)
    axes[0].set_ylabel("KV slots (tokens)")
    axes[-1].legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--json", type=Path, help="write the samples and the machine's facts to this file")
    parser.add_argument("--png", type=Path, default=Path(__file__).parent.parent / "docs" / "images" / "kv-memory.png")
    args = parser.parse_args()
    requests = workload(args.requests)
    runs = [measure("contiguous", CONTEXT, requests, args), measure("paged", 16, requests, args)]
    report(runs)
    draw(runs, args.png)
    if args.json:
        facts = {"python": platform.python_version(), "machine": platform.machine(), "model": args.model}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"facts": facts, "runs": [asdict(run) for run in runs]}) + "\n")


if __name__ == "__main__":
    main()
