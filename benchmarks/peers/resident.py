"""The parent's side: an engine's process, stopped while others are measured."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, cast

from machine import Bystanders, group_seconds

POLL = 0.5  # seconds


class PeerError(Exception):
    """An engine's process ended, or took too long."""


class Resident:
    """An engine that stays loaded; `ask` runs one workload.

    Between two calls its whole process group is stopped, so that no thread of it spins while another engine is timed.
    The group belongs to this session: if this process dies, the kernel wakes and hangs up the orphaned group.
    """

    def __init__(self, command: list[str], environment: dict[str, str], log: Path, timeout: float) -> None:
        """Starts the process and waits until it has loaded and warmed up.

        Args:
            log: where its stderr goes.
            timeout: seconds to wait for loading and for each answer.

        Raises:
            PeerError: it does not come up.
        """
        self._log = log
        self._timeout = timeout
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, process_group=0
            )
        try:
            self.boot = self._answer()
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def ask(self, **order: Any) -> dict[str, Any]:
        """What `child.measure` answers; `others` are the cores that were busy with something else meanwhile.

        Raises:
            PeerError: the process fails.
        """
        assert self._process.stdin is not None
        bystanders, own = Bystanders(), group_seconds(self._process.pid)
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise PeerError(self._last_words()) from error
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return {**answer, "others": bystanders.cores(group_seconds(self._process.pid) - own)}

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + self._timeout
        while not select.select([self._process.stdout], [], [], POLL)[0]:
            if self._process.poll() is not None:  # its own children may hold the pipe open
                raise PeerError(self._last_words())
            if time.monotonic() > deadline:
                raise PeerError(f"no answer within {self._timeout:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(self._last_words())
        return cast(dict[str, Any], json.loads(line))

    def _last_words(self) -> str:
        self._process.wait()
        return f"ended with {self._process.returncode}: {last_line(self._log)}"

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return  # all of it has ended; whoever waits for an answer reports it


def time_to_output(command: list[str], environment: dict[str, str], log: Path, timeout: float) -> dict[str, float]:
    """`seconds` from the start of a process to the first byte on its stdout; lets it end before it returns.

    Raises:
        PeerError: it fails, prints nothing, or takes too long.
    """
    with log.open("wb") as stderr:
        bystanders, own = Bystanders(), _children_seconds()
        start = time.perf_counter()
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=stderr, process_group=0)
    assert process.stdout is not None
    try:
        ready = select.select([process.stdout], [], [], timeout)[0]
        seconds = time.perf_counter() - start
        first = process.stdout.read(1) if ready else b""
        process.stdout.read()
        process.wait(timeout)
    except subprocess.TimeoutExpired as error:
        raise PeerError(f"did not end within {timeout:.0f} s") from error
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if not first or process.returncode != 0:
        raise PeerError(f"ended with {process.returncode}, after {seconds:.0f} s: {last_line(log)}")
    return {"seconds": seconds, "others": bystanders.cores(_children_seconds() - own)}


def _children_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


def last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "(nothing on stderr)"
