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


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Compute these, of one or several requests; of each, what an engine that died had sampled is kept apart."""

    sequences: list[SequenceRequest]


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
