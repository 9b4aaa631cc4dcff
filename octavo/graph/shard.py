"""Tensor parallelism as a pass over the graph: every layer is divided among `size` workers, without a look at names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import lcm

from octavo.errors import ConfigError
from octavo.graph.graph import Attr, Graph, Node, Value, Weight

VOCAB_UNIT = 16  # rows of an embedding that stay together
WIDTH_UNIT = 32  # columns of a product that stay together: what activations in few bits are scaled by
_GATES = ("silu_mul", "gelu_mul")

Range = tuple[int, int]  # begin, end


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a weight that a worker holds: [begin, end) of its rows (axis 0) or columns (axis 1)."""

    axis: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Shard:
    """What one worker runs."""

    graph: Graph
    cuts: Mapping[str, Cut]  # of the weights that it has not whole, by name


def shard(graph: Graph, size: int, rank: int, column_block: Callable[[str], int]) -> Shard:
    """The part of worker `rank` of `size`. Each op's input is whole, or divided by heads or by columns::

        x ──┬─ q, k, v: rows ── rope ── attention ── o: columns ──► partial sums ── all_reduce ── add
            │                 (own heads, own KV cache)
            └─ gate, up: rows ── silu_mul ────── down: columns ──► partial sums ── all_reduce ── add

    Heads are dealt by KV heads, each with the query heads that read it, and larger shares first: 3 KV heads over 2
    workers are 2 and 1. Of more workers than KV heads, several hold the same one and share its query heads. The
    vocabulary is dealt too: `embed` gives zeros for ids of others, and logits are gathered at rank 0.

    Args:
        column_block: by name of a weight, how many of its columns its file stores as one block (1 where it stores
            numbers); a block is never divided.

    Raises:
        ConfigError: there are not enough heads, columns or blocks for so many workers; or the model has an op between
            two of these places that can only run on the whole of its input.
    """
    if size == 1:
        return Shard(graph, {})
    return _Sharding(graph, size, rank, column_block).run()


def deal(count: int, size: int) -> list[Range]:
    """`count` units dealt to `size` workers, side by side, as evenly as can be, larger shares first."""
    least, extra = divmod(count, size)
    starts = [least * rank + min(rank, extra) for rank in range(size + 1)]
    return list(pairwise(starts))


class _Sharding:
    def __init__(self, graph: Graph, size: int, rank: int, column_block: Callable[[str], int]) -> None:
        self._graph = graph
        self._size = size
        self._rank = rank
        self._column_block = column_block
        self._columns: dict[str, Range] = {}  # of the values that this worker has not whole, by name
        self._cuts: dict[str, Cut] = {}
        self._nodes: list[Node] = []

    def run(self) -> Shard:
        if any(node.op == "lm_head" for node in self._graph.nodes):
            self._note(self._graph.output, self._deal_units(self._graph.output, VOCAB_UNIT)[self._rank])
        for node in reversed(self._graph.nodes):
            self._divide(node)
        for node in self._graph.nodes:
            self._rewrite(node)
        output = self._value(self._graph.output)
        if output.name in self._columns:
            widths = tuple(end - begin for begin, end in self._deal_units(self._graph.output, VOCAB_UNIT))
            output = self._add(Node("gather", (output,), (), {"widths": widths}, self._renamed(self._graph.output)))
        return Shard(Graph(self._graph.inputs, tuple(self._nodes), output, self._graph.kv_groups), self._cuts)

    # Backwards: who is divided

    def _divide(self, node: Node) -> None:
        """Notes which columns of this op's inputs, or of its output, this worker has."""
        own = self._columns.get(node.output.name)
        if node.op == "attention":
            heads, kv_heads = self._deal_heads(node)
            for value, (begin, end) in zip(
                (node.output, *node.inputs), (heads, heads, kv_heads, kv_heads), strict=True
            ):
                head_dim = node.integer("head_dim")
                self._note(value, (begin * head_dim, end * head_dim))
        elif node.op in _GATES:
            columns = self._deal_units(node.output, self._unit_of_readers(node.output))[self._rank]
            for value in (node.output, *node.inputs):
                self._note(value, columns)
        elif own is not None and node.op in ("rope", "rms_norm", "softcap"):
            if node.op == "rms_norm" and (own[1] - own[0]) % node.weights[0].shape[0]:
                raise self._refused(f"{node.output.name} is normed over all its columns")
            self._note(node.inputs[0], own)
        elif own is not None and node.op not in ("linear", "lm_head"):
            raise self._refused(f"the op {node.op} cannot be divided")

    def _note(self, value: Value, columns: Range) -> None:
        if self._columns.setdefault(value.name, columns) != columns:
            raise self._refused(f"{value.name} is read by heads and by columns")

    def _deal_heads(self, node: Node) -> tuple[Range, Range]:
        """This worker's query heads and KV heads."""
        kv_heads, size, rank = node.integer("num_kv_heads"), self._size, self._rank
        per_kv_head = node.integer("num_heads") // kv_heads
        if size <= kv_heads:
            begin, end = deal(kv_heads, size)[rank]
            return (begin * per_kv_head, end * per_kv_head), (begin, end)
        holders = size // kv_heads  # of each KV head
        if size % kv_heads or holders > per_kv_head:
            raise self._refused(
                f"{kv_heads} KV heads of {per_kv_head} query heads each; give at most {kv_heads}, or a multiple of it "
                f"up to {kv_heads * per_kv_head}"
            )
        kv_head, place = divmod(rank, holders)
        begin, end = deal(per_kv_head, holders)[place]
        return (kv_head * per_kv_head + begin, kv_head * per_kv_head + end), (kv_head, kv_head + 1)

    def _deal_units(self, value: Value, unit: int) -> list[Range]:
        """The columns of a value, dealt in units; the last may be short."""
        width = _width(value)
        count = -(-width // unit)
        if count < self._size:
            raise self._refused(f"a width of {width} has {count} units of {unit}; give at most {count}")
        return [(begin * unit, min(end * unit, width)) for begin, end in deal(count, self._size)]

    def _unit_of_readers(self, value: Value) -> int:
        readers = [node for node in self._graph.nodes if value in node.inputs and node.op == "linear"]
        return lcm(WIDTH_UNIT, *(self._column_block(node.weights[0].name) for node in readers))

    # Forwards: the new graph

    def _rewrite(self, node: Node) -> None:
        self._check_readable(node)
        if node.op == "embed":
            self._embed(node)
        elif node.op == "linear" and node.inputs[0].name in self._columns:
            self._partial(node)
        else:
            weights, attrs = node.weights, dict(node.attrs)
            if node.op in ("linear", "lm_head") and node.output.name in self._columns:
                weights = tuple(self._cut(weight, 0, self._columns[node.output.name]) for weight in weights)
            if node.op == "attention":
                attrs |= self._own_heads(node)
            self._add(Node(node.op, tuple(map(self._value, node.inputs)), weights, attrs, self._value(node.output)))

    def _check_readable(self, node: Node) -> None:
        """What is divided is read by ops that divide their output alike, or sum over it: any other needs all of it."""
        divided = next((value for value in node.inputs if value.name in self._columns), None)
        if divided is None:
            return
        sums = node.op in ("linear", "lm_head")
        if (node.output.name in self._columns) == sums:
            raise self._refused(
                f"{divided.name} is divided, and the {node.op} that makes {node.output.name} needs it whole"
            )

    def _embed(self, node: Node) -> None:
        (weight,) = node.weights
        rows = Value(weight.name, weight.dtype, "T", weight.shape[0])
        own = self._deal_units(rows, VOCAB_UNIT)[self._rank]
        output = replace(node.output, name=f"{node.output.name}.partial")
        self._add(Node("embed", node.inputs, (self._cut(weight, 0, own),), {**node.attrs, "first": own[0]}, output))
        self._add(Node("all_reduce", (output,), (), {}, node.output))

    def _partial(self, node: Node) -> None:
        """A product over the columns that this worker has; the bias is added once, by rank 0."""
        begin, end = self._columns[node.inputs[0].name]
        weight, *bias = node.weights
        block = self._column_block(weight.name)
        if begin % block or end % block:
            raise self._refused(
                f"columns {begin} to {end} of {weight.name} do not end with its file's blocks of {block}; give another "
                "number, or a file with smaller blocks (such as Q8_0)"
            )
        weights = (self._cut(weight, 1, (begin, end)), *(bias if self._rank == 0 else ()))
        output = replace(node.output, name=f"{node.output.name}.partial", dtype="float32")
        self._add(Node("linear", (self._value(node.inputs[0]),), weights, node.attrs, output))
        self._add(Node("all_reduce", (output,), (), {}, node.output))

    def _own_heads(self, node: Node) -> dict[str, Attr]:
        heads, kv_heads = self._deal_heads(node)
        return {"num_heads": heads[1] - heads[0], "num_kv_heads": kv_heads[1] - kv_heads[0]}

    def _cut(self, weight: Weight, axis: int, columns: Range) -> Weight:
        cut = Cut(axis, *columns)
        if columns == (0, weight.shape[axis]):
            return weight
        if self._cuts.setdefault(weight.name, cut) != cut:
            raise self._refused(f"{weight.name} would be divided in two ways")
        shape = list(weight.shape)
        shape[axis] = cut.end - cut.begin
        return replace(weight, shape=tuple(shape))

    def _value(self, value: Value) -> Value:
        """As this worker has it."""
        if value.name not in self._columns:
            return value
        begin, end = self._columns[value.name]
        return replace(value, width=end - begin)

    def _renamed(self, value: Value) -> Value:
        return replace(value, name=f"{value.name}.whole")

    def _add(self, node: Node) -> Value:
        self._nodes.append(node)
        return node.output

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(f"tensor_parallel_size={self._size}: {why}")


def _width(value: Value) -> int:
    assert value.width is not None
    return value.width
