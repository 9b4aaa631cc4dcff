"""The graph as plain data: values, weights and nodes that can be printed, compared, sliced and rewritten."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from octavo.errors import ModelError

DType = Literal["float32", "bfloat16", "int32"]
Rows = Literal["T", "S"]
Op = Literal[
    "embed", "linear", "rms_norm", "layer_norm", "rope", "attention", "silu_mul", "gelu_mul", "add", "moe",
    "softcap", "select_rows", "lm_head", "all_reduce", "gather", "send", "recv",
]  # fmt: skip
Attr = str | int | float | tuple[float, ...] | tuple[int, ...] | None

_SHORT: Mapping[str, str] = {"float32": "f32", "bfloat16": "bf16", "int32": "i32"}


@dataclass(frozen=True, slots=True)
class Value:
    """An edge: what one node writes and later nodes read. It is rounded to `dtype` once, where it is written."""

    name: str  # unique in its graph
    dtype: DType
    rows: Rows  # T: the tokens of a step; S: the rows whose logits are needed
    width: int | None  # None: one number per row

    def __str__(self) -> str:
        width = "" if self.width is None else f", {self.width}"
        return f"{self.name}: {_SHORT[self.dtype]}[{self.rows}{width}]"


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the checkpoint, under its internal name, and the precision that the arithmetic sees it at."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name}: {_SHORT[self.dtype]}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Node:
    """One op. `trace.py` says what each op means, and which inputs, weights and attributes it has."""

    op: Op
    inputs: tuple[Value, ...]
    weights: tuple[Weight, ...]
    attrs: Mapping[str, Attr]
    output: Value

    def integer(self, attr: str) -> int:
        value = self.attrs[attr]
        assert isinstance(value, int)
        return value

    def __str__(self) -> str:
        arguments = [value.name for value in self.inputs] + [str(weight) for weight in self.weights]
        arguments += [f"{name}={_attr(value)}" for name, value in self.attrs.items() if value is not None]
        return f"{self.output} = {self.op}({', '.join(arguments)})"


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose keys and values share blocks: a block of the KV cache holds those of all of them, and no others."""

    window: int | None  # a token sees itself and the window - 1 before it; what lies further back need not be kept
    layers: tuple[int, ...]  # those that the graph has: a stage of a pipeline may have none of some group


@dataclass(frozen=True, slots=True)
class Graph:
    """A model, or a part of one, as a flat list of nodes in the order in which they run.

    The KV cache is not a value: each `attention` node names its layer, and reads and writes that layer's cache.
    """

    inputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    output: Value
    kv_groups: tuple[KVGroup, ...]  # of the whole model, see `group_layers`: all its parts have the same block tables

    @property
    def weights(self) -> dict[str, Weight]:
        """Every weight that some node reads, by name, in order of first use."""
        return {weight.name: weight for node in self.nodes for weight in node.weights}

    @property
    def kv_shapes(self) -> dict[int, tuple[int, int]]:
        """(num_kv_heads, head_dim) of the KV cache of each layer that has one."""
        attention = [node for node in self.nodes if node.op == "attention"]
        return {node.integer("layer"): (node.integer("num_kv_heads"), node.integer("head_dim")) for node in attention}

    @property
    def kv_block_width(self) -> int:
        """Numbers that a block of the KV cache holds of each of its tokens: those of the largest group."""
        shapes = self.kv_shapes
        return max((sum(2 * shapes[i][0] * shapes[i][1] for i in group.layers) for group in self.kv_groups), default=0)

    def check_weights(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Hold a checkpoint against the graph before anything is loaded.

        Args:
            shapes: shape of each tensor of the checkpoint, by internal name.

        Raises:
            ModelError: a weight is missing or has another shape, or the checkpoint has tensors that no node reads (its
                configuration then describes another model).
        """
        weights = self.weights
        for name, weight in weights.items():
            if name not in shapes:
                raise ModelError(f"tensor {name} of shape {weight.shape} is missing from the checkpoint")
            if tuple(shapes[name]) != weight.shape:
                found = tuple(shapes[name])
                raise ModelError(
                    f"tensor {name} has shape {found}, but the model's configuration asks for {weight.shape}"
                )
        unread = sorted(set(shapes) - set(weights))
        if unread:
            raise ModelError(
                f"{len(unread)} tensors of the checkpoint have no place in the model that its configuration describes, "
                f"such as {unread[0]} of shape {tuple(shapes[unread[0]])}"
            )

    def __str__(self) -> str:
        head = f"graph({', '.join(map(str, self.inputs))}) -> {self.output}"
        return "\n".join([head, *(f"  {node}" for node in self.nodes)])


def group_layers(nodes: Iterable[Node]) -> tuple[KVGroup, ...]:
    """How the layers of a model share blocks; groups that keep everything come first.

    Layers of one kind (window and shape) are cut into groups of as many as the rarest kind has, so that blocks of
    all groups hold about equally much and can come from one pool. Gemma 3 270M, 15 local and 3 global layers::

        layers   0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17     G: global
                           G            G                 G
        groups   (5 11 17) (0 1 2) (3 4 6) (7 8 9) (10 12 13) (14 15 16)
    """
    kinds: dict[tuple[int | None, int, int], list[int]] = {}
    for node in nodes:
        if node.op == "attention":
            window = None if node.attrs["window"] is None else node.integer("window")
            kind = (window, node.integer("num_kv_heads"), node.integer("head_dim"))
            kinds.setdefault(kind, []).append(node.integer("layer"))
    size = min(map(len, kinds.values()), default=1)
    groups = [
        KVGroup(window, tuple(layers[first : first + size]))
        for (window, _, _), layers in kinds.items()
        for first in range(0, len(layers), size)
    ]
    return tuple(sorted(groups, key=lambda group: group.window is not None))


def _attr(value: Attr) -> str:
    if isinstance(value, tuple):
        shown = [f"{item:g}" for item in value]
        if len(shown) > 4:
            shown[2:-1] = ["..."]
        return f"[{', '.join(shown)}]"
    return f"{value:g}" if isinstance(value, float) else str(value)
