"""How many cores this process may use: the machine's, or fewer where affinity or a container sets a limit."""

from __future__ import annotations

import os
from pathlib import Path

from octavo.backends.cgroups import CGROUP_ROOT, PROCESS_CGROUPS, cgroup_folders, read_words


def usable_cores(root: Path = CGROUP_ROOT, process_cgroups: Path = PROCESS_CGROUPS) -> int:
    """The least of the cores that the scheduler may give us and the CPU quotas (v1 and v2), rounded up."""
    quotas = [_quota(folder, version) for folder, version in cgroup_folders("cpu", root, process_cgroups)]
    return min([len(os.sched_getaffinity(0)), *(quota for quota in quotas if quota is not None)])


def _quota(folder: Path, version: int) -> int | None:
    """Cores' worth of time per period; None where there is no limit: v2 writes `max`, v1 writes -1."""
    if version == 2:
        words = read_words(folder / "cpu.max")
    else:
        words = read_words(folder / "cpu.cfs_quota_us") + read_words(folder / "cpu.cfs_period_us")
    if len(words) != 2 or not all(word.isdigit() for word in words):
        return None
    quota, period = map(int, words)
    return max(1, -(-quota // period))
