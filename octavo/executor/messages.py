"""What goes over the socket between a driver and its workers: msgpack, checked against these types as it is read.

driver                                             each worker
    ── Load ─────────────────────────────────────►   meets the others, loads its part
    ◄──────────────────── Loading ..., Loaded ───────
    ── Allocate ─────────────────────────────────►   as many blocks as all have room for
    ◄────────────────────────────────── Loaded ──────
    ── Step ─────────────────────────────────────►   runs it, with the others
    ◄──────────── Stepped: from the one that samples ─
                  Failed: from any, at any time
"""

from __future__ import annotations

from typing import Literal

import msgspec

from octavo.config import EngineConfig
from octavo.core import StepPlan, StepResult
from octavo.worker import BootReport, Place


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Load your part of a model."""

    config: EngineConfig  # its model is a path that exists on every host
    vocab_size: int  # ids that the tokeniser knows
    place: Place
    meeting: tuple[str, int]  # host and port of worker 0, for the collectives
    deadline: float  # seconds that a collective waits for the others
    log_level: int  # of the logger `octavo`


class Allocate(msgspec.Struct, frozen=True, tag="allocate"):
    """Make the KV cache."""

    num_blocks: int
    num_swap_blocks: int


class Step(msgspec.Struct, frozen=True, tag="step"):
    """Run this after what came before."""

    plan: StepPlan
    sampled: list[list[int]]  # `StepResult.token_ids` of the oldest steps that no Step has told of, oldest first


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    share: float  # of the weights that are loaded, 0 to 1


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    boot_report: BootReport


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    result: StepResult


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The worker has ended."""

    kind: Literal["ModelError", "ConfigError", "OctavoError"]
    message: str


ToWorker = Load | Allocate | Step
FromWorker = Loading | Loaded | Stepped | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
