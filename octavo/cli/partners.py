"""Who answers in `octavo chat`: a model that is loaded here. remote.py has the other: a server."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from octavo.engine import LLMEngine
from octavo.errors import RequestError
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.tokenizer import ChatTemplates

Messages = Sequence[Mapping[str, str]]
Say = Callable[[str], None]

_REQUEST = "reply"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a partner has said, and how it went.

    Attributes:
        finish_reason: `abort` after Ctrl-C.
        num_tokens: None where a server does not tell.
        first_after: seconds from the question to the first token.
        decode_time: seconds from the first token to the last.
        filled: the size of the context where it is full now, else None.
    """

    text: str
    finish_reason: str | None
    num_tokens: int | None
    first_after: float
    decode_time: float
    filled: int | None

    def summary(self) -> str:
        parts = []
        if self.num_tokens is not None:
            parts.append(f"{self.num_tokens} tokens" if self.num_tokens != 1 else "1 token")
            if self.num_tokens > 1:
                parts.append(f"{(self.num_tokens - 1) / max(self.decode_time, 1e-9):.1f} tokens/s")
        parts.append(f"first after {self.first_after:.2f} s")
        if self.finish_reason == "abort":
            parts.append("stopped")
        elif self.filled is not None:
            parts.append(f"the context of {self.filled} tokens is full: /clear starts afresh")
        elif self.finish_reason == "length":
            parts.append("cut by --max-tokens")
        return ", ".join(parts)


class Partner(Protocol):
    def reply(self, messages: Messages, say: Say) -> Reply:
        """Answers a conversation; each piece of the text goes to `say` as it comes. Ctrl-C ends the reply, not more.

        Raises:
            RequestError: the conversation is refused, or could not be computed.
        """


class EnginePartner:
    """A model in this process."""

    def __init__(
        self, engine: LLMEngine, templates: ChatTemplates, params: SamplingParams, options: dict[str, Any]
    ) -> None:
        """
        Args:
            options: for `ChatTemplates.render`.
        """
        self._engine = engine
        self._templates = templates
        self._params = params
        self._options = options

    def reply(self, messages: Messages, say: Say) -> Reply:
        try:
            with _catch_interrupt() as interrupted:
                self._start(messages)
                output = self._stream(say, interrupted)
        except BaseException:
            self._engine.abort(_REQUEST)
            raise
        if output.error is not None:
            raise RequestError(output.error)
        choice, metrics = output.outputs[0], output.metrics
        is_full = len(output.prompt_token_ids) + len(choice.token_ids) >= self._context
        return Reply(
            text=choice.text,
            finish_reason=choice.finish_reason,
            num_tokens=len(choice.token_ids),
            first_after=metrics.queue_time + metrics.prefill_time,
            decode_time=metrics.decode_time,
            filled=self._context if is_full else None,
        )

    def _start(self, messages: Messages) -> None:
        """Checks the conversation and queues it."""
        token_ids = self._templates.render(messages, **self._options).token_ids
        if len(token_ids) >= self._context:
            raise RequestError(
                f"the conversation has {len(token_ids)} tokens and the context holds {self._context}: shorten the "
                "message, or type /clear to start afresh"
            )
        self._engine.add_request(_REQUEST, {"prompt_token_ids": token_ids}, self._params)

    def _stream(self, say: Say, interrupted: threading.Event) -> RequestOutput:
        said = 0
        while True:
            outputs = self._engine.step()
            if interrupted.is_set() and (aborted := self._engine.abort(_REQUEST)) is not None:
                outputs = [aborted]
            for output in outputs:
                text = output.outputs[0].text
                say(text[said:])
                said = len(text)
                if output.finished:
                    return output

    @property
    def _context(self) -> int:
        return self._engine.boot_report.memory.max_model_len


@contextmanager
def _catch_interrupt() -> Iterator[threading.Event]:
    """Inside, the first Ctrl-C only sets the event, so that no step of the engine is cut in two; a second one raises
    KeyboardInterrupt."""
    pressed = threading.Event()

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
