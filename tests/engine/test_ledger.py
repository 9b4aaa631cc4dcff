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
            ("add", [(s.seq_id, s.sampled) for group in message.requests for s in group.sequences()])
            if isinstance(message, wire.Add)
            else ("abort", message.seq_ids)  # type: ignore[union-attr]
            for message in self.ledger.due()
        ]

    def say(self, seq_id: int, token: int | None = 7, **more: Any) -> bool:
        if more.get("finish_reason") is not None:
            more["metrics"] = RequestMetrics()
        _, choice = self.outputs._live.get(seq_id, (None, None))
        if choice is not None:
            more.setdefault("position", len(choice.completion.token_ids))
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
    assert again.requests[0].first.params.prompt_logprobs == 0
    assert not desk.say(seq_id, None, prompt_logprobs=entries[:1])
    assert desk.say(seq_id, 9, prompt_logprobs=entries)
    assert not desk.say(seq_id, 9, prompt_logprobs=entries, position=0)
    assert [entry and list(entry) for entry in shown.prompt_logprobs or []] == [None, [2], [3]]
    desk.ledger.engine_died([])
    (again,) = desk.ledger.due()
    assert isinstance(again, wire.Add)
    assert (again.requests[0].first.params.prompt_logprobs, again.requests[0].first.sampled) == (None, [9])


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


def test_nobody_is_condemned_for_a_death_in_company(desk: Desk) -> None:
    desk.add("a")
    desk.add("b")
    for _ in range(2):
        desk.told()
        assert desk.ledger.engine_died([0]) is None  # b was in the engine, though not in the step
    assert desk.told() == [("add", [(0, [])])]


def test_a_death_between_steps_may_be_due_to_any_that_the_engine_knew(desk: Desk) -> None:
    """Taking a request in may kill an engine, and no step says so: else it would be told of that one for ever."""
    for name in ("a", "b", "c"):
        desk.add(name)
    for _ in range(2):
        desk.told()
        assert desk.ledger.engine_died([]) is None
    assert desk.told() == [("add", [(0, [])])]
    desk.say(0, 20)
    assert desk.told() == [("abort", [0]), ("add", [(1, [])])]
    assert desk.ledger.engine_died([]) == "b"


def test_prompt_logprobs_are_no_progress(desk: Desk) -> None:
    """A prompt that kills at its end brings those of its first chunks, in each life."""
    entry = TokenLogprobs(2, -1.0, 1, [], [])
    (seq_id,) = desk.add("a", prompt_logprobs=0)
    verdicts = []
    for _ in range(CONDEMNED):
        desk.told()
        desk.say(seq_id, None, prompt_logprobs=[entry])
        verdicts.append(desk.ledger.engine_died([seq_id]))
    assert verdicts == [None, None, "a"]


def test_what_is_held_is_not_taken_twice(desk: Desk) -> None:
    """a goes on in the same engine, after a trial, while a token of its first stay there is on its way."""
    for name in ("a", "b"):
        desk.add(name)
    for _ in range(2):
        desk.told()
        desk.ledger.engine_died([0, 1])
    desk.told()
    desk.say(0, 20)
    assert desk.told() == [("abort", [0]), ("add", [(1, [])])]
    desk.ledger.end(1, "abort")
    assert desk.told() == [("add", [(0, [20])])]
    shown = desk.outputs._live[0][0].output.outputs[0]
    assert desk.say(0, 21, position=1)
    assert not desk.say(0, 21, position=1)
    assert desk.say(0, 22, position=2)
    assert shown.token_ids == [20, 21, 22]
    assert desk.say(0, 22, position=2, finish_reason="length")  # it is over, whichever token the engine took
    assert (shown.token_ids, shown.finish_reason) == ([20, 21, 22], "length")


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


class Engine:
    """Gives sequence i the tokens 100 i, 100 i + 1, ..., of which the desk hears later, or never."""

    def __init__(self, desk: Desk, rng: random.Random, lengths: dict[int, int]) -> None:
        self.desk, self.rng, self.lengths = desk, rng, lengths
        self.inside: dict[int, int] = {}  # seq_id -> tokens that it has
        self.on_their_way: list[tuple[int, int]] = []  # (seq_id, position)

    def take(self, told: list[Any]) -> None:
        for kind, what in told:
            if kind == "abort":
                self.drop(what)
            else:
                self.inside |= {seq_id: len(sampled) for seq_id, sampled in what}

    def drop(self, seq_ids: list[int]) -> None:
        for seq_id in seq_ids:
            self.inside.pop(seq_id, None)

    def step(self, seq_ids: list[int]) -> None:
        for seq_id in seq_ids:
            self.on_their_way.append((seq_id, self.inside[seq_id]))
            self.inside[seq_id] += 1
            if self.inside[seq_id] == self.lengths[seq_id]:
                del self.inside[seq_id]

    def arrive(self) -> None:
        seq_id, position = self.on_their_way.pop(0)
        finish = "length" if position + 1 == self.lengths[seq_id] else None
        self.desk.say(seq_id, 100 * seq_id + position, position=position, finish_reason=finish)

    def die(self, in_step: list[int]) -> str | None:
        while self.on_their_way and self.rng.random() < 0.7:
            self.arrive()
        self.inside, self.on_their_way = {}, []
        return self.desk.ledger.engine_died(in_step)


def one_history(seed: int) -> None:
    rng, desk = random.Random(seed), Desk()
    ids = {desk.add(f"r{i}")[0]: f"r{i}" for i in range(rng.randrange(2, 9))}
    choices = {seq_id: desk.outputs._live[seq_id][0].output.outputs[0] for seq_id in ids}
    lengths = {seq_id: rng.randrange(1, 6) for seq_id in ids}
    poison = rng.choice(sorted(ids))
    engine = Engine(desk, rng, lengths)
    condemned, left = [], []
    for _ in range(5000):
        engine.take(desk.told())
        if engine.on_their_way and (not engine.inside or rng.random() < 0.5):
            engine.arrive()
            continue
        if not engine.inside:
            break
        step = rng.sample(sorted(engine.inside), rng.randrange(1, len(engine.inside) + 1))
        leaver = rng.choice(sorted(engine.inside))
        if leaver != poison and leaver in desk.outputs._live and rng.random() < 0.1:
            left.append(leaver)
            engine.drop([leaver])
            desk.outputs.process([desk.ledger.end(leaver, "abort")])
        elif poison in step or (len(engine.inside) > 1 and rng.random() < 0.02):  # alone, it would be to blame
            verdict = engine.die(step if poison in step else [])
            if verdict is not None:
                condemned.append(verdict)
                desk.outputs.process([desk.ledger.end(poison, "error")])
        else:
            engine.step(step)
    assert condemned == [ids[poison]]
    assert len(desk.ledger) == 0
    for seq_id, choice in choices.items():
        assert choice.token_ids == [100 * seq_id + i for i in range(len(choice.token_ids))]
        if seq_id not in (poison, *left):
            assert (len(choice.token_ids), choice.finish_reason) == (lengths[seq_id], "length")


def test_any_history_ends_with_the_poison_alone_condemned() -> None:
    """Requests finish after so many tokens; an engine dies when the poison is in its step, and by chance."""
    for seed in range(1000):
        one_history(seed)
