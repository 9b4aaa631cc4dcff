"""What the server costs: 128 clients at once beside `LLM.generate`, and 1,000 connections that only wait.

Load: workload A of benchmarks/peers, each request from a client of its own, streamed, beside one call of
`LLM.generate` with the same requests; in turn, each time in a fresh engine. Both have to give the same texts. The
clients run on the same cores as the engine, so their CPU time is measured, and subtracted: the server's share is
what is left.

Idle: the gaps between tokens of a few streams, and the server's resident memory, without and with idle keep-alive
connections, in turn.

    python benchmarks/server_load.py [--model M] [--rounds 3] [--clients 128] [--idle 1000] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from octavo import LLM, SamplingParams
from octavo.config import DEMO_MODEL

sys.path.append(str(Path(__file__).parent / "peers"))
from workloads import Request, offline, warm_up

IDLE_STREAMS = 8
IDLE_TOKENS = 128


@dataclass
class Load:
    """One run of the same requests; `client_cpu` is that of the load generator, 0 without one."""

    way: str
    seconds: float
    client_cpu: float
    output_tokens: int


@dataclass
class Idle:
    connections: int
    p50_ms: float
    p99_ms: float
    gaps: int
    rss_mb: float


class Client:
    """One streamed completion over a connection of its own. What comes is kept as it comes, and read later."""

    def __init__(self, url: str, request: Request) -> None:
        prompt, count = request
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._address = (host, int(port))
        body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "stream": True}
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        self._sent = f"{head}content-length: {len(data)}\r\n\r\n".encode() + data
        self._received: list[tuple[float, bytes]] = []

    async def run(self) -> None:
        reader, writer = await asyncio.open_connection(*self._address)
        writer.write(self._sent)
        while data := await reader.read(2**16):
            self._received.append((time.perf_counter(), data))
        writer.close()

    def events(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """Each event, and when its last byte came."""
        line = b""
        is_body = False
        for seconds, data in self._received:
            *lines, line = (line + data).split(b"\n")
            for text in (text.strip() for text in lines):
                if not is_body:
                    is_body = not text
                elif text.startswith(b"data: {"):
                    yield seconds, json.loads(text.removeprefix(b"data: "))

    def text(self) -> str:
        choices = [choice for _, event in self.events() for choice in event["choices"]]
        assert choices[-1]["finish_reason"] == "length", choices[-1:]
        return "".join(choice["text"] for choice in choices)

    def gaps(self) -> list[float]:
        """Seconds between one event and the next."""
        times = [seconds for seconds, _ in self.events()]
        return [after - before for before, after in pairwise(times)]


async def ask(url: str, requests: Sequence[Request]) -> tuple[list[Client], float, float]:
    """All requests at once; the clients, the seconds until the last has its answer, and their own CPU seconds."""
    clients = [Client(url, request) for request in requests]
    start, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(client.run() for client in clients))
    return clients, time.perf_counter() - start, time.process_time() - cpu


@contextmanager
def served(model: str) -> Iterator[tuple[str, int]]:
    """`octavo serve`, warm: its URL and process id."""
    command = [sys.executable, "-m", "octavo", "serve", model, "--port", "0", "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            for requests in warm_up():
                asyncio.run(ask(url, requests))
            yield url, process.pid
        finally:
            process.terminate()


def run_server(model: str, requests: list[Request]) -> tuple[Load, list[str]]:
    with served(model) as (url, _):
        clients, seconds, cpu = asyncio.run(ask(url, requests))
    return Load("octavo serve", seconds, cpu, sum(count for _, count in requests)), [c.text() for c in clients]


def run_llm(model: str, requests: list[Request]) -> tuple[Load, list[str]]:
    with LLM(model) as llm:
        for batch in warm_up():
            generate(llm, batch)
        start = time.perf_counter()
        texts = generate(llm, requests)
        seconds = time.perf_counter() - start
    return Load("LLM.generate", seconds, 0.0, sum(count for _, count in requests)), texts


def generate(llm: LLM, requests: list[Request]) -> list[str]:
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt, _ in requests]
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for _, count in requests]
    return [output.outputs[0].text for output in llm.generate(prompts, params, progress=False)]


async def open_idle(url: str, count: int) -> list[asyncio.StreamWriter]:
    """Connections that have asked once, and are kept alive."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    writers = []
    for _ in range(count):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        writers.append(writer)
    return writers


async def run_idle(url: str, pid: int, connections: int, rep: int) -> tuple[list[float], float]:
    """The gaps of some streams beside so many idle connections, and the server's resident memory in MB."""
    rng = random.Random(rep)
    requests = [([rng.randrange(1000, 40000) for _ in range(32)], IDLE_TOKENS) for _ in range(IDLE_STREAMS)]
    writers = await open_idle(url, connections)
    rss = resident_mb(pid)
    clients, _, _ = await ask(url, requests)
    for writer in writers:
        writer.close()
    await asyncio.gather(*(writer.wait_closed() for writer in writers))
    return [gap for client in clients for gap in client.gaps()], rss


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def measure_idle(model: str, connections: int, rounds: int) -> list[Idle]:
    """Gaps of all rounds together; memory before the first connection, and with all of them for the first time."""
    gaps: dict[int, list[float]] = {0: [], connections: []}
    rss: dict[int, float] = {}
    with served(model) as (url, pid):
        for rep in range(rounds):
            for count in gaps:
                new, resident = asyncio.run(run_idle(url, pid, count, 2 * rep + (count > 0)))
                gaps[count] += new
                rss.setdefault(count, resident)
    results = []
    for count, all_gaps in gaps.items():
        cuts = statistics.quantiles(all_gaps, n=100)
        results.append(Idle(count, 1e3 * cuts[49], 1e3 * cuts[98], len(all_gaps), rss[count]))
    return results


def report(loads: list[Load], idles: list[Idle]) -> None:
    own = [load for load in loads if load.way == "LLM.generate"]
    over_http = [load for load in loads if load.way == "octavo serve"]
    table = Table(title="The same requests, as one call and from as many clients")
    for name in ("round", "LLM.generate", "octavo serve", "clients' CPU", "ratio", "without their CPU"):
        table.add_column(name, justify="right")
    ratios = []
    for i, (a, b) in enumerate(zip(own, over_http, strict=True)):
        ratios.append((b.seconds - b.client_cpu) / a.seconds)
        cells = (f"{a.seconds:.2f} s", f"{b.seconds:.2f} s", f"{b.client_cpu:.2f} s", f"{b.seconds / a.seconds:.3f}")
        table.add_row(str(i), *cells, f"{ratios[-1]:.3f}")
    Console().print(table)
    if ratios:
        print(f"median ratio without the clients' CPU: {statistics.median(ratios):.3f}")
    table = Table(title=f"{IDLE_STREAMS} streams beside idle connections")
    for name in ("connections", "p50 of gaps", "p99", "gaps", "resident"):
        table.add_column(name, justify="right")
    for idle in idles:
        cells = (f"{idle.p50_ms:.2f} ms", f"{idle.p99_ms:.2f} ms", str(idle.gaps), f"{idle.rss_mb:.1f} MB")
        table.add_row(str(idle.connections), *cells)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=128, help="the first so many requests of workload A, at most")
    parser.add_argument("--idle", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the server inherits it
    loads: list[Load] = []
    for rep in range(args.rounds):
        requests = offline(rep)[: args.clients]
        own, expected = run_llm(args.model, requests)
        over_http, texts = run_server(args.model, requests)
        loads += [own, over_http]
        if texts != expected:
            raise SystemExit(f"round {rep}: the server gave other texts than LLM.generate")
    idles = measure_idle(args.model, args.idle, args.rounds)
    report(loads, idles)
    if args.json:
        facts = {"machine": platform.processor() or platform.machine(), "model": args.model}
        results = {"load": [asdict(load) for load in loads], "idle": [asdict(idle) for idle in idles]}
        args.json.write_text(json.dumps({**facts, **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
