"""How many cores this process may use: the machine's, or fewer where affinity or a container sets a limit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from octavo.backends.cgroups import CGROUP_ROOT, PROCESS_CGROUPS, cgroup_folders, read_words


class Cores(NamedTuple):
    """How many, and why not more: `all 8 cores`, `affinity to 4 of 8 cores`, `a quota of 1.5 of 8 cores`."""

    number: int
    reason: str


def usable_cores(root: Path = CGROUP_ROOT, process_cgroups: Path = PROCESS_CGROUPS) -> Cores:
    """The least of the cores that the scheduler may give us and the CPU quotas (v1 and v2), rounded up."""
    machine, allowed = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    quotas = [_quota(folder, version) for folder, version in cgroup_folders("cpu", root, process_cgroups)]
    quota = min((quota for quota in quotas if quota is not None), default=None)
    of_machine = f"{machine} core" if machine == 1 else f"{machine} cores"
    if quota is not None and quota < allowed:
        return Cores(max(1, -int(-quota // 1)), f"a quota of {quota:g} of {of_machine}")
    if allowed < machine:
        return Cores(allowed, f"affinity to {allowed} of {of_machine}")
    return Cores(allowed, f"all {of_machine}" if machine > 1 else "the machine's one core")


def _quota(folder: Path, version: int) -> float | None:
    """Cores' worth of time per period; None where there is no limit: v2 writes `max`, v1 writes -1."""
    if version == 2:
        words = read_words(folder / "cpu.max")
    else:
        words = read_words(folder / "cpu.cfs_quota_us") + read_words(folder / "cpu.cfs_period_us")
    if len(words) != 2 or not all(word.isdigit() for word in words):
        return None
    quota, period = map(int, words)
    return quota / period
