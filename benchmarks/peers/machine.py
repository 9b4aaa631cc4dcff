"""What the figures were measured on."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

# Those that kernels choose by.
FLAGS = (
    "sse4_2", "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni",
    "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8", "asimd", "asimddp", "bf16", "i8mm", "sve",
)  # fmt: skip

QUIET = 0.1  # cores


def facts(checkout: Path) -> dict[str, Any]:
    """Of the machine, the date, and octavo's commit. Linux only; absent files give absent facts."""
    cpuinfo = _fields(Path("/proc/cpuinfo"))
    memory = _fields(Path("/proc/meminfo"))
    present = cpuinfo.get("flags", cpuinfo.get("Features", "")).split()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpuinfo.get("model name", platform.processor()),
        "cpu_flags": [flag for flag in FLAGS if flag in present],
        "cores": len(os.sched_getaffinity(0)),
        "caches": _caches(),
        "memory_gib": round(int(memory["MemTotal"].split()[0]) / 2**20, 1),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "octavo_commit": _git(checkout, "rev-parse", "HEAD"),
        "octavo_modified": bool(_git(checkout, "status", "--porcelain", "--", "octavo", "csrc")),
        "load_average_before": os.getloadavg()[0],
    }


class Bystanders:
    """How busy the rest of the machine is while something is measured; figures from a busy machine say little."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._busy = _busy_seconds()

    def cores(self, own_seconds: float) -> float:
        """Cores, on average since this was made, that were busy with anything but the `own_seconds` of CPU time."""
        elapsed = time.monotonic() - self._start
        return max(0.0, _busy_seconds() - self._busy - own_seconds) / elapsed


def wait_for_quiet(limit: float) -> None:
    """Returns once nothing else runs for a second, or after `limit` seconds."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        bystanders = Bystanders()
        time.sleep(1.0)
        if bystanders.cores(0.0) < QUIET:
            return


def group_seconds(group: int) -> float:
    """CPU time of a process group so far: its living processes and the children that they have waited for."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended since
        if int(fields[2]) == group:
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _busy_seconds() -> float:
    """CPU time of the whole machine but idle and waiting for disks; with what a hypervisor gave to others."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, _first_line("/proc/stat").split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _first_line(path: str) -> str:
    with open(path) as file:
        return file.readline()


def _fields(path: Path) -> dict[str, str]:
    """`name : value` lines; of a name that comes again (one block a core), the first."""
    fields: dict[str, str] = {}
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields


def _caches() -> dict[str, str]:
    caches = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        caches[f"L{level} {kind.lower()}"] = size
    return caches


def _git(checkout: Path, *command: str) -> str:
    return subprocess.run(["git", "-C", checkout, *command], capture_output=True, text=True, check=True).stdout.strip()
