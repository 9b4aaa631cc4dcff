"""How many cores the process may use, from made-up cgroup trees of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from octavo.backends.cpu.cores import usable_cores
from tests.backends.test_host_memory import tree


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/\n", {}, 8),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "210000 100000\n"}, 3),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "6400000 100000\n"}, 8),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, 3),
        ("0::/of/the/host\n", {"cpu.max": "400000 100000\n"}, 4),
        ("3:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "150000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, 2),
        ("3:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, 8),
        ("3:cpuset:/a\n", {"cpu/a/cpu.cfs_quota_us": "1\n", "cpu/a/cpu.cfs_period_us": "1\n"}, 8),
    ],
)
def test_the_least_limit_wins(tmp_path: Path, membership: str, files: dict[str, str], cores: int) -> None:
    found = usable_cores(*tree(tmp_path, membership, files))
    assert found.number == cores
    assert found.reason == "all 8 cores" or found.reason.startswith("a quota of ")
    assert (found.reason == "all 8 cores") == (cores == 8)


def test_the_quota_is_told_as_it_is(tmp_path: Path) -> None:
    found = usable_cores(*tree(tmp_path, "0::/\n", {"cpu.max": "210000 100000\n"}))
    assert found == (3, "a quota of 2.1 of 8 cores")


def test_affinity_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert usable_cores(tmp_path / "none", tmp_path / "no file") == (1, "affinity to 1 of 8 cores")
