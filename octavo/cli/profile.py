"""`octavo profile`: where the time of a step goes, and how near that is to what this machine can do."""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from octavo.cli.fetch import fetch
from octavo.cli.options import add_engine_flags, engine_from
from octavo.cli.terminal import show_styled
from octavo.cli.workload import greedy, positive, random_prompt, run_to_end, write_json
from octavo.config import DEMO_MODEL
from octavo.engine import LLMEngine
from octavo.errors import ConfigError
from octavo.llm import load_engine
from octavo.metrics import OpProfile, Profiler, Roofline, merge

PROMPTS = 3  # to prefill, after one to warm up
EPILOG = """\
ms        from the end of the op before to the end of this one on the slowest thread
GB/s      weights, keys and values counted once a step, activations where they are read and written
roof      share of the roofline, min(peak FLOP/s, FLOP per byte x bandwidth of reading the weights); more than 100 %
          where activations come from a cache
outside   scheduling, arrays, waking the threads, detokenisation: the engine's time less that of the ops
The roofline is measured in the same run, on the engine's own threads:
  read               a plain streaming read: over 512 MiB, and over the model's packed weights
  matrix x vector    products of one row with each of the model's weights in turn, without barriers: what decoding one
                     sequence could reach
  peak               products of many rows, their operands in the nearest caches"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "profile",
        help="show where the time goes",
        description="Times each op of a prefill step and of decode steps, in the engine's own loop, and compares it "
        "with what this machine can do.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", default=DEMO_MODEL, metavar="M", help=f"(default: {DEMO_MODEL})")
    parser.add_argument(
        "--prefill",
        type=positive,
        default=512,
        metavar="INT",
        help="tokens of the prompt that is prefilled (default: 512)",
    )
    parser.add_argument(
        "--batch", type=positive, default=1, metavar="INT", help="sequences in a decode step (default: 1)"
    )
    parser.add_argument(
        "--context", type=positive, default=512, metavar="INT", help="tokens that each of them holds (default: 512)"
    )
    parser.add_argument("--steps", type=positive, default=32, metavar="INT", help="decode steps to time (default: 32)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything as JSON; seconds, bytes, FLOPs")
    parser.add_argument("--png", type=Path, metavar="FILE", help="a roofline plot; needs octavo[plot]")
    add_engine_flags(parser)
    return parser


@dataclass(frozen=True, slots=True)
class Phase:
    """Some steps of one kind, as they were timed."""

    name: str
    what: str
    steps: int
    seconds: float  # of the engine's steps
    ops: list[OpProfile]  # merged

    @property
    def seconds_outside(self) -> float:
        return self.seconds - sum(op.seconds for op in self.ops)


def run(args: argparse.Namespace) -> int:
    config = engine_from(args)
    if args.png is not None:
        from octavo.cli.roofline_plot import require_matplotlib

        require_matplotlib()  # before minutes of work, not after
    engine = load_engine(replace(config, model=str(fetch(config.model))))
    show_styled(f"{engine.boot_report}\n", "dim", sys.stderr)
    try:
        profiler = engine.profiler()
        rng = random.Random(args.seed)
        _check_room(engine, args)
        phases = [_prefill(engine, profiler, args, rng), _decode(engine, profiler, args, rng)]
        roofline = profiler.measure_roofline()
    finally:
        engine.close()
    _print(phases, roofline)
    if args.json is not None:
        write_json(args.json, _record(engine, args, phases, roofline))
    if args.png is not None:
        from octavo.cli.roofline_plot import plot

        title = f"{engine.boot_report.model} on {engine.boot_report.backend}"
        plot(args.png, title, {phase.name: phase.ops for phase in phases}, roofline)
    return 0


def _check_room(engine: LLMEngine, args: argparse.Namespace) -> None:
    """All sequences of a decode step must run at once, none preempted."""
    memory = engine.boot_report.memory
    prefill_steps = -(-args.batch * args.context // engine.config.max_num_batched_tokens)
    longest = args.context + prefill_steps + 1 + args.steps
    blocks = -(-longest // memory.block_size)
    if longest > memory.max_model_len:
        raise ConfigError(
            f"--context {args.context} and --steps {args.steps} need {longest} tokens and the context holds "
            f"{memory.max_model_len}; lower one of them"
        )
    if args.batch > engine.config.max_num_seqs:
        raise ConfigError(
            f"--batch {args.batch}: max_num_seqs is {engine.config.max_num_seqs}; raise it, or lower --batch"
        )
    if args.batch * blocks > memory.num_blocks:
        raise ConfigError(
            f"--batch {args.batch} x --context {args.context} needs {args.batch * blocks} KV blocks and the pool has "
            f"{memory.num_blocks}; lower one of them, or give a larger pool"
        )


def _prefill(engine: LLMEngine, profiler: Profiler, args: argparse.Namespace, rng: random.Random) -> Phase:
    """Prompts one after another, each as many steps as its tokens need; a first one warms up."""
    seconds, steps = 0.0, 0

    def count_step(outputs: object) -> None:
        nonlocal steps
        steps += 1

    for i in range(1 + PROMPTS):
        if i == 1:
            profiler.start()
            seconds, steps = 0.0, 0
        engine.add_request("prefill", random_prompt(engine, args.prefill, rng), greedy(1))
        seconds += run_to_end(engine, count_step)
    return Phase("prefill", f"one prompt of {args.prefill} tokens", steps, seconds, merge(profiler.stop()))


def _decode(engine: LLMEngine, profiler: Profiler, args: argparse.Namespace, rng: random.Random) -> Phase:
    """Steps in which each sequence adds a token, once all have their first (some then have a few more than others)."""
    room = engine.boot_report.memory.max_model_len - args.context
    ids = [f"decode-{i}" for i in range(args.batch)]
    for request_id in ids:
        engine.add_request(request_id, random_prompt(engine, args.context, rng), greedy(room))
    waiting = set(ids)
    for warm_up in count():
        waiting -= {output.request_id for output in engine.step() if output.outputs[0].token_ids}
        if not waiting and warm_up > 0:
            break
    profiler.start()
    start = time.perf_counter()
    for _ in range(args.steps):
        engine.step()
    seconds = time.perf_counter() - start
    ops = merge(profiler.stop())
    for request_id in ids:
        engine.abort(request_id)
    what = f"{args.batch} sequence{'s' if args.batch > 1 else ''} of {args.context} tokens"
    return Phase("decode", what, args.steps, seconds, ops)


def _print(phases: list[Phase], roofline: Roofline) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    for phase in phases:
        per_step = 1e3 / phase.steps
        table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), title_justify="left", title_style="bold")
        table.title = f"{phase.name}: {phase.what}, {phase.seconds * per_step:.3f} ms a step ({phase.steps} steps)"
        for name in ("op", "shape"):
            table.add_column(name)
        for name in ("runs", "ms", "share", "GB/s", "GFLOP/s", "roof"):
            table.add_column(name, justify="right")
        for op in phase.ops:
            table.add_row(
                op.kind,
                op.shape,
                f"{op.runs / phase.steps:g}",
                f"{op.seconds * per_step:.3f}",
                f"{op.seconds / phase.seconds:.1%}",
                *_rates(op, roofline),
            )
        outside = phase.seconds_outside
        table.add_row("outside the kernels", "", "", f"{outside * per_step:.3f}", f"{outside / phase.seconds:.1%}")
        console.print(table)
        console.print()
    size = roofline.weights_size / 1e6
    console.print(
        f"roofline: read {_giga(roofline.memory_bytes)} GB/s over 512 MiB, {_giga(roofline.weights_bytes)} GB/s over "
        f"the weights ({size:.0f} MB); matrix x vector {_giga(roofline.product_bytes)} GB/s; "
        f"peak {_giga(roofline.product_flops)} GFLOP/s"
    )


def _rates(op: OpProfile, roofline: Roofline) -> tuple[str, str, str]:
    if op.seconds <= 0:
        return "", "", ""
    flops = _giga(op.flops / op.seconds) if op.flops else ""
    return _giga(op.bytes / op.seconds), flops, f"{roofline.share(op):.0%}"


def _giga(value: float) -> str:
    return f"{value / 1e9:.1f}"


def _record(engine: LLMEngine, args: argparse.Namespace, phases: list[Phase], roofline: Roofline) -> dict[str, Any]:
    return {
        "model": engine.boot_report.model,
        "backend": engine.boot_report.backend,
        "prefill": args.prefill,
        "batch": args.batch,
        "context": args.context,
        "roofline": asdict(roofline),
        "phases": [
            {
                "name": phase.name,
                "steps": phase.steps,
                "seconds": phase.seconds,
                "seconds_outside_kernels": phase.seconds_outside,
                "ops": [{**asdict(op), "roofline_share": roofline.share(op)} for op in phase.ops],
            }
            for phase in phases
        ],
    }
