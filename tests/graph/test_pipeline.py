"""Pipeline parallelism: where a model is cut, that its parts are the whole, that the largest is as small as can be."""

from __future__ import annotations

from itertools import combinations, pairwise
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.graph import Graph, KVGroup, pipeline_stage, shard
from tests.graph.models import decoder

SMALL = {"heads": 4, "kv_heads": 2, "head_dim": 16, "hidden": 64, "inner": 96, "vocab": 320}


def stages(graph: Graph, count: int) -> list[Graph]:
    return [pipeline_stage(graph, count, stage) for stage in range(count)]


def matrices(graph: Graph) -> int:
    """Numbers in the matrices that a step reads."""
    weights = {w.name: prod(w.shape) for node in graph.nodes if node.op != "embed" for w in node.weights}
    return sum(weights.values())


def test_the_stages_hand_the_residual_stream_on() -> None:
    first, second = stages(decoder(layers=2, **SMALL, tied=False), 2)
    assert (first.nodes[0].op, first.nodes[-1].op) == ("embed", "send")
    assert (second.nodes[0].op, second.nodes[-1].op) == ("recv", "softcap")
    sent, received = first.nodes[-1].inputs[0], second.nodes[0].output
    assert sent == received
    assert (sent.dtype, sent.rows, sent.width) == ("float32", "T", 64)
    assert first.output == first.nodes[-1].output


def test_groups_are_the_whole_models() -> None:
    graph = decoder(layers=6, **SMALL, windows=(32, 32, None))
    assert graph.kv_groups == (KVGroup(None, (2, 5)), KVGroup(32, (0, 1)), KVGroup(32, (3, 4)))
    first, second = stages(graph, 2)
    layers = [[set(group.layers) for group in part.kv_groups] for part in (first, second)]
    assert [a | b for a, b in zip(*layers, strict=True)] == [{2, 5}, {0, 1}, {3, 4}]
    assert not any(a & b for a, b in zip(*layers, strict=True))
    assert first.kv_shapes.keys() == set().union(*layers[0])
    assert [group.window for group in second.kv_groups] == [None, 32, 32]


def test_one_stage_is_all() -> None:
    graph = decoder(layers=2, **SMALL)
    assert pipeline_stage(graph, 1, 0) is graph


def test_too_many_stages_are_refused() -> None:
    graph = decoder(layers=2, **SMALL)
    assert len(stages(graph, 5)) == 5  # attention and MLP of each layer, and what comes after them
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size=7: .* 6 stages"):
        pipeline_stage(graph, 7, 0)


@given(st.integers(2, 5), st.integers(1, 4), st.integers(1, 30), st.booleans(), st.integers(20, 3000))
def test_nothing_is_lost_and_the_largest_stage_is_the_least(
    count: int, layers: int, inner: int, tied: bool, vocab: int
) -> None:
    graph = decoder(layers=layers, **{**SMALL, "inner": 32 * inner, "vocab": vocab}, tied=tied)
    pieces = 2 * layers + 2
    if count > pieces:
        return
    parts = stages(graph, count)
    own = [node for part in parts for node in part.nodes if node.op not in ("send", "recv")]
    assert own == list(graph.nodes)
    adds = [0, 1, *(i + 1 for i, node in enumerate(graph.nodes) if node.op == "add"), len(graph.nodes)]
    ways = ([0, *cuts, len(graph.nodes)] for cuts in combinations(adds[1:-1], count - 1))
    best = min(
        max(matrices(Graph((), graph.nodes[a:b], graph.output, ())) for a, b in pairwise(borders)) for borders in ways
    )
    assert max(map(matrices, parts)) == best


def test_a_stage_can_be_divided_further() -> None:
    parts = [
        [shard(pipeline_stage(decoder(layers=2, **SMALL), 2, stage), 2, rank, lambda name: 1) for rank in range(2)]
        for stage in range(2)
    ]
    assert [[part.graph.nodes[-1].op for part in ranks] for ranks in parts] == [["send"] * 2, ["gather"] * 2]
    first = [node.op for node in parts[0][0].graph.nodes]
    assert first.count("all_reduce") == first.count("add") + 1  # the embedding's, and one for each block of a layer


def test_a_shard_is_not_cut() -> None:
    """Of three KV heads the first worker has two, the other one: each would be cut elsewhere."""
    part = shard(decoder(layers=2, **{**SMALL, "heads": 6, "kv_heads": 3}), 2, 0, lambda name: 1)
    with pytest.raises(ValueError, match="before it is sharded"):
        pipeline_stage(part.graph, 2, 0)
