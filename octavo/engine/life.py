"""One life of the engine process, from the front-end's side: start it, talk to it, see how it is, end it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.asyncio

from octavo.engine import wire
from octavo.engine.flight_recorder import FlightRecorder
from octavo.errors import OctavoError

ENGINE_MODULE = "octavo.engine.process"  # whose main() is the engine process

# The child finds its modules where this process does, and nowhere else. A SIGTERM to all processes of a group is for
# the front-end, which drains; a handler that does nothing, unlike SIG_IGN, is not handed on to what the child starts.
_BOOT = (
    "import signal; signal.signal(signal.SIGTERM, lambda *_: None); "
    "import sys; _, module, address, parent, recorder, *sys.path = sys.argv; "
    "from importlib import import_module; import_module(module).main(address, int(parent), int(recorder))"
)
SECONDS_BETWEEN_POLLS = 0.05
_SOCKET = "engine"  # the name of its file
_LONGEST_ADDRESS = 107  # bytes of a Unix socket's path
_LONGEST_STAT = 4096  # bytes
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
    """Of a process that is not there: dead."""
    try:
        file = _open_stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return _GONE
    try:
        return _read_stat(file)
    finally:
        os.close(file)


_GONE = Vitals("X", 0, 0.0)


def _open_stat(pid: int) -> int:
    return os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)


def _read_stat(file: int) -> Vitals:
    """An open /proc/PID/stat (man 5 proc) tells of that process alone, even if its number is given to another."""
    try:
        stat = os.pread(file, _LONGEST_STAT, 0)
    except ProcessLookupError:
        return _GONE
    fields = stat.rpartition(b")")[2].split()  # the name in parentheses may hold anything
    return Vitals(fields[0].decode(), int(fields[9]), (int(fields[11]) + int(fields[12])) * _TICK)


class Life:
    """An engine process with its socket and its flight recorder.

    The socket's path lies in a directory that only this user can enter, and that is removed once the engine has said
    its first word: nothing is left behind even if this process is killed.
    """

    def __init__(self, module: str, max_num_seqs: int, context: zmq.asyncio.Context) -> None:
        """Starts the process; to be called on the loop that is to hear of it.

        Args:
            context: outlives this life. To make one takes file descriptors, without which ZeroMQ ends the process.

        Raises:
            OSError, zmq.ZMQError: there are no more processes, file descriptors or memory; nothing is left of the try.
        """
        with ExitStack() as undo:
            self._directory: Path | None = Path(tempfile.mkdtemp(prefix="octavo-"))
            undo.callback(self._remove_directory)
            path = self._directory / _SOCKET
            if len(os.fsencode(path)) > _LONGEST_ADDRESS:
                raise OctavoError(
                    f"{path}: a socket's path has at most {_LONGEST_ADDRESS} bytes; choose a shorter TMPDIR"
                )
            self._socket = context.socket(zmq.PAIR)
            undo.callback(self._socket.close, linger=0)
            self._socket.setsockopt(zmq.SNDHWM, 0)  # what waits here is bounded by the requests that may be unfinished
            self._socket.setsockopt(zmq.RCVHWM, 0)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.bind(f"ipc://{path}")
            file = FlightRecorder.create(max_num_seqs)
            self.recorder = FlightRecorder(os.dup(file))
            undo.callback(self.recorder.close)
            try:
                self._process = _start(module, f"ipc://{path}", file)
            finally:
                os.close(file)
            undo.callback(self._end)
            self._stat = _open_stat(self.pid)
            undo.pop_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    def vitals(self) -> Vitals:
        """Needs no new file descriptor."""
        return _read_stat(self._stat)

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
        with suppress(ProcessLookupError):  # what it has started itself, such as a Ray cluster of its own
            os.killpg(self.pid, signal.SIGKILL)
        self._socket.close(linger=0)
        os.close(self._stat)
        self.recorder.close()
        self._remove_directory()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _remove_directory(self) -> None:
        if self._directory is not None:
            with suppress(OSError):  # not rmtree, which opens files
                (self._directory / _SOCKET).unlink(missing_ok=True)
                self._directory.rmdir()
            self._directory = None


def _start(module: str, address: str, recorder: int) -> subprocess.Popen[bytes]:
    arguments = [module, address, str(os.getpid()), str(recorder)]
    return subprocess.Popen(
        [sys.executable, "-c", _BOOT, *arguments, *sys.path],
        stdin=subprocess.DEVNULL,
        stdout=2,  # as stderr: what this process prints on stdout may be meant for a program
        pass_fds=[recorder],
        start_new_session=True,  # a Ctrl-C in the terminal is for the front-end, which then ends the engine
    )


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
