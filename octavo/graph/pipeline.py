"""Pipeline parallelism as a pass over the graph: stages, cut where nothing but the residual stream goes on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from octavo.errors import ConfigError
from octavo.graph.graph import Graph, KVGroup, Node, Value, Weight


def pipeline_stage(graph: Graph, num_stages: int, stage: int) -> Graph:
    """Part `stage` of `num_stages`, of about as many numbers in matrices each::

        stage 0    embed, layers ── send
        stage 1                     recv ── layers ── send
        stage 2                                       recv ── layers, select_rows, lm_head

    A layer may be cut between attention and MLP. Every stage keeps the groups of the whole model, each with those of
    its layers that the stage has: block tables are the same everywhere.

    Each stage may then be sharded, but not the other way round: shards differ in size, and each would be cut at places
    of its own.

    Raises:
        ConfigError: the model cannot be cut into so many parts.
        ValueError: the graph has been sharded already.
    """
    if num_stages == 1:
        return graph
    if any(node.op == "all_reduce" for node in graph.nodes):
        raise ValueError("a graph is cut into stages before it is sharded")
    borders = _borders(graph, num_stages)
    begin, end = borders[stage], borders[stage + 1]
    nodes = list(graph.nodes[begin:end])
    output = graph.output
    if stage > 0:
        nodes.insert(0, Node("recv", (), (), {}, _crossing(graph.nodes, begin)[0]))
    if stage < num_stages - 1:
        stream = _crossing(graph.nodes, end)[0]
        output = Value(f"{stream.name}.sent", stream.dtype, stream.rows, stream.width)
        nodes.append(Node("send", (stream,), (), {}, output))
    layers = {node.integer("layer") for node in nodes if node.op == "attention"}
    groups = tuple(KVGroup(g.window, tuple(i for i in g.layers if i in layers)) for g in graph.kv_groups)
    return Graph(graph.inputs, tuple(nodes), output, groups)


def _borders(graph: Graph, num_stages: int) -> list[int]:
    """Where stages begin, and the end: those whose largest stage has the fewest numbers in its weights."""
    nodes = graph.nodes
    places = [0, *(i for i in range(1, len(nodes)) if _is_border(nodes, i)), len(nodes)]
    if num_stages > len(places) - 1:
        raise ConfigError(
            f"pipeline_parallel_size={num_stages}: the model can be cut into {len(places) - 1} stages at most"
        )
    pieces = [_matrices(nodes[begin:end]) for begin, end in pairwise(places)]
    # best[n]: for the first n pieces, the largest stage and the borders, with as many stages as the round says
    best: list[tuple[int, list[int]] | None] = [(0, [0])] + [None] * len(pieces)
    for _ in range(num_stages):
        best = [_extend(best, pieces, places, last) for last in range(len(pieces) + 1)]
    found = best[-1]
    assert found is not None
    return found[1]


def _extend(
    best: Sequence[tuple[int, list[int]] | None], pieces: Sequence[dict[str, int]], places: Sequence[int], last: int
) -> tuple[int, list[int]] | None:
    """The best of all ways to go on with one more stage that ends before piece `last`."""
    found: tuple[int, list[int]] | None = None
    stage: dict[str, int] = {}
    for first in range(last - 1, -1, -1):
        stage |= pieces[first]
        size = sum(stage.values())
        before = best[first]
        if before is not None and (found is None or max(size, before[0]) < found[0]):
            found = max(size, before[0]), [*before[1], places[last]]
        if found is not None and size >= found[0]:
            break  # longer stages only grow
    return found


def _is_border(nodes: Sequence[Node], place: int) -> bool:
    crossing = _crossing(nodes, place)
    return len(crossing) == 1 and crossing[0].rows == "T" and crossing[0].dtype == "float32"


def _crossing(nodes: Sequence[Node], place: int) -> list[Value]:
    """Values that are made before nodes[place] and read from there on."""
    made = {node.output.name: node.output for node in nodes[:place]}
    return list({v.name: v for node in nodes[place:] for v in node.inputs if v.name in made}.values())


def _matrices(nodes: Sequence[Node]) -> dict[str, int]:
    """Numbers in each matrix, of which a step reads all: not those of the embedding, of which it reads a few rows."""
    weights: list[Weight] = [weight for node in nodes if node.op != "embed" for weight in node.weights]
    return {weight.name: prod(weight.shape) for weight in weights}
