"""Workers as Ray actors: one model over several processes, on one host or on many.

::

    driver (this process)                        a Ray actor for each worker
      RayExecutor ── placement group, actors ──►   RayWorker          Ray: where they run, and whether they live
         submit ──── Step, over a socket ──────►     Worker ◄──┐
        collect ◄─── Stepped, from who samples ──      │       │ collectives: torch.distributed
                                                     Worker ◄──┘
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
import zmq
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from octavo.config import EngineConfig, ModelConfig
from octavo.core import StepPlan, StepResult
from octavo.errors import ConfigError, ModelError, OctavoError
from octavo.executor.base import Executor
from octavo.executor.messages import (
    Allocate,
    Failed,
    FromWorker,
    Load,
    Loaded,
    Loading,
    Step,
    Stepped,
    decode_from_worker,
    encode,
)
from octavo.executor.ray_worker import RayWorker, Traffic, Whereabouts
from octavo.graph import KVGroup
from octavo.metrics import Profiler, log_event
from octavo.models import build_graph
from octavo.weights import Checkpoint
from octavo.worker import BootReport, MemoryPlan, Place, part_of

COLLECTIVE_DEADLINE = 300.0  # seconds that a worker waits for the others in a step
ROOM_PATIENCE = 15.0  # seconds in which room has to become free: workers that ended give theirs back a little later
LOOK_INTERVAL = 0.2  # seconds between looks at whether the workers live, while nothing is heard of them
LOST_PATIENCE = 1.0  # seconds in which Ray notices that a process is gone
SIGN_INTERVAL = 1.0  # seconds between questions whether they get on


class WorkerLostError(OctavoError):
    """A worker's process, or its host, is gone, and what the workers know with it."""


@dataclass(slots=True)
class _Link:
    """A worker, as the driver knows it."""

    actor: Any
    serving: Any  # Ray's reference to its `serve`, which ends only with the worker
    socket: zmq.Socket[bytes]
    place: Place
    where: Whereabouts
    loaded: float = 0.0  # share of its weights
    cpu_seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.place} on {self.where.host}"


class RayExecutor(Executor):
    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        checkpoint: Checkpoint,
        vocab_size: int,
        on_load: Callable[[float], None] | None = None,
    ) -> None:
        """See `Worker`. The model's path has to exist on every host.

        Raises:
            ConfigError: the model cannot be divided so, or the cluster cannot be reached, or it has not the room.
            OctavoError: a worker died as it loaded its part.
        """
        _check_division(config, model, checkpoint)
        self.num_messages = self.num_bytes = 0  # sent to workers so far
        self._config = config
        self._on_load = on_load or (lambda share: None)
        self._sign: Callable[[], None] = lambda: None
        self._untold: list[list[int]] = []  # sampled token ids of steps that only the worker who sampled knows of
        self._failure: OctavoError | None = None  # of a step
        self._links: list[_Link] = []
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._group: PlacementGroup | None = None
        self._owns_cluster = _connect_to_cluster(config.ray_address)
        self._closed = False
        try:
            self._start_workers()
            self._load(replace(config, model=str(checkpoint.path)), vocab_size)
            self._boot_report = self._allocate()
        except BaseException:
            self.close()
            raise

    @property
    def boot_report(self) -> BootReport:
        return self._boot_report

    @property
    def depth(self) -> int:
        return self._config.pipeline_parallel_size

    def watch(self, sign: Callable[[], None]) -> None:
        self._sign = sign

    def submit(self, plan: StepPlan) -> None:
        if self._closed:
            raise OctavoError("the engine is closed")
        if self._failure is not None:  # those that are left wait for nobody
            raise OctavoError(f"the workers cannot go on after: {self._failure}; make a new engine") from self._failure
        who_samples, others = encode(Step(plan, [])), encode(Step(plan, self._untold))
        self._untold = []
        for link in self._links:
            self._send(link, who_samples if link.place.samples else others)

    def collect(self) -> StepResult:
        try:
            link, message = self._receive()
        except OctavoError as error:
            self._failure = error
            raise
        if not isinstance(message, Stepped):
            raise OctavoError(f"{link} said {message!r} in the middle of a step")
        self._untold.append(message.result.token_ids)
        return message.result

    def traffic(self) -> list[Traffic]:
        """What each worker has sent to others so far."""
        return [Traffic(*sent) for sent in ray.get([link.actor.traffic.remote() for link in self._links])]

    def profiler(self) -> Profiler:
        raise ConfigError("distributed_executor_backend='ray' cannot be profiled; leave it out")

    def close(self) -> None:
        """Ends the workers, and the cluster if this executor started it. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for link in self._links:
            link.socket.close(linger=0)
            ray.kill(link.actor)
        self._context.term()
        if self._group is not None:
            remove_placement_group(self._group)
        if self._owns_cluster:
            ray.shutdown()

    # Starting

    def _start_workers(self) -> None:

        config = self._config
        count = config.tensor_parallel_size * config.pipeline_parallel_size
        resource = "GPU" if config.device.startswith("cuda") else "CPU"
        each = 1 if resource == "GPU" else _threads(config, count)
        self._config = config if resource == "GPU" else replace(config, num_threads=each)
        self._group = _place(resource, each, count)
        actor = ray.remote(RayWorker)
        actors: list[Any] = []
        for bundle in range(count):
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
            options = {"num_cpus": each} if resource == "CPU" else {"num_gpus": each, "num_cpus": 0}
            actors.append(actor.options(max_concurrency=4, scheduling_strategy=strategy, **options).remote())
        addresses = _addresses(actors)
        where: list[Whereabouts] = ray.get(
            [a.where.remote(address) for a, address in zip(actors, addresses, strict=True)]
        )
        # Neighbours in a stage come to lie on one host, as far as Ray's placement has it.
        order = sorted(range(count), key=lambda i: where[i].address)
        own_address = ray.util.get_node_ip_address()
        for index, i in enumerate(order):
            neighbours = sum(other.address == where[i].address for other in where)
            place = Place(index, config.tensor_parallel_size, config.pipeline_parallel_size, neighbours)
            channel = self._context.socket(zmq.PAIR)
            channel.setsockopt(zmq.SNDHWM, 0)
            channel.setsockopt(zmq.RCVHWM, 0)
            port = channel.bind_to_random_port(f"tcp://{own_address}")
            serving = actors[i].serve.remote(f"tcp://{own_address}:{port}")
            self._links.append(_Link(actors[i], serving, channel, place, where[i]))
            self._poller.register(channel, zmq.POLLIN)

    def _load(self, config: EngineConfig, vocab_size: int) -> None:
        first = self._links[0].where
        level = logging.getLogger("octavo").getEffectiveLevel()
        config = replace(config, num_threads=self._config.num_threads)
        for link in self._links:
            meeting = (first.address, first.free_port)
            self._send(link, encode(Load(config, vocab_size, link.place, meeting, COLLECTIVE_DEADLINE, level)))

    def _allocate(self) -> BootReport:
        reports = self._loaded()
        num_blocks = min(report.memory.num_blocks for report in reports)
        num_swap_blocks = min(report.memory.num_swap_blocks for report in reports)
        for link in self._links:
            self._send(link, encode(Allocate(num_blocks, num_swap_blocks)))
        return _together(self._loaded(), [str(link) for link in self._links])

    def _loaded(self) -> list[BootReport]:
        """What all workers report, in order."""
        reports: dict[int, BootReport] = {}
        while len(reports) < len(self._links):
            link, message = self._receive()
            match message:
                case Loading(share):
                    link.loaded = share
                    self._on_load(min(link.loaded for link in self._links))
                case Loaded(boot_report):
                    link.loaded = 1.0
                    reports[link.place.index] = boot_report
                case _:
                    raise OctavoError(f"{link} said {message!r} as it loaded")
        return [reports[index] for index in sorted(reports)]

    # Talking

    def _send(self, link: _Link, data: bytes) -> None:
        self.num_messages += 1
        self.num_bytes += len(data)
        link.socket.send(data)

    def _receive(self) -> tuple[_Link, FromWorker]:
        """The next message of any worker.

        Raises:
            WorkerLostError: one is gone.
            ModelError, ConfigError, OctavoError: one has failed.
        """
        asked = time.monotonic()
        while True:
            ready = dict(self._poller.poll(round(LOOK_INTERVAL * 1000)))
            for link in self._links:
                if link.socket in ready:
                    message = decode_from_worker(link.socket.recv())
                    if isinstance(message, Failed):
                        self._look_for_the_cause()
                        raise _ERRORS[message.kind](f"{link}: {message.message}")
                    return link, message
            self.look()
            if time.monotonic() - asked > SIGN_INTERVAL:
                asked = time.monotonic()
                self._ask_for_signs()

    def _look_for_the_cause(self) -> None:
        """A worker has failed, perhaps since another is gone, of which Ray hears later: that one is to be named."""
        deadline = time.monotonic() + LOST_PATIENCE
        while time.monotonic() < deadline and len(self._links) > 1:
            self.look()
            time.sleep(LOOK_INTERVAL / 4)

    def look(self) -> None:
        """Raises WorkerLostError if a worker is gone."""
        ended, _ = ray.wait([link.serving for link in self._links], num_returns=len(self._links), timeout=0)
        for link in self._links:
            if link.serving in ended:
                try:
                    ray.get(link.serving)
                except ray.exceptions.RayActorError as error:
                    reason = " ".join(str(error).split())[:300]
                    raise WorkerLostError(f"{link} is gone: {reason}") from error
                except ray.exceptions.RayTaskError:
                    continue  # it has said so itself

    def _ask_for_signs(self) -> None:
        """Whether the workers get on: whether one's processor time has grown since it was last asked."""
        asked = [link.actor.cpu_seconds.remote() for link in self._links]
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=LOOK_INTERVAL)
        grown = False
        for link, question in zip(self._links, asked, strict=True):
            if question in answered:
                with contextlib.suppress(ray.exceptions.RayActorError):  # `look` says so
                    now: float = ray.get(question)
                    grown |= now - link.cpu_seconds > 0.05 * SIGN_INTERVAL
                    link.cpu_seconds = now
        if grown and len(answered) == len(asked):
            self._sign()


_ERRORS: dict[str, type[OctavoError]] = {
    "ModelError": ModelError,
    "ConfigError": ConfigError,
    "OctavoError": OctavoError,
}


def _check_division(config: EngineConfig, model: ModelConfig, checkpoint: Checkpoint) -> None:
    """Refuses what cannot be divided so, before anything is started."""
    size, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    graph = build_graph(model, "bfloat16")
    for index in range(size * stages):
        part_of(graph, checkpoint.tensors, Place(index, size, stages))


def _connect_to_cluster(address: str | None) -> bool:
    """Returns whether this process is now a driver, and with a local cluster its owner. Signals stay as they were: Ray
    would end the process at a SIGTERM that is not for it."""
    if ray.is_initialized():
        return False
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": True, "configure_logging": False}
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        if address is not None:
            ray.init(address=address, **options)
        else:
            ray.init(address="local", include_dashboard=False, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        where = "a local Ray cluster cannot be started" if address is None else f"ray_address={address!r}"
        raise ConfigError(f"{where}: {str(error).strip().splitlines()[0]}") from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)
    return True


def _threads(config: EngineConfig, count: int) -> int:
    """Compute threads of each worker: as asked, else an equal part of the cluster's."""
    if config.num_threads is not None:
        return config.num_threads
    return max(1, int(ray.cluster_resources().get("CPU", 0)) // count)


def _place(resource: str, each: int, count: int) -> PlacementGroup:
    """Room for the workers, as close together as can be.

    Raises:
        ConfigError: there is not so much; the message has the numbers.
    """
    needed, total = each * count, ray.cluster_resources().get(resource, 0)
    what = f"{count} workers of {each} {resource}{'s' * (each > 1)} each need {needed}, and the cluster has"
    if needed > total:
        raise ConfigError(f"{what} {total:g}; give fewer workers or threads, or a larger cluster")
    deadline = time.monotonic() + ROOM_PATIENCE
    while (free := ray.available_resources().get(resource, 0)) < needed:
        if time.monotonic() > deadline:
            raise ConfigError(f"{what} {free:g} free of {total:g}; end what else is there, or give fewer")
        time.sleep(LOOK_INTERVAL)
    group: PlacementGroup = placement_group([{resource: each}] * count, strategy="PACK")
    if not group.wait(ROOM_PATIENCE):
        remove_placement_group(group)
        raise ConfigError(
            f"{what} {free:g} free of {total:g}, but no host enough for a whole worker; give fewer threads"
        )
    return group


def _addresses(actors: Sequence[Any]) -> list[str]:
    """Of the hosts that these actors are on."""
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    found = ray.get([actor.__ray_call__.remote(_node_id) for actor in actors])
    return [nodes[node_id] for node_id in found]


def _node_id(worker: RayWorker) -> str:

    node_id: str = ray.get_runtime_context().get_node_id()
    return node_id


def _together(reports: Sequence[BootReport], names: Sequence[str]) -> BootReport:
    """One report of all workers: bytes are summed, blocks are the same everywhere."""
    first = reports[0]
    memories = [report.memory for report in reports]
    layers: list[set[int]] = [set() for _ in first.memory.kv_groups]
    for memory in memories:
        for group, found in zip(memory.kv_groups, layers, strict=True):
            found.update(group.layers)
    groups = tuple(
        KVGroup(group.window, tuple(sorted(found))) for group, found in zip(first.memory.kv_groups, layers, strict=True)
    )

    def total(of: Callable[[MemoryPlan], int]) -> int:
        return sum(map(of, memories))

    memory = replace(
        first.memory,
        memory_limit=total(lambda m: m.memory_limit),
        weight_bytes=total(lambda m: m.weight_bytes),
        kv_bytes_per_token=total(lambda m: m.kv_bytes_per_token),
        block_bytes=total(lambda m: m.block_bytes),
        kv_groups=groups,
    )
    lines = tuple(
        f"{name}: {report.backend}; weights {report.memory.weight_bytes} bytes"
        for name, report in zip(names, reports, strict=True)
    )
    log_event("workers_ready", {"workers": len(names), "num_blocks": memory.num_blocks})
    return replace(
        first,
        backend=f"ray, {len(names)} workers: {first.backend}",
        load_seconds=max(report.load_seconds for report in reports),
        memory=memory,
        workers=lines,
    )
