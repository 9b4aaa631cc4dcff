"""How much memory this process may use: the machine's, or less where a container sets a limit."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROCESS_CGROUPS = Path("/proc/self/cgroup")


def memory_limit(root: Path = CGROUP_ROOT, process_cgroups: Path = PROCESS_CGROUPS) -> int:
    """Bytes: the least of physical memory and the limits of the process's cgroup and its ancestors (v1 and v2)."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    files = (folder / name for folder, name in _limit_files(root, process_cgroups))
    return min([physical, *(limit for file in files if (limit := _read_limit(file)) is not None)])


def _limit_files(root: Path, process_cgroups: Path) -> list[tuple[Path, str]]:
    """Where limits may be written. /proc/self/cgroup has lines `hierarchy:controllers:path`; v2 has no controllers."""
    if not process_cgroups.is_file():
        return []
    found = []
    for line in process_cgroups.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        inner = PurePosixPath(path.lstrip("/"))
        # A container often sees its own cgroup as the root, under a path that is the host's: the base is one of them.
        found += [(base / folder, name) for folder in (inner, *inner.parents)]
    return found


def _read_limit(file: Path) -> int | None:
    """None where there is no file, or it says `max`; v1 writes "no limit" as a number beyond any physical memory."""
    if not file.is_file():
        return None
    text = file.read_text().strip()
    return int(text) if text.isdigit() else None
