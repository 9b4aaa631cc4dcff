"""The child's side: an engine that is loaded once and runs workloads as it is told. Standard library only.

A line of JSON in, a line of JSON out; what the libraries print goes to stderr, which `run.py` keeps in a log.

    (start)                                    -> {"versions": {...}, "load_seconds": ...}
    {"workload": "A", "rep": 0, "requests": 8} -> {"seconds": ..., "output_tokens": ..., "ttft": ..., "first_ids": ...}

With --cold there is no conversation: the first token's text goes to stdout as soon as it is there (workload E).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from workloads import COLD_PROMPT, RESIDENT, Request, single_stream, warm_up


class Engine(Protocol):
    """What a peer's script gives."""

    versions: dict[str, str]

    def generate(self, requests: list[Request]) -> list[list[int]]:
        """Output token ids of each request; greedy, exactly as many as asked for."""

    def first_token(self, prompt: str) -> str:
        """Text of the token that follows a prompt in text."""


def main(load: Callable[[str, int], Engine]) -> None:
    """Args: `load` makes the engine from a model's path and a number of threads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--cold", action="store_true")
    args, _ = parser.parse_known_args()  # a peer's own flags are its own affair
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries may print
    start = time.perf_counter()
    engine = load(args.model, args.threads)
    if args.cold:
        print(repr(engine.first_token(COLD_PROMPT)), file=answers, flush=True)
        return
    load_seconds = time.perf_counter() - start
    for requests in warm_up():
        _generate(engine, requests)
    print(json.dumps({"versions": engine.versions, "load_seconds": load_seconds}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(engine, **json.loads(line))), file=answers, flush=True)


def measure(engine: Engine, workload: str, rep: int, requests: int | None = None) -> dict[str, Any]:
    """One run. `ttft` is the wall time of one request with one output token: C itself, and for B a run before it over
    other contents. Peers that give all tokens at once are measured like those that stream."""
    batch = RESIDENT[workload](rep)[:requests]
    ttft = _generate(engine, single_stream(rep + 100, output=1))[0] if workload == "B" else None
    seconds, outputs = _generate(engine, batch)
    return {
        "seconds": seconds,
        "output_tokens": sum(len(ids) for ids in outputs),
        "ttft": seconds if workload == "C" else ttft,
        "first_ids": [ids[0] for ids in outputs],
    }


def _generate(engine: Engine, requests: list[Request]) -> tuple[float, list[list[int]]]:
    start = time.perf_counter()
    outputs = engine.generate(requests)
    seconds = time.perf_counter() - start
    wrong = [(len(ids), asked) for ids, (_, asked) in zip(outputs, requests, strict=True) if len(ids) != asked]
    if wrong:
        raise ValueError(f"{len(wrong)} of {len(requests)} requests gave another number of tokens, first {wrong[0]}")
    return seconds, outputs
