"""What a graph becomes on its way to a native program: its nodes, with products of matrices as `Matmul`s."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from octavo.graph import Node, Value, Weight

PANEL = 16  # columns of a panel of a packed weight
Epilogue = Literal["store", "add", "silu_mul", "gelu_mul", "float"]  # float: a partial sum, not rounded


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one `linear` in a packed weight, 16 of them a panel: panels first_panel, + panel_step, ..."""

    weight: Weight  # [width, k]
    bias: Weight | None  # [width]
    first_panel: int = 0
    panel_step: int = 1

    @property
    def panels(self) -> int:
        return -(-self.weight.shape[0] // PANEL)


@dataclass(frozen=True, slots=True)
class Matmul:
    """x @ weights.T, as one pass over one packed weight, and what is done with each result while it is at hand."""

    x: Value
    parts: tuple[Part, ...]
    epilogue: Epilogue
    outputs: tuple[tuple[Value, int], ...]  # and the column at which each begins, in one buffer
    residual: Value | None = None  # of the epilogue "add"

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.x,) if self.residual is None else (self.x, self.residual)

    @property
    def width(self) -> int:
        """Columns written."""
        value, column = self.outputs[-1]
        return column + width_of(value)


Step = Node | Matmul


def outputs_of(step: Step) -> tuple[tuple[Value, int], ...]:
    """What a step writes, with each value's column in the step's buffer."""
    return step.outputs if isinstance(step, Matmul) else ((step.output, 0),)


def count_uses(steps: Sequence[Step]) -> Counter[str]:
    """How often each value is read."""
    return Counter(value.name for step in steps for value in step.inputs)


def width_of(value: Value) -> int:
    assert value.width is not None
    return value.width


def with_matmuls(nodes: Sequence[Node]) -> Iterator[Step]:
    """Each `linear` as a Matmul of its own."""
    for node in nodes:
        if node.op == "linear":
            part = Part(node.weights[0], node.weights[1] if len(node.weights) > 1 else None)
            epilogue: Epilogue = "float" if node.output.dtype == "float32" else "store"
            yield Matmul(node.inputs[0], (part,), epilogue, ((node.output, 0),))
        else:
            yield node
