"""What Ray's workers cost: a step's time beside the same engine in one process, messages and bytes a step.

    python benchmarks/ray_overhead.py MODEL [--json FILE]

Two engines on the same requests take turns step by step, one in this process and one over Ray, so that the machine's
mood is that of both: the overhead is the median of the differences. A round decodes one token of each of 8 sequences: a
step, or with a pipeline as many steps as it has stages.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import ray
from rich.console import Console
from rich.table import Table

from octavo import LLM, SamplingParams
from octavo.executor.ray import RayExecutor

SEQUENCES = 8
ROUNDS = 300
WARM_UP = 20
DIVISIONS = ((1, 1), (2, 1), (1, 2), (2, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ray.init(num_cpus=8, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    address = ray.get_runtime_context().gcs_address
    rows = [measure(args.model, address, size, stages) for size, stages in DIVISIONS]
    ray.shutdown()
    table = Table(title=f"{SEQUENCES} sequences, a token each, one thread a worker; medians of {ROUNDS} rounds")
    for column in ("TP", "PP", "in process", "over Ray", "difference", "driver sends", "workers send"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row["size"]),
            str(row["stages"]),
            f"{row['alone_ms']:.2f} ms",
            f"{row['ray_ms']:.2f} ms",
            f"{row['difference_ms']:+.2f} ms",
            f"{row['driver_messages']:.0f} messages, {row['driver_bytes']:.0f} bytes",
            f"{row['worker_messages']:.0f} messages, {row['worker_bytes']:.0f} bytes",
        )
    Console().print(table)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


def measure(model: str, address: str, size: int, stages: int) -> dict[str, Any]:
    options: dict[str, Any] = {"num_threads": 1, "kv_cache_memory_bytes": 1 << 26}
    over_ray = {
        "tensor_parallel_size": size,
        "pipeline_parallel_size": stages,
        "distributed_executor_backend": "ray",
        "ray_address": address,
    }
    with LLM(model, **options) as one, LLM(model, **options, **over_ray) as other:
        for llm in (one, other):
            begin(llm)
        executor = other.engine._core.executor
        assert isinstance(executor, RayExecutor)
        before = counters(executor)
        alone, ray_times = [], []
        for _ in range(ROUNDS):
            alone.append(timed(one, 1))
            ray_times.append(timed(other, stages))
        sent = [(after - earlier) / ROUNDS for earlier, after in zip(before, counters(executor), strict=True)]
    differences = [b - a for a, b in zip(alone, ray_times, strict=True)]
    names = ("driver_messages", "driver_bytes", "worker_messages", "worker_bytes")
    return {
        "size": size,
        "stages": stages,
        "alone_ms": statistics.median(alone),
        "ray_ms": statistics.median(ray_times),
        "difference_ms": statistics.median(differences),
        **dict(zip(names, sent, strict=True)),
    }


def begin(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2 * (ROUNDS + WARM_UP), ignore_eos=True)
    for i in range(SEQUENCES):
        llm.engine.add_request(str(i), {"prompt_token_ids": [100 + i, 7, 300, 9]}, params)
    for _ in range(WARM_UP):
        llm.engine.step()


def timed(llm: LLM, steps: int) -> float:
    """Milliseconds that so many steps take."""
    start = time.perf_counter()
    for _ in range(steps):
        llm.engine.step()
    return 1e3 * (time.perf_counter() - start)


def counters(executor: RayExecutor) -> list[int]:
    """Messages and bytes that the driver has sent, and the workers to each other."""
    traffic = executor.traffic()
    sent = sum(worker.num_messages for worker in traffic), sum(worker.num_bytes for worker in traffic)
    return [executor.num_messages, executor.num_bytes, *sent]


if __name__ == "__main__":
    main()
