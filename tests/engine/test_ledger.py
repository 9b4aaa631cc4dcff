"""The ledger: what an engine is told, what its successor is told again, and who is suspected."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from octavo import SamplingParams
from octavo.engine import wire
from octavo.engine.ledger import CONDEMNED, Ledger
from octavo.engine.messages import Request, SequenceOutput, SequenceRequest
from octavo.engine.outputs import OutputProcessor
from octavo.outputs import RequestMetrics, TokenLogprobs


class Letters:
    """A tokeniser of one-letter tokens."""

    strips_leading_space = False

    def bytes_of(self, ids: Any, *, skip_special_tokens: bool) -> bytes:
        return b"x" * len(list(ids))

    def token_text(self, token_id: int) -> str:
        return "x"


class Desk:
    """A ledger with its outputs, and what an engine would do."""

    def __init__(self) -> None:
        self.outputs = OutputProcessor(Letters())  # type: ignore[arg-type]
        self.ledger = Ledger(self.outputs)
        self.count = 0

    def add(self, name: str, **params: Any) -> list[int]:
        own = SamplingParams(max_tokens=100, **params)
        sequences = [
            SequenceRequest(self.count + choice, [1, 2, 3], own, 0, 103, frozenset(), 0, time.monotonic(), choice)
            for choice in range(own.n)
        ]
        self.count += own.n
        self.outputs.add(name, None, Request(own, sequences))
        self.ledger.add(name, sequences)
        return [sequence.seq_id for sequence in sequences]

    def told(self) -> list[Any]:
        """What is due, short: ("add", [(seq_id, sampled)]) or ("abort", [seq_id])."""
        return [
            ("add", [(s.seq_id, s.sampled) for s in message.sequences])
            if isinstance(message, wire.Add)
            else ("abort", message.seq_ids)  # type: ignore[union-attr]
            for message in self.ledger.due()
        ]

    def say(self, seq_id: int, token: int | None = 7, **more: Any) -> bool:
        if more.get("finish_reason") is not None:
            more["metrics"] = RequestMetrics()
        update = SequenceOutput(seq_id, token, **more)
        known = self.ledger.accept(update)
        if known:
            self.outputs.process([update])
        return known


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_everything_is_told_once(desk: Desk) -> None:
    desk.add("a")
    desk.add("b", n=2)
    assert desk.told() == [("add", [(0, []), (1, []), (2, [])])]
    assert desk.told() == []
    desk.add("c")
    assert desk.told() == [("add", [(3, [])])]


def test_after_a_death_the_unfinished_are_told_again_with_what_they_have(desk: Desk) -> None:
    for name in ("a", "b", "c"):
        desk.add(name, n=2)
    desk.told()
    desk.say(0, 10)
    desk.say(0, 11)
    desk.say(3, 12)
    desk.say(2, 13, finish_reason="stop")
    desk.add("d")
    assert desk.ledger.engine_died([0, 1]) is None
    assert desk.told() == [("add", [(0, [10, 11]), (1, []), (3, [12]), (4, []), (5, []), (6, [])])]
    assert not desk.say(2, 1)


def test_prompt_logprobs_are_asked_for_until_all_are_here_and_shown_once(desk: Desk) -> None:
    entries = [TokenLogprobs(token, -float(token), 1, [], []) for token in (2, 3)]
    (seq_id,) = desk.add("a", prompt_logprobs=0)
    desk.told()
    desk.say(seq_id, None, prompt_logprobs=entries[:1])
    shown = desk.outputs._live[seq_id][0].output
    desk.ledger.engine_died([])
    (again,) = desk.ledger.due()
    assert isinstance(again, wire.Add)
    assert again.sequences[0].params.prompt_logprobs == 0
    desk.say(seq_id, None, prompt_logprobs=entries[:1])
    desk.say(seq_id, 9, prompt_logprobs=entries[1:])
    assert [entry and list(entry) for entry in shown.prompt_logprobs or []] == [None, [2], [3]]
    desk.ledger.engine_died([])
    (again,) = desk.ledger.due()
    assert isinstance(again, wire.Add)
    assert (again.sequences[0].params.prompt_logprobs, again.sequences[0].sampled) == (None, [9])


def test_suspects_are_tried_one_at_a_time(desk: Desk) -> None:
    for name in ("a", "b", "c", "d"):
        desk.add(name)
    desk.told()
    desk.ledger.engine_died([0, 1, 2, 3])
    desk.told()
    desk.say(3)
    desk.ledger.engine_died([0, 1, 2, 3])  # d made progress in between
    assert desk.told() == [("add", [(0, [])])]
    desk.add("e")
    assert desk.told() == []
    desk.say(0, 20)
    assert desk.told() == [("abort", [0]), ("add", [(1, [])])]
    assert desk.ledger.engine_died([1]) == "b"
    desk.ledger.end(1, "error")
    assert desk.told() == [("add", [(2, [])])]
    assert desk.say(0, 21)  # had been on its way
    desk.say(2, 22)
    assert desk.told() == [("add", [(0, [20, 21]), (3, [7]), (4, [])])]


def test_a_suspect_that_is_aborted_makes_way(desk: Desk) -> None:
    for name in ("a", "b"):
        desk.add(name)
    for _ in range(2):
        desk.told()
        desk.ledger.engine_died([0, 1])
    assert desk.told() == [("add", [(0, [])])]
    desk.ledger.end(0, "abort")
    assert desk.told() == [("add", [(1, [])])]
    desk.say(1, finish_reason="stop")
    assert (desk.told(), len(desk.ledger), desk.ledger.num_requests) == ([], 0, 0)


def test_nobody_is_condemned_for_a_death_in_company_or_outside_of_a_step(desk: Desk) -> None:
    desk.add("a")
    desk.add("b")
    for _ in range(5):
        desk.told()
        assert desk.ledger.engine_died([]) is None
    desk.ledger.engine_died([0])
    desk.told()
    desk.ledger.engine_died([0])  # b was in the engine, though not in the step
    assert desk.told() == [("add", [(0, [])])]


def test_metrics_are_put_together_from_all_lives(desk: Desk) -> None:
    (seq_id,) = desk.add("a")
    desk.told()
    desk.say(seq_id, metrics=RequestMetrics(1.0, 2.0, 0.0, num_cached_tokens=2, num_preemptions=0))
    desk.say(seq_id, metrics=RequestMetrics(1.0, 2.0, 0.0, num_cached_tokens=2, num_preemptions=3))
    desk.ledger.engine_died([])
    desk.told()
    desk.say(seq_id, metrics=RequestMetrics(10.0, 5.0, 0.0, num_cached_tokens=0, num_preemptions=0))
    last = SequenceOutput(seq_id, 7, finish_reason="length", metrics=RequestMetrics(10.0, 5.0, 4.0, 0, 1))
    desk.ledger.accept(last)
    assert last.metrics == RequestMetrics(1.0, 2.0, 16.0, num_cached_tokens=2, num_preemptions=4)


def test_any_history_ends_with_the_poison_alone_condemned() -> None:
    """Requests finish after so many tokens; an engine dies when the poison is in its step, and by chance."""
    for seed in range(200):
        rng, desk = random.Random(seed), Desk()
        names = [f"r{i}" for i in range(rng.randrange(2, 9))]
        ids = {desk.add(name)[0]: name for name in names}
        poison = rng.choice(sorted(ids))
        left = {seq_id: rng.randrange(1, 6) for seq_id in ids}
        inside: list[int] = []
        condemned = []
        for _ in range(2000):
            for kind, what in desk.told():
                inside = [i for i in inside if i not in what] if kind == "abort" else inside + [i for i, _ in what]
            if not inside:
                break
            step = inside[: rng.randrange(1, len(inside) + 1)]
            if poison in step or rng.random() < 0.02:
                verdict = desk.ledger.engine_died(step if poison in step else [])
                inside = []
                if verdict is not None:
                    condemned.append(verdict)
                    desk.ledger.end(next(i for i, name in ids.items() if name == verdict), "error")
                continue
            for seq_id in step:
                left[seq_id] -= 1
                desk.say(seq_id, finish_reason="length" if left[seq_id] == 0 else None)
                if left[seq_id] == 0:
                    inside.remove(seq_id)
        assert condemned == [ids[poison]], seed
        assert [count for seq_id, count in left.items() if seq_id != poison] == [0] * (len(ids) - 1)
        assert len(desk.ledger) == 0
    assert CONDEMNED == 3
