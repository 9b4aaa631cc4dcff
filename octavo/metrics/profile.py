"""What a profile holds: the cost of each op, and what the machine could do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class OpProfile:
    """One op of the program, or all ops of one kind and shape, over the steps that were timed.

    A weight, and a key or value that a sequence sees, counts once a step, however often a cache serves it again.
    """

    kind: str  # with what is fused into it: "matmul+silu_mul"
    shape: str
    runs: int
    seconds: float  # waiting for the slowest thread included
    flops: float  # an FMA is two; conversions, exp and the like are not counted
    weight_bytes: float  # as packed
    kv_bytes: float  # read or written
    other_bytes: float  # activations, tables, logits; mostly in caches

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes + self.other_bytes


@dataclass(frozen=True, slots=True)
class Roofline:
    """What the threads of the engine reach on this machine, measured; bytes or operations a second."""

    memory_bytes: float  # a plain streaming read over 512 MiB, more than any cache holds
    weights_bytes: float  # the same over the model's packed weights
    product_bytes: float  # products of one row with each of the model's weights in turn, without barriers between them
    product_flops: float  # products of many rows, their operands in the nearest caches
    weights_size: float  # bytes

    def share(self, op: OpProfile) -> float:
        """Of the roofline min(product_flops, intensity * weights_bytes), as reached by the op, 0 to 1.

        Ops that find their operands in a cache may pass 1 where bytes are what limits them.
        """
        least = max(op.flops / self.product_flops, op.bytes / self.weights_bytes)
        return least / op.seconds if op.seconds > 0 else 0.0


class Profiler(Protocol):
    """What a backend offers that can be profiled."""

    def start(self) -> None:
        """Times the steps to come."""

    def stop(self) -> list[OpProfile]:
        """What was timed since `start`: one entry an op, in the order in which they run, and one for sampling."""

    def measure_roofline(self) -> Roofline:
        """Takes a few seconds, on all threads of the backend."""


def merge(ops: Iterable[OpProfile]) -> list[OpProfile]:
    """Ops of one kind and shape as one, the longest time first."""
    groups: dict[tuple[str, str], list[OpProfile]] = {}
    for op in ops:
        groups.setdefault((op.kind, op.shape), []).append(op)
    merged = [
        OpProfile(
            kind,
            shape,
            runs=sum(op.runs for op in group),
            seconds=sum(op.seconds for op in group),
            flops=sum(op.flops for op in group),
            weight_bytes=sum(op.weight_bytes for op in group),
            kv_bytes=sum(op.kv_bytes for op in group),
            other_bytes=sum(op.other_bytes for op in group),
        )
        for (kind, shape), group in groups.items()
    ]
    return sorted(merged, key=lambda op: -op.seconds)
