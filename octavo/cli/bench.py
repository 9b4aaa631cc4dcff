"""`octavo bench`: how fast a model is served here, on random tokens, in this process."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from octavo.cli.fetch import fetch
from octavo.cli.options import add_engine_flags, engine_from
from octavo.cli.terminal import show_styled
from octavo.cli.workload import greedy, length_range, positive, random_prompt, run_to_end, write_json
from octavo.config import DEMO_MODEL
from octavo.engine import LLMEngine
from octavo.errors import ConfigError
from octavo.llm import load_engine
from octavo.metrics import Profiler
from octavo.outputs import RequestOutput


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "bench",
        help="measure how fast a model is served",
        description="Measures how fast a model is served in this process: random tokens in, greedy tokens out, exactly "
        "as many as asked for.",
    )
    kinds = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    throughput = kinds.add_parser(
        "throughput",
        help="many requests at once",
        description="All requests are there from the start. Lengths are drawn evenly from MIN to MAX; --seed draws "
        "them and the tokens.",
    )
    throughput.add_argument("model", nargs="?", default=DEMO_MODEL, metavar="M", help=f"(default: {DEMO_MODEL})")
    throughput.add_argument("--num-prompts", type=positive, default=128, metavar="INT", help="(default: 128)")
    for flag, default in (("--input-len", "64:256"), ("--output-len", "32:128")):
        throughput.add_argument(
            flag, type=length_range, default=default, metavar="MIN:MAX", help=f"tokens a request (default: {default})"
        )
    throughput.set_defaults(benchmark=_throughput)
    latency = kinds.add_parser(
        "latency",
        help="a few requests, token by token",
        description="A batch of requests at a time: how long until the first token (TTFT), between one token and the "
        "next (ITL), and per token after the first over a request (TPOT).",
    )
    latency.add_argument("model", nargs="?", default=DEMO_MODEL, metavar="M", help=f"(default: {DEMO_MODEL})")
    latency.add_argument("--input-len", type=positive, default=128, metavar="INT", help="tokens (default: 128)")
    latency.add_argument("--output-len", type=positive, default=256, metavar="INT", help="tokens (default: 256)")
    latency.add_argument("--batch-size", type=positive, default=1, metavar="INT", help="requests (default: 1)")
    latency.add_argument("--runs", type=positive, default=3, metavar="INT", help="after one to warm up (default: 3)")
    latency.set_defaults(benchmark=_latency)
    for kind in (throughput, latency):
        kind.add_argument("--json", type=Path, metavar="FILE", help="the figures as JSON, in seconds")
        add_engine_flags(kind)
    return parser


def run(args: argparse.Namespace) -> int:
    config = engine_from(args)
    engine = load_engine(replace(config, model=str(fetch(config.model))))
    show_styled(f"{engine.boot_report}\n", "dim", sys.stderr)
    try:
        figures: dict[str, Any] = args.benchmark(engine, args)
    finally:
        engine.close()
    if args.json is not None:
        write_json(args.json, {"model": engine.boot_report.model, "backend": engine.boot_report.backend, **figures})
    return 0


def _throughput(engine: LLMEngine, args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(args.seed)
    prompts = [random_prompt(engine, rng.randint(*args.input_len), rng) for _ in range(args.num_prompts)]
    lengths = [rng.randint(*args.output_len) for _ in prompts]
    _warm_up(engine, rng)
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        engine.add_request(str(i), prompt, greedy(length))
    profiler = _profiler(engine)
    if profiler is not None:
        profiler.start()
    seconds = run_to_end(engine)
    kernels = None if profiler is None else sum(op.seconds for op in profiler.stop())
    num_input, num_output = sum(len(prompt["prompt_token_ids"]) for prompt in prompts), sum(lengths)
    figures = {
        "num_prompts": len(prompts),
        "input_tokens": num_input,
        "output_tokens": num_output,
        "seconds": seconds,
        "requests_per_second": len(prompts) / seconds,
        "output_tokens_per_second": num_output / seconds,
        "total_tokens_per_second": (num_input + num_output) / seconds,
        "share_outside_kernels": None if kernels is None else 1 - kernels / seconds,
    }
    print(
        f"{len(prompts)} requests, {num_input} tokens in and {num_output} out, in {seconds:.2f} s\n"
        f"{figures['requests_per_second']:.2f} requests/s, {figures['output_tokens_per_second']:.1f} output tokens/s, "
        f"{figures['total_tokens_per_second']:.1f} tokens/s in all"
    )
    if kernels is not None:
        print(f"{figures['share_outside_kernels']:.1%} of the time outside the kernels")
    return figures


def _latency(engine: LLMEngine, args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(args.seed)
    runs = [_latency_run(engine, args, rng) for _ in range(1 + args.runs)][1:]
    figures: dict[str, Any] = {
        name: {statistic: [of(run[name]) for run in runs] for statistic, of in (("median", median), ("p99", _p99))}
        for name in ("ttft", "itl", "tpot")
        if runs[0][name]
    }
    print(
        f"{args.batch_size} x {args.input_len} tokens in, {args.output_len} out; {args.runs} runs, the median of the "
        "runs and their range"
    )
    for name, statistics in figures.items():
        for statistic, values in statistics.items():
            low, middle, high = (f"{1e3 * value:.2f}" for value in (min(values), median(values), max(values)))
            print(f"{name.upper():4}  {statistic:6}  {middle:>9} ms   ({low} .. {high})")
    names = ("input_len", "output_len", "batch_size", "runs")
    return {name: getattr(args, name) for name in names} | figures


def _latency_run(engine: LLMEngine, args: argparse.Namespace, rng: random.Random) -> dict[str, list[float]]:
    """Seconds: TTFT and TPOT of each request, ITL of each token after the first."""
    times: dict[str, list[float]] = {}
    prompts = [random_prompt(engine, args.input_len, rng) for _ in range(args.batch_size)]
    start = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, greedy(args.output_len))
        times[str(i)] = []

    def on_step(outputs: list[RequestOutput]) -> None:
        now = time.perf_counter()
        for output in outputs:
            if len(output.outputs[0].token_ids) > len(times[output.request_id]):
                times[output.request_id].append(now)

    run_to_end(engine, on_step)
    return {
        "ttft": [own[0] - start for own in times.values()],
        "itl": [after - before for own in times.values() for before, after in pairwise(own)],
        "tpot": [(own[-1] - own[0]) / (len(own) - 1) for own in times.values() if len(own) > 1],
    }


def _p99(values: Sequence[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]


def _warm_up(engine: LLMEngine, rng: random.Random) -> None:
    """Brings code and buffers in, so that the first request of the measurement is like the others."""
    room = min(engine.config.max_num_batched_tokens, engine.boot_report.memory.max_model_len - 2)
    engine.add_request("warm-up", random_prompt(engine, max(1, room), rng), greedy(2))
    run_to_end(engine)


def _profiler(engine: LLMEngine) -> Profiler | None:
    try:
        return engine.profiler()
    except ConfigError:  # then there is one figure less
        return None
