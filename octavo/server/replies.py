"""From the engine's outputs to a response: in one piece, or as events. Both are made of the same deltas."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from octavo.metrics import log_event
from octavo.outputs import RequestOutput, combined_metrics
from octavo.server.errors import APIError
from octavo.server.logprobs import prompt_logprobs
from octavo.server.streaming import Delta, Deltas, event
from octavo.tokenizer import Tokenizer
from octavo.version import VERSION

FINGERPRINT = f"octavo-{VERSION}"
LONG = 256  # tokens: their logprobs take some 10 ms to tell


@dataclass(kw_only=True)
class Reply(ABC):
    """How the outputs of one HTTP request are told. A subclass knows what a choice looks like at its endpoint."""

    model: str
    num_prompts: int
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

    def take(self, prompt_index: int, output: RequestOutput) -> list[Delta]:
        """What an output has more than the one before it, copied: the output itself grows on.

        Raises:
            APIError: 500, a choice could not be computed.
        """
        if output.error is not None:
            raise APIError(500, output.error)
        if output.finished:
            self._finished[prompt_index] = output
        return list(self._deltas.take(prompt_index, output))

    def is_long(self, deltas: Sequence[Delta]) -> bool:
        """Whether telling these takes so long that others would notice."""
        tokens = 0 if self.num_logprobs is None else sum(len(delta.token_ids) for delta in deltas)
        if self.num_logprobs is not None or self.num_prompt_logprobs is not None:
            tokens += sum(len(delta.output.prompt_logprobs or ()) for delta in deltas if delta.is_first)
        return tokens > LONG

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        """The response in one piece."""
        outputs = self._outputs()
        self._log(outputs)
        body = self._envelope(self.kind, [self._choice(delta, whole=True) for delta in deltas])
        return msgspec.json.encode({**body, "usage": usage(outputs), "timings": timings(outputs)})

    def events(self, deltas: Sequence[Delta]) -> bytes:
        """What deltas add to the stream."""
        chunks = [self._envelope(self.chunk_kind, [self._choice(delta, whole=False)]) for delta in deltas]
        if chunks and len(self._finished) == self.num_prompts:
            outputs = self._outputs()
            self._log(outputs)
            chunks[-1]["timings"] = timings(outputs)
        if self.include_usage:
            for chunk in chunks:
                chunk["usage"] = None
        return b"".join(map(event, chunks))

    def usage_event(self) -> bytes:
        """The last one, where it is asked for."""
        outputs = self._outputs()
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

    def _outputs(self) -> list[RequestOutput]:
        return [self._finished[i] for i in sorted(self._finished)]

    def _log(self, outputs: Sequence[RequestOutput]) -> None:
        tokens = usage(outputs)
        cached = tokens.pop("prompt_tokens_details")["cached_tokens"]
        log_event("request_finished", {"id": self.id, **tokens, "cached_tokens": cached, **timings(outputs)})

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
