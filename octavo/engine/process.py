"""The engine process: what `AsyncLLMEngine` starts, watches, and starts again.

It computes token ids and knows nothing of text. It keeps nothing that could be lost: the front-end can tell any
successor all that is needed to go on.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import zmq

from octavo.core import StepPlan, StepResult
from octavo.engine import wire
from octavo.engine.core import EngineCore
from octavo.engine.flight_recorder import FlightRecorder
from octavo.engine.messages import SequenceOutput, SequenceRequest
from octavo.errors import ConfigError, ModelError, RequestError
from octavo.executor import Executor, make_executor
from octavo.metrics import Profiler, configure_logging
from octavo.models import model_config
from octavo.outputs import RequestMetrics
from octavo.weights import open_checkpoint
from octavo.worker import BootReport

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LINGER = 2000  # milliseconds in which a last message may still leave
_IDLE_LOOK = 1.0  # seconds between looks at the workers while there is nothing to do
_LOAD_NEWS = 0.01  # of the weights: no more often is it told how many are loaded


class RecordedExecutor(Executor):
    """Writes down each step before it is run, so that what killed an engine is known."""

    def __init__(self, executor: Executor, recorder: FlightRecorder) -> None:
        self._executor = executor
        self._recorder = recorder
        self._in_flight: deque[list[int]] = deque()  # seq_ids of steps

    @property
    def boot_report(self) -> BootReport:
        return self._executor.boot_report

    @property
    def depth(self) -> int:
        return self._executor.depth

    def submit(self, plan: StepPlan) -> None:
        self._in_flight.append(plan.seq_ids)
        self._recorder.begin_step([seq_id for seq_ids in self._in_flight for seq_id in seq_ids])
        self._executor.submit(plan)

    def collect(self) -> StepResult:
        result = self._executor.collect()
        self._in_flight.popleft()
        self._recorder.end_step([seq_id for seq_ids in self._in_flight for seq_id in seq_ids])
        return result

    def look(self) -> None:
        self._executor.look()

    def profiler(self) -> Profiler:
        return self._executor.profiler()

    def close(self) -> None:
        self._executor.close()


class Channel:
    """The engine's end of the socket."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # no message is ever dropped, and no step waits for its reader
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, _LINGER)
        self._socket.connect(address)

    def send(self, message: wire.FromEngine) -> None:
        self._socket.send(wire.encode(message))

    def receive(self) -> wire.ToEngine:
        """The next message, however long it takes."""
        return wire.decode_to_engine(self._socket.recv())

    def has_message(self, seconds: float) -> bool:
        """Whether there is one, or comes within that time."""
        return self._socket.poll(round(seconds * 1000)) != 0

    def waiting(self) -> Iterator[wire.ToEngine]:
        """The messages that are here already."""
        while self._socket.poll(0):
            yield self.receive()

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def main(address: str, parent: int, recorder: int, make_executor: Callable[..., Executor] = make_executor) -> None:
    """Serves the front-end that listens at `address` until this process is killed, by it or with it.

    Args:
        parent: the front-end's process id.
        recorder: descriptor of the flight recorder.
        make_executor: what a test puts in the place of the executor, to make it fail.
    """
    _die_with(parent)
    channel = Channel(address)
    try:
        start = channel.receive()
        if not isinstance(start, wire.Start):
            raise TypeError(f"the first message was {start!r}")
        configure_logging(start.log_level)
        try:
            core = _load(start, channel, FlightRecorder(recorder), make_executor)
        except (ConfigError, ModelError) as error:
            channel.send(wire.Refused("ConfigError" if isinstance(error, ConfigError) else "ModelError", str(error)))
            sys.exit(1)
        channel.send(wire.Ready(core.executor.boot_report))
        _serve(core, channel)
    finally:
        channel.close()


def _die_with(parent: int) -> None:
    """The kernel kills this process as soon as its parent is gone, even in the middle of a step, even when stopped."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it was gone before
        sys.exit(1)


def _load(
    start: wire.Start, channel: Channel, recorder: FlightRecorder, make_executor: Callable[..., Executor]
) -> EngineCore:
    told = 0.0

    def on_load(share: float) -> None:
        nonlocal told
        if share - told >= _LOAD_NEWS:
            told = share
            channel.send(wire.Loading(share))

    checkpoint = open_checkpoint(Path(start.config.model))
    model = model_config(checkpoint.config, checkpoint.generation_config)
    executor = make_executor(start.config, model, checkpoint, start.vocab_size, on_load)
    executor.watch(recorder.beat)
    return EngineCore(start.config, RecordedExecutor(executor, recorder))


def _serve(core: EngineCore, channel: Channel) -> NoReturn:
    """Steps as long as there is work; messages are taken in between. An error in a step ends the process: its traceback
    goes to stderr, and the front-end starts another one."""
    while True:
        if not core.has_unfinished:
            while not channel.has_message(_IDLE_LOOK):
                core.executor.look()
        for message in channel.waiting():
            _take(message, core, channel)
        outputs = core.step()
        if outputs:
            channel.send(wire.Stepped([output for output in outputs if isinstance(output, SequenceOutput)]))


def _take(message: wire.ToEngine, core: EngineCore, channel: Channel) -> None:
    match message:
        case wire.Add(requests):
            sequences = [sequence for request in requests for sequence in request.sequences()]
            refused = [output for output in (_add(core, sequence) for sequence in sequences) if output is not None]
            if refused:
                channel.send(wire.Stepped(refused))
        case wire.Abort(seq_ids):
            for seq_id in seq_ids:
                core.abort(seq_id)
        case wire.Ask(number, "stats"):
            channel.send(wire.Answer(number, stats=core.stats()))
        case wire.Ask(number, "kv_snapshot"):
            channel.send(wire.Answer(number, kv_snapshot=core.kv_snapshot()))
        case _:
            raise TypeError(f"nothing is done with {message!r} here")


def _add(core: EngineCore, sequence: SequenceRequest) -> SequenceOutput | None:
    try:
        core.add(sequence)
    except RequestError as error:
        return SequenceOutput(sequence.seq_id, finish_reason="error", metrics=RequestMetrics(), error=str(error))
    return None
