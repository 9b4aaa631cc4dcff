"""The memory limit of the process, from made-up cgroup trees of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from octavo.backends.host_memory import memory_limit

PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
UNLIMITED_V1 = 0x7FFFFFFFFFFFF000


def tree(tmp_path: Path, membership: str, files: dict[str, str]) -> tuple[Path, Path]:
    (tmp_path / "cgroup").write_text(membership)
    for name, text in files.items():
        file = tmp_path / "fs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "fs", tmp_path / "cgroup"


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        ("0::/\n", {}, PHYSICAL),
        ("0::/\n", {"memory.max": "max\n"}, PHYSICAL),
        ("0::/\n", {"memory.max": "5000\n"}, 5000),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "7000\n"}, 7000),
        ("0::/a/b\n", {"a/b/memory.max": "3000\n", "a/memory.max": "7000\n"}, 3000),
        ("0::/a/b\n", {"a/b/memory.max": "9000\n", "a/memory.max": "7000\n"}, 7000),
        ("0::/of/the/host\n", {"memory.max": "4000\n"}, 4000),  # a container's own cgroup, mounted as the root
        ("5:cpu,memory:/a\n1:name=systemd:/a\n", {"memory/a/memory.limit_in_bytes": "6000\n"}, 6000),
        ("5:memory:/a\n", {"memory/memory.limit_in_bytes": f"{UNLIMITED_V1}\n"}, PHYSICAL),
        ("5:memory:/a\n0::/a\n", {"memory/a/memory.limit_in_bytes": "6000\n", "a/memory.max": "2000\n"}, 2000),
        ("5:cpu:/a\n", {"a/memory.max": "1\n"}, PHYSICAL),  # a v1 hierarchy without memory says nothing
        ("0::/\n", {"memory.max": f"{PHYSICAL * 2}\n"}, PHYSICAL),
    ],
)
def test_the_least_limit_wins(tmp_path: Path, membership: str, files: dict[str, str], limit: int) -> None:
    assert memory_limit(*tree(tmp_path, membership, files)) == limit


def test_without_cgroups_it_is_physical_memory(tmp_path: Path) -> None:
    assert memory_limit(tmp_path / "none", tmp_path / "no file") == PHYSICAL


def test_this_machine() -> None:
    assert 0 < memory_limit() <= PHYSICAL
