"""Collectives between real processes over gloo: what arrives, what is counted, and what comes of a worker that goes."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

PATIENCE = 60.0  # seconds


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def peer(port: int, index: int, size: int, stages: int, deadline: float, role: str) -> Iterator[subprocess.Popen[str]]:
    arguments = [str(a) for a in (port, index, size, stages, deadline, role)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.collectives.peer", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()  # a stopped one, too
        process.communicate()


@contextmanager
def peers(size: int, stages: int, role: str, *, deadline: float = 30.0) -> Iterator[list[subprocess.Popen[str]]]:
    port = free_port()
    with ExitStack() as stack:
        yield [stack.enter_context(peer(port, index, size, stages, deadline, role)) for index in range(size * stages)]


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The last that it said before it ended."""
    out, err = process.communicate(timeout=PATIENCE)
    assert out, err[-2000:]
    return dict(json.loads(out.splitlines()[-1]))


@pytest.mark.parametrize(("size", "stages"), [(2, 1), (1, 2), (4, 1), (2, 2), (1, 4)])
def test_everything_arrives_in_rank_order_and_is_counted(size: int, stages: int) -> None:
    """Three turns: [2, 3] float32 (24 bytes) to each other rank and to the next stage, own columns to rank 0."""
    with peers(size, stages, "speak") as processes:
        answers = [answer(process) for process in processes]
        assert [process.returncode for process in processes] == [0] * (size * stages)
    for index, found in enumerate(answers):
        stage, rank = divmod(index, size)
        sends = stage < stages - 1
        assert found == {
            "messages": 3 * (size - 1 + (rank > 0) + sends),
            "bytes": 3 * (24 * (size - 1) + (rank > 0) * 8 * (3 + rank) + 24 * sends),
        }


CALLS = {"all_gather": (2, 1, 0), "gather": (2, 1, 0), "recv": (1, 2, 1)}  # size, stages, and who is left


@pytest.mark.parametrize("call", CALLS)
def test_a_killed_worker_is_noticed_soon(call: str) -> None:
    """Long before the deadline: its connection is closed."""
    size, stages, left = CALLS[call]
    with peers(size, stages, f"kill:{call}", deadline=50.0) as processes:
        found = answer(processes[left])
        assert processes[1 - left].wait(PATIENCE) == -signal.SIGKILL
    assert found["error"].startswith(f"{call} failed: ")
    assert "\n" not in found["error"]
    assert found["after"] < 10.0


def test_of_three_all_that_are_left_notice_a_killed_one() -> None:
    with peers(3, 1, "kill:all_gather", deadline=20.0) as processes:
        for index in (0, 2):
            found = answer(processes[index])
            assert found["error"].startswith("all_gather failed: ")
            assert found["after"] < 25.0


@pytest.mark.parametrize("call", CALLS)
def test_a_stopped_worker_is_given_up_at_the_deadline(call: str) -> None:
    size, stages, left = CALLS[call]
    with peers(size, stages, f"stop:{call}", deadline=3.0) as processes:
        found = answer(processes[left])
    assert found["error"].startswith(f"{call} failed: ")
    assert 2.0 < found["after"] < 10.0


def test_workers_that_do_not_meet_say_so() -> None:
    start = time.monotonic()
    with peer(free_port(), 1, 2, 1, 2.0, "speak") as process:
        found = answer(process)
    assert found["error"].startswith("meeting the other workers failed: ")
    assert time.monotonic() - start < 30.0
