"""From a graph to a native program: choose buffers, pack weights, and emit one native op a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from octavo.backends.cpu.fusion import fuse as fuse_steps
from octavo.backends.cpu.native import Program
from octavo.backends.cpu.packing import PackingJob, round_to_bfloat16, stored_width
from octavo.backends.cpu.steps import PANEL, Matmul, Part, Step, count_uses, outputs_of, width_of, with_matmuls
from octavo.errors import ConfigError
from octavo.graph import Graph, Node, Value, Weight
from octavo.weights import WeightTensor

Place = tuple[int, int]  # buffer, first column
Kind = tuple[int, bool, bool]  # of a buffer: its width, whether it is of selected rows, and of the residual stream
NOWHERE: Place = (-1, 0)
_MAX_HEAD_DIM = 256
_HEAD = ("lm_head", "softcap", "gather")  # what makes logits: float32, in memory of their own and not in a buffer
_ANY_ID = 2**31 - 1  # size of a vocabulary of which this worker only knows its part: ids of others give zeros


def check_graph(graph: Graph) -> None:
    """Refuse what the native runtime cannot run, before anything is loaded.

    Raises:
        ConfigError: an op, dtype or width of heads that it does not have.
    """
    instead = "use backend='torch'"
    for node in graph.nodes:
        if node.op not in _EMIT and node.op != "linear":
            raise ConfigError(f"backend='cpu': this model needs the op {node.op}, which it lacks; {instead}")
        if any(weight.dtype == "float32" for weight in node.weights if len(weight.shape) == 2):
            raise ConfigError(f"backend='cpu' computes in bfloat16, not in float32; {instead}")
    for _, head_dim in graph.kv_shapes.values():
        if head_dim % PANEL or head_dim > _MAX_HEAD_DIM:
            raise ConfigError(
                f"backend='cpu': heads of this model are {head_dim} wide, but it takes multiples of {PANEL} up to "
                f"{_MAX_HEAD_DIM}; {instead}"
            )


def lower(
    graph: Graph,
    weights: Mapping[str, WeightTensor],
    program: Program,
    *,
    fuse: bool,
    quantization: str | None,
) -> list[PackingJob]:
    """Build the graph's ops into an empty program, with room for the weights.

    Args:
        weights: the checkpoint's tensors by internal name.
        fuse: False leaves every op on its own; the results are the same bits.
        quantization: None holds each matrix at its file's own width, "none" in bfloat16, "int8" in int8.

    Returns:
        What is still to be packed.
    """
    steps = list(with_matmuls(graph.nodes))
    widths = {name: stored_width(tensor, quantization) for name, tensor in weights.items()}
    if fuse:
        steps = fuse_steps(steps, widths)
    groups = {layer: i for i, group in enumerate(graph.kv_groups) for layer in group.layers}
    program.set_num_groups(len(graph.kv_groups))
    program.set_vocab_size(_vocab_size(graph))
    lowering = _Lowering(program, weights, widths, groups)
    lowering.emit(steps)
    return lowering.jobs


class _Lowering:
    """Where each value lies, and which weights there are."""

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, WeightTensor],
        widths: Mapping[str, str],
        groups: Mapping[int, int],
    ) -> None:
        self.program = program
        self.groups = groups  # by layer: of those whose keys and values share blocks
        self.places: dict[str, Place] = {}
        self.jobs: list[PackingJob] = []
        self._tensors = weights
        self._widths = widths
        self._packed: dict[tuple[Part, ...], int] = {}
        self._rotations: dict[tuple[tuple[float, ...], float], int] = {}
        self._kinds: list[Kind] = []  # of each buffer
        self._free: dict[Kind, list[int]] = {}  # buffers by kind

    def emit(self, steps: Sequence[Step]) -> None:
        uses = count_uses(steps)
        readers: dict[int, int] = {}  # reads to come, by buffer
        for step in steps:
            if not (isinstance(step, Node) and step.op in (*_HEAD, "send")):
                buffer = self._take_buffer(outputs_of(step))
                readers[buffer] = sum(uses[value.name] for value, _ in outputs_of(step))
            if isinstance(step, Matmul):
                self._matmul(step)
            else:
                _EMIT[step.op](self, step)
            for value in step.inputs:
                buffer, _ = self.places.get(value.name, NOWHERE)
                if buffer >= 0:
                    readers[buffer] -= 1
                    if readers[buffer] == 0:
                        self._free_buffer(buffer)

    # Buffers: one is used again, for values of the same width, once nobody reads it any more

    def _take_buffer(self, outputs: Sequence[tuple[Value, int]]) -> int:
        value, column = outputs[-1]
        kind = (column + width_of(value), value.rows == "S", value.dtype == "float32")
        free = self._free.setdefault(kind, [])
        if free:
            buffer = free.pop()
        else:
            buffer = self.program.add_buffer(*kind)
            self._kinds.append(kind)
        for value, column in outputs:
            self.places[value.name] = (buffer, column)
        return buffer

    def _free_buffer(self, buffer: int) -> None:
        self._free[self._kinds[buffer]].append(buffer)

    # Weights

    def packed(self, parts: tuple[Part, ...]) -> int:
        """The packed weight that holds these parts; embeddings and a tied output projection share one."""
        if parts not in self._packed:
            rows, k = parts[0].weight.shape
            n = rows if len(parts) == 1 else _count_panels(parts) * PANEL
            self._packed[parts] = index = self.program.add_weight(n, k, self._widths[parts[0].weight.name])
            for part in parts:
                tensor = self._tensors[part.weight.name]
                self.jobs.append(PackingJob(index, part.first_panel, part.panel_step, tensor))
        return self._packed[parts]

    def _bias(self, parts: tuple[Part, ...]) -> int:
        """Biases in the order of the panels' columns; -1 where no part has one."""
        if all(part.bias is None for part in parts):
            return -1
        panels = _count_panels(parts)
        values = np.zeros((panels, PANEL), np.float32)
        for part in parts:
            if part.bias is not None:
                own = np.zeros(part.panels * PANEL, np.float32)
                own[: part.bias.shape[0]] = round_to_bfloat16(self._tensors[part.bias.name].to_float32())
                values[part.first_panel :: part.panel_step][: part.panels] = own.reshape(-1, PANEL)
        return self.program.add_vector(values.reshape(-1))

    def _vector(self, weight: Weight) -> int:
        return self.program.add_vector(np.ascontiguousarray(self._tensors[weight.name].to_float32()))

    # Ops

    def _matmul(self, step: Matmul) -> None:
        self.program.matmul(
            self.places[step.x.name],
            self.packed(step.parts),
            self._bias(step.parts),
            step.epilogue,
            NOWHERE if step.residual is None else self.places[step.residual.name],
            step.width,
            self.places[step.outputs[0][0].name],
        )

    def _embed(self, node: Node) -> None:
        scale = round_to_bfloat16(np.array([node.attrs["scale"]], np.float32))
        weight = self.packed((Part(node.weights[0], None),))
        self.program.embed(weight, float(scale[0]), node.integer("first"), self._out(node))

    def _select_rows(self, node: Node) -> None:
        self.program.select_rows(self._x(node), self._out(node))

    def _rms_norm(self, node: Node) -> None:
        (weight,) = node.weights
        groups = width_of(node.output) // weight.shape[0]
        self.program.rms_norm(self._x(node), self._vector(weight), groups, _number(node, "eps"), self._out(node))

    def _rope(self, node: Node) -> None:
        inv_freq = node.attrs["inv_freq"]
        assert isinstance(inv_freq, tuple)
        key = (inv_freq, _number(node, "attention_factor"))
        if key not in self._rotations:
            self._rotations[key] = self.program.add_rotation(*key)
        head_dim = node.integer("head_dim")
        heads = width_of(node.output) // head_dim
        self.program.rope(self._x(node), self._rotations[key], heads, head_dim, self._out(node))

    def _attention(self, node: Node) -> None:
        q, k, v = self._in(node)
        group = self.groups[node.integer("layer")]
        cache = self.program.add_cache(node.integer("num_kv_heads"), node.integer("head_dim"), group)
        self.program.store(k, v, cache)
        self.program.attention(
            q,
            cache,
            node.integer("num_heads"),
            node.integer("window") if node.attrs["window"] is not None else 0,
            _number(node, "scale"),
            _number(node, "softcap") if node.attrs["softcap"] is not None else 0.0,
            self._out(node),
        )

    def _gate_mul(self, node: Node) -> None:
        gate, up = self._in(node)
        self.program.gate_mul(gate, up, node.op.removesuffix("_mul"), width_of(node.output), self._out(node))

    def _add(self, node: Node) -> None:
        a, b = self._in(node)
        self.program.add(a, b, width_of(node.output), self._out(node))

    def _lm_head(self, node: Node) -> None:
        self.program.logits(self._x(node), self.packed((Part(node.weights[0], None),)))

    def _softcap(self, node: Node) -> None:
        self.program.softcap(_number(node, "cap"))

    def _all_reduce(self, node: Node) -> None:
        self.program.all_reduce(self._x(node), width_of(node.output), self._out(node))

    def _gather(self, node: Node) -> None:
        self.program.gather()

    def _send(self, node: Node) -> None:
        self.program.send(self._x(node), width_of(node.output))

    def _recv(self, node: Node) -> None:
        self.program.recv(self._out(node), width_of(node.output))

    def _x(self, node: Node) -> Place:
        return self.places[node.inputs[0].name]

    def _in(self, node: Node) -> list[Place]:
        return [self.places[value.name] for value in node.inputs]

    def _out(self, node: Node) -> Place:
        return self.places[node.output.name]


_EMIT: Mapping[str, Callable[[_Lowering, Node], None]] = {
    "embed": _Lowering._embed,
    "select_rows": _Lowering._select_rows,
    "rms_norm": _Lowering._rms_norm,
    "rope": _Lowering._rope,
    "attention": _Lowering._attention,
    "silu_mul": _Lowering._gate_mul,
    "gelu_mul": _Lowering._gate_mul,
    "add": _Lowering._add,
    "lm_head": _Lowering._lm_head,
    "softcap": _Lowering._softcap,
    "all_reduce": _Lowering._all_reduce,
    "gather": _Lowering._gather,
    "send": _Lowering._send,
    "recv": _Lowering._recv,
}


def _vocab_size(graph: Graph) -> int:
    """Ids that the program may be given."""
    if graph.nodes[-1].op != "send":
        return width_of(graph.output)
    sharded = any(node.op == "all_reduce" for node in graph.nodes)
    first = graph.nodes[0]
    return first.weights[0].shape[0] if first.op == "embed" and not sharded else _ANY_ID


def _count_panels(parts: tuple[Part, ...]) -> int:
    return 1 + max(part.first_panel + (part.panels - 1) * part.panel_step for part in parts)


def _number(node: Node, attr: str) -> float:
    value = node.attrs[attr]
    assert isinstance(value, int | float)
    return float(value)
