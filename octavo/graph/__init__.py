"""The op vocabulary, and the graph that a model records with it: one definition for every backend."""

from octavo.graph.graph import Attr, DType, Graph, KVGroup, Node, Op, Rows, Value, Weight, group_layers
from octavo.graph.pipeline import pipeline_stage
from octavo.graph.shard import Cut, Shard, shard
from octavo.graph.trace import Trace

__all__ = [
    "Attr",
    "Cut",
    "DType",
    "Graph",
    "KVGroup",
    "Node",
    "Op",
    "Rows",
    "Shard",
    "Trace",
    "Value",
    "Weight",
    "group_layers",
    "pipeline_stage",
    "shard",
]
