"""Which part of a model a worker runs, where several share it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.graph import Graph, pipeline_stage, shard
from octavo.weights import WeightTensor
from octavo.weights.quants import TYPES


@dataclass(frozen=True, slots=True)
class Place:
    """A worker's place among those of one model: rank `index % T` of the T that divide each layer of a stage."""

    index: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    neighbours: int = 1  # workers on the same host, itself included, that share its memory

    @property
    def rank(self) -> int:
        return self.index % self.tensor_parallel_size

    @property
    def stage(self) -> int:
        return self.index // self.tensor_parallel_size

    @property
    def samples(self) -> bool:
        """As of `Collectives`."""
        return self.rank == 0 and self.stage == self.pipeline_parallel_size - 1

    @property
    def alone(self) -> bool:
        return self.tensor_parallel_size * self.pipeline_parallel_size == 1

    def __str__(self) -> str:
        return f"worker {self.index} (stage {self.stage}, rank {self.rank})"


def part_of(
    graph: Graph, tensors: Mapping[str, WeightTensor], place: Place
) -> tuple[Graph, Mapping[str, WeightTensor]]:
    """What the worker at `place` runs, and its parts of the weights; nothing of them is read yet.

    Raises:
        ConfigError: the model cannot be divided so.
        ModelError: the checkpoint lacks a tensor, or one has another shape than the whole model's graph asks for.
    """
    if place.alone:
        return graph, tensors
    graph.check_weights({name: tensor.shape for name, tensor in tensors.items()})
    stage = pipeline_stage(graph, place.pipeline_parallel_size, place.stage)
    part = shard(stage, place.tensor_parallel_size, place.rank, lambda name: TYPES[tensors[name].dtype].block)
    own: dict[str, WeightTensor] = {}
    for name in part.graph.weights:
        cut = part.cuts.get(name)
        own[name] = tensors[name] if cut is None else tensors[name].part(cut.axis, cut.begin, cut.end)
    return part.graph, own
