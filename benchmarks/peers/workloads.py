"""What octavo and its peers are compared on: requests as (prompt token ids, output tokens).

Greedy, the end of the sequence ignored. Ids are random in [1000, 40000), which every vocabulary of interest has.
Lengths are the same in every repetition; contents are not, so that no run finds the one before in a prefix cache.
Python's `random` gives the same numbers everywhere, and tests/benchmarks holds them: figures of different days compare.
"""

from __future__ import annotations

import random
from collections.abc import Callable

Request = tuple[list[int], int]

TITLES = {
    "A": "offline",
    "B": "single stream",
    "C": "prefill",
    "D": "shared prefix",
    "E": "cold start",
}
COLD_PROMPT = "Hello"  # E: process start to the first token of this prompt


def offline(rep: int) -> list[Request]:
    """A: 128 requests at once, prompts of 32 to 512 tokens, outputs of 16 to 256 (38,289 in, 16,928 out)."""
    shape = random.Random(0)
    lengths = [(shape.randint(32, 512), shape.randint(16, 256)) for _ in range(128)]
    rng = random.Random(1000 * rep)
    return [(_ids(rng, prompt), output) for prompt, output in lengths]


def single_stream(rep: int, output: int = 256) -> list[Request]:
    """B: one request, 128 in, 256 out."""
    return [(_ids(random.Random(1 + 1000 * rep), 128), output)]


def prefill(rep: int) -> list[Request]:
    """C: one request, 2,048 in, one out."""
    return [(_ids(random.Random(2 + 1000 * rep), 2048), 1)]


def shared_prefix(rep: int) -> list[Request]:
    """D: 64 requests at once, one prefix of 1,024 tokens and 32 of their own each, 32 out."""
    rng = random.Random(3 + 1000 * rep)
    prefix = _ids(rng, 1024)
    return [(prefix + _ids(rng, 32), 32) for _ in range(64)]


RESIDENT: dict[str, Callable[[int], list[Request]]] = {
    "A": offline,
    "B": single_stream,
    "C": prefill,
    "D": shared_prefix,
}  # run by an engine that is loaded once; E is a process of its own each time


def warm_up() -> list[list[Request]]:
    """Calls that are not timed: every kind of step once, so that what is made at first use is not counted."""
    rng = random.Random(99)
    return [[(_ids(rng, 40), 4)], [(_ids(rng, 100), 8) for _ in range(8)], [(_ids(rng, 2048), 2)]]


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 40000) for _ in range(count)]
