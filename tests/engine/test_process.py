"""The engine process itself: it ends with its front-end, leaves nothing behind, and writes down what it does."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from octavo.engine import wire
from octavo.engine.flight_recorder import FlightRecorder
from octavo.engine.life import Life, Vitals, vitals
from octavo.engine.progress import Progress
from tests.engine.failing_engine import faulty

ROOT = Path(__file__).parent.parent.parent


@contextmanager
def front_end(model: Path, directory: Path, stderr: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A front-end in a process of its own, and the pid of its engine, which is in the middle of a request."""
    command = [sys.executable, "-m", "tests.engine.front_end", str(model)]
    with (
        stderr.open("w") as log,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(directory)},
        ) as process,
    ):
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def gone(pid: int, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if vitals(pid).dead:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize(
    ("faults", "stopped"),
    [({"step_seconds": 0.01}, False), ({"step_seconds": 0.01}, True), ({"burn_seconds": 60}, False)],
)
def test_the_engine_ends_with_its_front_end(
    tiny_llama: Path, tmp_path: Path, faults: dict[str, float], stopped: bool
) -> None:
    """Also when the engine is stopped, or in the middle of a long step. No file is left either."""
    model = faulty(tiny_llama, tmp_path / "model", **faults)
    sockets = tmp_path / "t"
    sockets.mkdir()
    with front_end(model, sockets, tmp_path / "log") as (process, engine):
        assert not vitals(engine).dead
        if stopped:
            os.kill(engine, signal.SIGSTOP)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert gone(engine)
    assert list(sockets.iterdir()) == []


def test_ctrl_c_is_not_for_the_engine(tiny_llama: Path, tmp_path: Path) -> None:
    """It has a session of its own: what a terminal sends to the front-end's group does not reach it."""
    model = faulty(tiny_llama, tmp_path / "model", step_seconds=0.01)
    with front_end(model, tmp_path, tmp_path / "log") as (process, engine):
        assert os.getsid(engine) == engine != os.getsid(process.pid)


def test_a_sigterm_to_all_of_a_group_is_not_for_the_engine(tiny_llama: Path, tmp_path: Path) -> None:
    """A service manager sends it to each process; the front-end drains, which takes an engine."""
    model = faulty(tiny_llama, tmp_path / "model", step_seconds=0.01)
    with front_end(model, tmp_path, tmp_path / "log") as (_, engine):
        before = vitals(engine).cpu_seconds
        for _ in range(20):
            os.kill(engine, signal.SIGTERM)
            time.sleep(0.02)
        assert not gone(engine, 0.2)
        assert vitals(engine).cpu_seconds > before  # and it goes on


def test_a_start_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def no_process(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EAGAIN, "no more processes")

    async def main() -> None:
        with zmq.asyncio.Context() as context:
            context.socket(zmq.PAIR).close()
            files = len(os.listdir("/proc/self/fd"))
            with monkeypatch.context() as patch:
                patch.setattr(subprocess, "Popen", no_process)
                for _ in range(3):
                    with pytest.raises(OSError, match="no more processes"):
                        Life("nothing", 4, context)
            await asyncio.sleep(0.1)  # ZeroMQ closes in a thread of its own
            assert len(os.listdir("/proc/self/fd")) <= files

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == []


def test_a_front_end_that_is_interrupted_leaves_no_engine(tiny_llama: Path, tmp_path: Path) -> None:
    model = faulty(tiny_llama, tmp_path / "model", step_seconds=0.01)
    with front_end(model, tmp_path, tmp_path / "log") as (process, engine):
        process.send_signal(signal.SIGINT)
        process.wait()
        assert gone(engine)
    assert "KeyboardInterrupt" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("turns", range(6))
def test_who_stops_reading_loses_no_message_in_the_middle(tmp_path: Path, turns: int) -> None:
    """After so many turns of the loop since messages came; what was not read is left over, from the first on."""

    async def main() -> None:
        life = object.__new__(Life)  # without a process
        life._directory = None
        with zmq.asyncio.Context() as context, zmq.Context() as other:
            life._socket = context.socket(zmq.PAIR)
            life._socket.bind(f"ipc://{tmp_path}/socket")
            peer = other.socket(zmq.PAIR)
            peer.connect(f"ipc://{tmp_path}/socket")
            heard = []

            async def listen() -> None:
                while True:
                    heard.append(await life.receive())

            listener = asyncio.create_task(listen())
            await asyncio.sleep(0.05)
            sent = [wire.Loading(i / 4) for i in range(4)]
            for message in sent:
                peer.send(wire.encode(message))
            time.sleep(0.05)
            for _ in range(turns):
                await asyncio.sleep(0)
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)
            assert heard + list(life.left_over()) == sent
            peer.close(linger=0)
            life._socket.close(linger=0)

    asyncio.run(main())


class TestFlightRecorder:
    def test_says_what_runs(self) -> None:
        file = FlightRecorder.create(4)
        writer, reader = FlightRecorder(os.dup(file)), FlightRecorder(file)
        assert (reader.num_steps, reader.in_step) == (0, [])
        writer.begin_step([5, 2**40, 7])
        assert (reader.num_steps, reader.in_step) == (0, [5, 2**40, 7])
        writer.end_step()
        assert (reader.num_steps, reader.in_step) == (1, [])
        writer.begin_step([9])
        writer.close()
        assert (reader.num_steps, reader.in_step) == (1, [9])
        reader.close()

    def test_has_room_for_no_more_than_it_was_made_for(self) -> None:
        recorder = FlightRecorder(FlightRecorder.create(2))
        with pytest.raises(ValueError, match="memoryview"):
            recorder.begin_step([1, 2, 3])
        recorder.close()


def test_vitals() -> None:
    own = vitals(os.getpid())
    assert own.state == "R"
    assert own.cpu_seconds == pytest.approx(sum(os.times()[:2]), abs=0.1)
    child = subprocess.Popen(["sleep", "60"])
    child.send_signal(signal.SIGSTOP)
    while not vitals(child.pid).stopped:
        time.sleep(0.001)
    child.kill()
    while not vitals(child.pid).dead:  # and not waited for
        time.sleep(0.001)
    child.wait()
    assert vitals(child.pid).dead


class TestProgress:
    """With a clock of its own; a look each second, a hang after 10, a step of 100 seconds at most."""

    @pytest.fixture(autouse=True)
    def _clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.progress = Progress(10.0, 100.0)

    def look(self, seconds: int, *, state: str = "S", at_work: bool = True, idle: bool = False, **signs: float) -> bool:
        """A look each second, at a process that shows so many signs a second: cpu, faults, steps, beats."""
        for _ in range(seconds):
            self.now += 1.0
            self.cpu += signs.get("cpu", 0.0)
            self.faults += int(signs.get("faults", 0))
            self.steps += int(signs.get("steps", 0))
            self.beats += int(signs.get("beats", 0))
            vital = Vitals(state, self.faults, self.cpu)
            if self.progress.look(vital, self.steps, self.beats, at_work=at_work, idle=idle):
                return True
        return False

    cpu, faults, steps, beats = 0.0, 0, 0, 0

    def test_nothing_is_a_hang(self) -> None:
        assert not self.look(10)
        assert self.progress.late
        assert self.look(1)
        assert self.progress.verdict == "it hung: no sign of progress for 11.0 s"

    def test_a_little_now_and_then_is_nothing(self) -> None:
        assert self.look(20, cpu=0.01)

    @pytest.mark.parametrize("signs", [{"cpu": 0.2}, {"faults": 1}, {"steps": 1}, {"beats": 1}, {"idle": True}])
    def test_any_sign_is_progress(self, signs: dict[str, Any]) -> None:
        assert not self.look(90, **signs)
        assert not self.progress.late

    def test_a_message_is_progress(self) -> None:
        for _ in range(20):
            assert not self.look(9, at_work=False)
            self.progress.heard()

    def test_waiting_for_a_disk_is_no_hang(self) -> None:
        assert not self.look(90, state="D")

    def test_who_is_stopped_is_not_idle(self) -> None:
        assert self.look(11, state="T", idle=True)

    def test_a_step_may_not_take_for_ever(self) -> None:
        assert not self.look(100, cpu=2.0)
        assert self.look(1, cpu=2.0)
        assert self.progress.verdict == "it hung: one step has taken more than 100 s"

    def test_what_is_no_step_may_take_its_time(self) -> None:
        """Loading a model."""
        assert not self.look(1000, at_work=False, cpu=1.0)

    def test_who_was_held_up_itself_does_not_judge(self) -> None:
        assert not self.look(1, steps=1)
        self.now += 60.0
        assert not self.look(9)
        assert self.look(3)
