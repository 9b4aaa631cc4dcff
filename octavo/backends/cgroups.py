"""Where the limits of this process's cgroups are written, in version 1 and 2."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROCESS_CGROUPS = Path("/proc/self/cgroup")


def cgroup_folders(controller: str, root: Path, process_cgroups: Path) -> list[tuple[Path, int]]:
    """Folders of the process's cgroup and of its ancestors, each with its cgroup version, 1 or 2.

    /proc/self/cgroup has lines `hierarchy:controllers:path`; version 2 names no controllers.
    """
    if not process_cgroups.is_file():
        return []
    found = []
    for line in process_cgroups.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, version = root, 2
        elif controller in controllers.split(","):
            base, version = root / controller, 1
        else:
            continue
        inner = PurePosixPath(path.lstrip("/"))
        # A container often sees its own cgroup as the root, under a path that is the host's: the base is one of them.
        found += [(base / folder, version) for folder in (inner, *inner.parents)]
    return found


def read_words(file: Path) -> list[str]:
    """The words of a one-line file; none where there is no file."""
    return file.read_text().split() if file.is_file() else []
