"""From the engine's outputs to a response: in one piece, or as events. Both are made of the same deltas."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from octavo.outputs import RequestOutput, combined_metrics
from octavo.server.errors import APIError
from octavo.server.logprobs import prompt_logprobs
from octavo.server.streaming import Delta, Deltas, event
from octavo.tokenizer import Tokenizer
from octavo.version import VERSION

FINGERPRINT = f"octavo-{VERSION}"


@dataclass(kw_only=True)
class Reply(ABC):
    """How the outputs of one HTTP request are told. A subclass knows what a choice looks like at its endpoint."""

    model: str
    tokenizer: Tokenizer
    include_usage: bool
    return_token_ids: bool
    num_logprobs: int | None
    num_prompt_logprobs: int | None  # that vLLM's field of this name asks for
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(init=False)

    prefix: ClassVar[str]  # of ids
    kind: ClassVar[str]  # "object" of a response
    chunk_kind: ClassVar[str]  # and of an event

    def __post_init__(self) -> None:
        self.id = self.prefix + uuid.uuid4().hex
        self._deltas = Deltas()
        self._finished: dict[int, RequestOutput] = {}  # by index of the prompt

    @abstractmethod
    def said(self, delta: Delta, *, whole: bool) -> dict[str, Any]:
        """The text of a delta, under its name: of a whole choice, or of a part of one."""

    @abstractmethod
    def logprobs(self, delta: Delta, top: int) -> dict[str, Any]:
        """Of a delta's tokens, with that many most likely ones at each position."""

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The response in one piece.

        Raises:
            APIError: 500, a choice could not be computed.
        """
        choices = []
        for i, output in enumerate(outputs):
            self._finish(i, output)
            choices += [self._choice(delta, whole=True) for delta in self._deltas.take(i, output)]
        envelope = self._envelope(self.kind, choices)
        return {**envelope, "usage": usage(outputs), "timings": timings(outputs)}

    def events(self, prompt_index: int, output: RequestOutput, num_prompts: int) -> bytes:
        """What an output adds to the stream; empty when that is nothing.

        Raises:
            APIError: as for `whole`.
        """
        if output.finished:
            self._finish(prompt_index, output)
        deltas = self._deltas.take(prompt_index, output)
        chunks = [self._envelope(self.chunk_kind, [self._choice(delta, whole=False)]) for delta in deltas]
        if chunks and len(self._finished) == num_prompts:
            chunks[-1]["timings"] = timings(list(self._finished.values()))
        if self.include_usage:
            for chunk in chunks:
                chunk["usage"] = None
        return b"".join(map(event, chunks))

    def usage_event(self) -> bytes:
        """The last one, where it is asked for."""
        outputs = list(self._finished.values())
        return event({**self._envelope(self.chunk_kind, []), "usage": usage(outputs), "timings": timings(outputs)})

    def _choice(self, delta: Delta, *, whole: bool) -> dict[str, Any]:
        choice = {
            "index": delta.index,
            **self.said(delta, whole=whole),
            "logprobs": None if self.num_logprobs is None else self.logprobs(delta, self.num_logprobs),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self.num_prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(delta.output.prompt_logprobs or [], self.num_prompt_logprobs)
        if self.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if delta.is_first:
                choice["prompt_token_ids"] = delta.output.prompt_token_ids
        return choice

    def _finish(self, prompt_index: int, output: RequestOutput) -> None:
        if output.error is not None:
            raise APIError(500, output.error)
        self._finished[prompt_index] = output

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Tokens of all prompts and choices; a prompt counts once, however many choices it has."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.metrics.num_cached_tokens for output in outputs)},
    }


def timings(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Seconds in the queue, to the first token, and from there to the last; of several prompts, from the first that did
    a thing to the last."""
    metrics = combined_metrics([output.metrics for output in outputs])
    return {
        "queue_time": metrics.queue_time,
        "prefill_time": metrics.prefill_time,
        "decode_time": metrics.decode_time,
        "num_preemptions": metrics.num_preemptions,
    }
