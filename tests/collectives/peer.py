"""One worker, a process: `python -m tests.collectives.peer PORT INDEX SIZE STAGES DEADLINE ROLE` prints an answer."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from octavo.collectives import CollectiveError
from octavo.collectives.torch_distributed import TorchCollectives

torch.set_num_threads(1)


def mine(of: int, width: int = 3) -> np.ndarray:
    """What worker `of` says: told apart by every number."""
    return (100 * of + np.arange(2 * width, dtype=np.float32)).reshape(2, width)


def speak(ends: TorchCollectives, index: int) -> dict[str, Any]:
    """All methods once, several times over, numpy arrays and torch tensors in turn."""
    first = index - ends.rank
    for turn in range(3):
        everyone: Any = np.full((ends.size, 2, 3), np.nan, np.float32)
        if turn == 1:
            everyone = torch.from_numpy(everyone)
            ends.all_gather(torch.from_numpy(mine(index)), everyone)
            everyone = everyone.numpy()
        else:
            ends.all_gather(mine(index), everyone)
        np.testing.assert_array_equal(everyone, [mine(first + rank) for rank in range(ends.size)])
        others = [np.empty((2, 3 + rank), np.float32) for rank in range(1, ends.size)] if ends.rank == 0 else []
        ends.gather(mine(index, 3 + ends.rank), others)
        for rank, other in enumerate(others, start=1):
            np.testing.assert_array_equal(other, mine(first + rank, 3 + rank))
        if ends.stage > 0:
            received = np.empty((2, 3), np.float32)
            ends.recv(received)
            np.testing.assert_array_equal(received, mine(index - ends.size))
        if ends.stage < ends.num_stages - 1:
            ends.send(mine(index))
    return {"messages": ends.num_messages, "bytes": ends.num_bytes}


def one_goes(ends: TorchCollectives, index: int, call: Callable[[], None], how: int) -> dict[str, Any]:
    """Of a stage worker 1, else the first stage's, is killed, or stopped, after a first exchange; the others go on, and
    say how and when that ended."""
    if ends.num_stages == 1:
        ends.all_gather(mine(index), np.empty((ends.size, 2, 3), np.float32))
    elif ends.stage == 0:
        ends.send(mine(index))
    else:
        ends.recv(np.empty((2, 3), np.float32))
    if index == (1 if ends.num_stages == 1 else 0):
        print(json.dumps({"gone": how}), flush=True)
        os.kill(os.getpid(), how)
    start = time.monotonic()
    try:
        call()
    except CollectiveError as error:
        return {"error": str(error), "after": time.monotonic() - start}
    return {"error": None, "after": time.monotonic() - start}


def main(port: int, index: int, size: int, stages: int, deadline: float, role: str) -> None:
    try:
        ends = TorchCollectives(("127.0.0.1", port), index, size, stages, deadline=deadline)
    except CollectiveError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    calls: dict[str, Callable[[], None]] = {
        "all_gather": lambda: ends.all_gather(mine(index), np.empty((size, 2, 3), np.float32)),
        "gather": lambda: ends.gather(
            mine(index), [np.empty((2, 3), np.float32) for _ in range(size - 1)] if ends.rank == 0 else []
        ),
        "recv": lambda: ends.recv(np.empty((2, 3), np.float32)),
    }
    if role == "speak":
        found = speak(ends, index)
    else:
        how, call = role.split(":")
        found = one_goes(ends, index, calls[call], {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])
    print(json.dumps(found), flush=True)
    if role == "speak":
        ends.close()
    else:
        os._exit(0)  # the world is broken: nothing of it is to be taken leave of


if __name__ == "__main__":
    main(*(int(arg) for arg in sys.argv[1:5]), float(sys.argv[5]), sys.argv[6])  # type: ignore[call-arg]
