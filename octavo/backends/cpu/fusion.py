"""Fusion passes. Each takes steps and gives steps that compute the same bits: no edge loses its rounding.

An edge that disappears inside a step (`linear` -> `add`) is still rounded there, by the kernel's epilogue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from octavo.backends.cpu.steps import PANEL, Epilogue, Matmul, Part, Step, count_uses, width_of
from octavo.graph import Node, Value

_GATES: dict[str, Epilogue] = {"silu_mul": "silu_mul", "gelu_mul": "gelu_mul"}


Widths = Mapping[str, str]  # how each weight is held, by its name; parts of one packed weight are held alike


def fuse(steps: Sequence[Step], widths: Widths) -> list[Step]:
    return merge_projections(fuse_residuals(fuse_gates(steps, widths)), widths)


def fuse_gates(steps: Sequence[Step], widths: Widths) -> list[Step]:
    """silu(gate(x)) * up(x) as one product: panels of gate and of up alternate, so that both are at hand together.

    ::

        panel          0       1      2       3      ...
        columns of     gate    up     gate    up
                       0..15   0..15  16..31  16..31
    """
    products = _single_products(steps)
    fused: dict[int, Matmul] = {}  # by position
    gone: set[str] = set()
    for i, step in enumerate(steps):
        if not isinstance(step, Node) or step.op not in _GATES:
            continue
        gate, up = (products.get(value.name) for value in step.inputs)
        if gate is None or up is None or gate is up or gate.x != up.x or _width(gate, widths) != _width(up, widths):
            continue
        parts = tuple(
            replace(product.parts[0], first_panel=first, panel_step=2) for first, product in enumerate((gate, up))
        )
        fused[i] = Matmul(gate.x, parts, _GATES[step.op], ((step.output, 0),))
        gone |= {value.name for value in step.inputs}
    return _rewrite(steps, fused, gone)


def fuse_residuals(steps: Sequence[Step]) -> list[Step]:
    """stream + linear(y) as one product that reads the stream where it writes."""
    products = _single_products(steps)
    fused: dict[int, Matmul] = {}
    gone: set[str] = set()
    for i, step in enumerate(steps):
        if not isinstance(step, Node) or step.op != "add":
            continue
        stream, value = step.inputs
        if value.name in products:
            fused[i] = replace(products[value.name], epilogue="add", outputs=((step.output, 0),), residual=stream)
            gone.add(value.name)
    return _rewrite(steps, fused, gone)


def merge_projections(steps: Sequence[Step], widths: Widths) -> list[Step]:
    """Products of the same x (q, k and v) as one over one weight, their results side by side in one buffer.

    Each result begins at a column that is a multiple of 32, so that its rows are aligned as if it had its own buffer.
    """
    by_input: dict[tuple[str, str], list[Matmul]] = {}
    for step in steps:
        if isinstance(step, Matmul) and step.epilogue == "store":
            by_input.setdefault((step.x.name, _width(step, widths)), []).append(step)
    merged: list[Step] = []
    for step in steps:
        siblings: list[Matmul] = []
        if isinstance(step, Matmul) and step.epilogue == "store":
            siblings = by_input[step.x.name, _width(step, widths)]
        if len(siblings) < 2:
            merged.append(step)
        elif step is siblings[0]:
            merged.append(_side_by_side(siblings))
    return merged


def _width(product: Matmul, widths: Widths) -> str:
    return widths[product.parts[0].weight.name]


def _side_by_side(products: Sequence[Matmul]) -> Matmul:
    parts: list[Part] = []
    outputs: list[tuple[Value, int]] = []
    column = 0
    for product in products:
        ((value, _),) = product.outputs
        parts.append(replace(product.parts[0], first_panel=column // PANEL))
        outputs.append((value, column))
        column += -(-width_of(value) // (2 * PANEL)) * 2 * PANEL
    return Matmul(products[0].x, tuple(parts), "store", tuple(outputs))


def _single_products(steps: Sequence[Step]) -> dict[str, Matmul]:
    """Products of one `linear` whose result is read once, by the name of that result."""
    uses = count_uses(steps)
    found = {}
    for step in steps:
        if isinstance(step, Matmul) and step.epilogue == "store" and len(step.outputs) == 1:
            name = step.outputs[0][0].name
            if uses[name] == 1:
                found[name] = step
    return found


def _rewrite(steps: Sequence[Step], fused: dict[int, Matmul], gone: set[str]) -> list[Step]:
    """The steps with those at the positions of `fused` replaced, and products whose results are `gone` left out."""
    return [
        fused.get(i, step)
        for i, step in enumerate(steps)
        if not (isinstance(step, Matmul) and step.outputs[0][0].name in gone)
    ]
