"""What the program calls in the middle of a step, where several workers share a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from octavo.collectives import Collectives
from octavo.graph import Graph

Float32 = NDArray[np.float32]
Exchange = Callable[[str, Float32, Float32 | None], None]


def exchange_of(graph: Graph, collectives: Collectives) -> Exchange:
    """For the program of this graph. Its arrays are views of the program's memory, whose rows may lie apart."""
    widths = next((node.attrs["widths"] for node in graph.nodes if node.op == "gather"), ())
    assert isinstance(widths, tuple)
    return partial(_exchange, collectives, [int(width) for width in widths])


def _exchange(collectives: Collectives, widths: list[int], kind: str, mine: Float32, everyone: Float32 | None) -> None:
    match kind, everyone:
        case "all_reduce", np.ndarray():
            collectives.all_gather(np.ascontiguousarray(mine), everyone)
        case "gather", np.ndarray():
            others = [np.empty((len(mine), width), np.float32) for width in widths[1:]] if collectives.rank == 0 else []
            collectives.gather(np.ascontiguousarray(mine), others)
            if collectives.rank == 0:
                np.concatenate([mine, *others], axis=1, out=everyone)
        case "send", None:
            collectives.send(np.ascontiguousarray(mine))
        case "recv", None:
            received = np.empty_like(mine)
            collectives.recv(received)
            mine[...] = received
        case _:
            raise ValueError(f"no exchange is called {kind!r}")
