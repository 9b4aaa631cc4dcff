"""A worker as a Ray actor. Ray places it and watches over it; steps come over a socket of its own, in msgpack."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import zmq

from octavo.collectives import Collectives
from octavo.errors import ConfigError, ModelError, OctavoError
from octavo.executor.messages import (
    Allocate,
    Failed,
    FromWorker,
    Load,
    Loaded,
    Loading,
    Step,
    Stepped,
    decode_to_worker,
    encode,
)
from octavo.metrics import configure_logging
from octavo.models import model_config
from octavo.weights import open_checkpoint
from octavo.worker import Worker

_LOAD_NEWS = 0.01  # of the weights: no more often is it told how many are loaded
_LINGER = 2000  # milliseconds in which a last message may still leave


_Send = Callable[[FromWorker], None]


class Whereabouts(NamedTuple):
    host: str
    address: str  # of the host
    free_port: int  # for the meeting of the collectives, should this become worker 0


class Traffic(NamedTuple):
    """What a worker has sent to other workers so far."""

    num_messages: int
    num_bytes: int


class RayWorker:
    """One thread of the actor is in `serve` as long as it lives; the others answer how it is."""

    def __init__(self) -> None:
        self._collectives: Collectives | None = None

    def where(self, address: str) -> Whereabouts:
        """
        Args:
            address: of this host, as the cluster knows it.
        """
        with socket.socket() as probe:
            probe.bind((address, 0))
            return Whereabouts(socket.gethostname(), address, probe.getsockname()[1])

    def cpu_seconds(self) -> float:
        """Of all threads of this process: as long as they grow, it gets on."""
        return time.process_time()

    def traffic(self) -> Traffic:
        collectives = self._collectives
        return Traffic(0, 0) if collectives is None else Traffic(collectives.num_messages, collectives.num_bytes)

    def serve(self, address: str) -> None:
        """Does what the driver at `address` says, until one of them is gone."""
        context = zmq.Context()
        channel = context.socket(zmq.PAIR)
        channel.setsockopt(zmq.SNDHWM, 0)  # no message is ever dropped
        channel.setsockopt(zmq.RCVHWM, 0)
        channel.setsockopt(zmq.LINGER, _LINGER)
        channel.connect(address)

        def send(message: FromWorker) -> None:
            channel.send(encode(message))

        try:
            self._serve(channel, send)
        except (ModelError, ConfigError) as error:
            send(Failed("ModelError" if isinstance(error, ModelError) else "ConfigError", str(error)))
        except OctavoError as error:
            send(Failed("OctavoError", str(error)))
        except BaseException as error:
            send(Failed("OctavoError", f"{type(error).__name__}: {error}"))
            raise  # Ray prints where
        finally:
            channel.close()
            context.term()

    def _serve(self, channel: zmq.Socket[bytes], send: _Send) -> None:
        load = decode_to_worker(channel.recv())
        if not isinstance(load, Load):
            raise TypeError(f"the first message was {load!r}")
        worker = self._load(load, send)
        send(Loaded(worker.boot_report))
        while True:
            match decode_to_worker(channel.recv()):
                case Allocate(num_blocks, num_swap_blocks):
                    worker.allocate(num_blocks, num_swap_blocks)
                    send(Loaded(worker.boot_report))
                case Step(plan, sampled):
                    for token_ids in sampled:
                        worker.learn(token_ids)
                    result = worker.execute(plan)
                    if result is not None:
                        send(Stepped(result))
                case message:
                    raise TypeError(f"nothing is done with {message!r} here")

    def _load(self, load: Load, send: _Send) -> Worker:
        configure_logging(load.log_level)
        path = Path(load.config.model)
        if not path.exists():
            raise ModelError(f"{path}: not on {socket.gethostname()}; every host of the cluster needs the model there")
        told = 0.0

        def on_load(share: float) -> None:
            nonlocal told
            if share - told >= _LOAD_NEWS:
                told = share
                send(Loading(share))

        checkpoint = open_checkpoint(path)
        model = model_config(checkpoint.config, checkpoint.generation_config)
        if not load.place.alone:
            self._collectives = _connect(load)
        return Worker(
            load.config,
            model,
            checkpoint,
            load.vocab_size,
            on_load,
            place=load.place,
            collectives=self._collectives,
        )


def _connect(load: Load) -> Collectives:
    from octavo.collectives.torch_distributed import TorchCollectives  # torch is slow to import

    place = load.place
    device = "cuda:0" if load.config.device.startswith("cuda") else "cpu"  # Ray shows a worker only its own
    return TorchCollectives(
        load.meeting,
        place.index,
        place.tensor_parallel_size,
        place.pipeline_parallel_size,
        deadline=load.deadline,
        device=device,
    )
