"""What goes over the socket between the front-end and the engine process: msgpack, checked against these types as it is
read. Nothing that could run code is ever read from a socket.

    front-end                                          engine process
        ── Start ────────────────────────────────────►   loads the model
        ◄──────────────── Loading ... Ready, or Refused ──
        ── Add, Abort, Ask ──────────────────────────►   between two steps
        ◄──────────────────────────── Stepped, Answer ──

One life of an engine process has one socket: what a dead one has sent cannot be taken for the word of its successor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import msgspec

from octavo.config import EngineConfig
from octavo.core import KVSnapshot, SchedulerStats
from octavo.engine.messages import SequenceOutput, SequenceRequest
from octavo.worker import BootReport


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Load this."""

    config: EngineConfig  # its model is a local path
    vocab_size: int  # ids that the tokeniser knows
    log_level: int  # of the logger `octavo`


class Choice(msgspec.Struct, frozen=True, array_like=True):
    """A further sequence of a request: all else is as in the first one that is there."""

    choice: int
    sampled: list[int]


class Group(msgspec.Struct, frozen=True):
    """The unfinished sequences of one request: its prompt and its parameters are there once, however many these are. Of
    each sequence, what an engine that died had sampled is kept apart."""

    first: SequenceRequest
    further: list[Choice]

    @classmethod
    def of(cls, sequences: Sequence[SequenceRequest]) -> Group:
        first, *further = sequences
        return cls(first, [Choice(sequence.choice, sequence.sampled) for sequence in further])

    def sequences(self) -> Iterator[SequenceRequest]:
        """Logprobs of the prompt are the first one's business; seq_ids follow each other as choices do."""
        yield self.first
        params = replace(self.first.params, prompt_logprobs=None) if self.further else self.first.params
        for further in self.further:
            seq_id = self.first.seq_id - self.first.choice + further.choice
            choice, sampled = further.choice, further.sampled
            yield replace(self.first, seq_id=seq_id, choice=choice, sampled=sampled, params=params)


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Compute these requests."""

    requests: list[Group]


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Nobody waits for these any more. There is no answer; ids that have ended are no mistake."""

    seq_ids: list[int]


What = Literal["stats", "kv_snapshot"]


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    number: int  # of the answer
    what: What


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    share: float  # of the weights that are loaded, 0 to 1


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    boot_report: BootReport


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The model cannot be loaded, or not like this."""

    kind: Literal["ModelError", "ConfigError"]
    message: str


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    """What one step did, or what was found wrong with a sequence as it was added."""

    outputs: list[SequenceOutput]


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """The one that was asked for; the other is None."""

    number: int
    stats: SchedulerStats | None = None
    kv_snapshot: KVSnapshot | None = None


ToEngine = Start | Add | Abort | Ask
FromEngine = Loading | Ready | Refused | Stepped | Answer

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
