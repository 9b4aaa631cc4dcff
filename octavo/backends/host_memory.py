"""How much memory this process may use: the machine's, or less where a container sets a limit."""

from __future__ import annotations

import os
from pathlib import Path

from octavo.backends.cgroups import CGROUP_ROOT, PROCESS_CGROUPS, cgroup_folders, read_words

_FILES = {1: "memory.limit_in_bytes", 2: "memory.max"}  # by cgroup version


def memory_limit(root: Path = CGROUP_ROOT, process_cgroups: Path = PROCESS_CGROUPS) -> int:
    """Bytes: the least of physical memory and the limits of the process's cgroup and its ancestors (v1 and v2)."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    words = [
        read_words(folder / _FILES[version]) for folder, version in cgroup_folders("memory", root, process_cgroups)
    ]
    # v2 writes "no limit" as `max`, v1 as a number beyond any physical memory.
    return min([physical, *(int(word) for (word, *_) in filter(None, words) if word.isdigit())])
