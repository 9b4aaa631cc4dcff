"""The op vocabulary, and the graph that a model records with it: one definition for every backend."""

from octavo.graph.graph import Attr, DType, Graph, KVGroup, Node, Op, Rows, Value, Weight
from octavo.graph.trace import Trace

__all__ = ["Attr", "DType", "Graph", "KVGroup", "Node", "Op", "Rows", "Trace", "Value", "Weight"]
