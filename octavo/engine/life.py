"""One life of the engine process, from the front-end's side: start it, talk to it, see how it is, end it."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.asyncio

from octavo.engine import wire
from octavo.engine.flight_recorder import FlightRecorder
from octavo.errors import OctavoError

ENGINE_MODULE = "octavo.engine.process"  # whose main() is the engine process

# The child finds its modules where this process does, and nowhere else.
_BOOT = (
    "import sys; _, module, address, parent, recorder, *sys.path = sys.argv; "
    "from importlib import import_module; import_module(module).main(address, int(parent), int(recorder))"
)
SECONDS_BETWEEN_POLLS = 0.05
_LONGEST_ADDRESS = 107  # bytes of a Unix socket's path
_TICK = 1 / os.sysconf("SC_CLK_TCK")  # seconds


@dataclass(frozen=True, slots=True)
class Vitals:
    """What the kernel says of a process."""

    state: str  # R runs, S sleeps, D waits for a disk, T is stopped, Z or X is dead
    major_faults: int  # pages that had to be read from a disk
    cpu_seconds: float  # of all its threads

    @property
    def dead(self) -> bool:
        return self.state in "ZX"

    @property
    def stopped(self) -> bool:
        return self.state in "Tt"


def vitals(pid: int) -> Vitals:
    """Read from /proc/PID/stat (man 5 proc); of a process that is not there: dead."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return Vitals("X", 0, 0.0)
    fields = stat.rpartition(")")[2].split()  # the name in parentheses may hold anything
    return Vitals(fields[0], int(fields[9]), (int(fields[11]) + int(fields[12])) * _TICK)


class Life:
    """An engine process with its socket and its flight recorder.

    The socket's path lies in a directory that only this user can enter, and that is removed once the engine has said
    its first word: nothing is left behind even if this process is killed.
    """

    def __init__(self, module: str, max_num_seqs: int) -> None:
        """Starts the process; to be called on the loop that is to hear of it."""
        self._directory: Path | None = Path(tempfile.mkdtemp(prefix="octavo-"))
        path = self._directory / "engine"
        if len(os.fsencode(path)) > _LONGEST_ADDRESS:
            raise OctavoError(f"{path}: a socket's path has at most {_LONGEST_ADDRESS} bytes; choose a shorter TMPDIR")
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # what waits here is bounded by the requests that may be unfinished
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(f"ipc://{path}")
        file = FlightRecorder.create(max_num_seqs)
        arguments = [module, f"ipc://{path}", str(os.getpid()), str(file)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, *arguments, *sys.path],
            stdin=subprocess.DEVNULL,
            stdout=2,  # as stderr: what this process prints on stdout may be meant for a program
            pass_fds=[file],
            start_new_session=True,  # a Ctrl-C in the terminal is for the front-end, which then ends the engine
        )
        self.recorder = FlightRecorder(file)

    @property
    def pid(self) -> int:
        return self._process.pid

    def vitals(self) -> Vitals:
        return vitals(self.pid)

    def send(self, message: wire.ToEngine) -> None:
        self._socket.send(wire.encode(message))

    async def receive(self) -> wire.FromEngine:
        """The next message. Whoever is cancelled here has taken none: nothing is awaited once one is taken."""
        await self._socket.poll()
        message = self._take()
        self._remove_directory()
        return message

    def left_over(self) -> Iterator[wire.FromEngine]:
        """What had arrived and was not read."""
        while zmq.Socket.shadow(self._socket).poll(0):
            yield self._take()

    def _take(self) -> wire.FromEngine:
        socket: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)
        return wire.decode_from_engine(socket.recv(zmq.NOBLOCK))

    async def ended(self) -> str:
        """Waits for the process to end; how it did."""
        while self._process.poll() is None:
            await _exit_of(self.pid)
        code = self._process.wait()
        return f"killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        """Even if it is stopped."""
        self._process.kill()

    def close(self) -> None:
        """Gives everything back; the process has ended, or has been killed."""
        self._process.wait()
        self._context.destroy(linger=0)
        self.recorder.close()
        self._remove_directory()

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None


async def _exit_of(pid: int) -> None:
    """Returns when the child has ended; or now and then, where the kernel cannot tell (before Linux 5.3, sandboxes)."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        await asyncio.sleep(SECONDS_BETWEEN_POLLS)
        return
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    try:
        loop.add_reader(pidfd, over.set)
        await over.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def log_level() -> int:
    """Of this process, for the child to follow."""
    return logging.getLogger("octavo").getEffectiveLevel()
