"""Server-sent events: what an output has more than was sent, while the client is there to read it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.outputs import CompletionOutput, FinishReason, PositionLogprobs, RequestOutput

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"  # a comment, which clients skip
PING_SECONDS = 15.0  # of silence, after which a proxy might take the server for dead


def event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


@dataclass(slots=True)
class Delta:
    """What one choice has more than was sent of it; of a response in one piece, all that it has."""

    index: int  # of the choice, over all prompts of the HTTP request
    output: RequestOutput
    is_first: bool
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


@dataclass(slots=True)
class _Sent:
    text: int = 0  # characters
    tokens: int = 0
    any: bool = False
    finished: bool = False


class Deltas:
    """Cuts the cumulative outputs of one HTTP request into deltas. Those of a choice joined are the choice, however
    many steps lie between two of them.

    There is none without text, except the one that says how the choice ended: tokens that show nothing yet (part of a
    character, or what may become a stop string) come with the text that they turn out to be.
    """

    def __init__(self) -> None:
        self._sent: dict[int, _Sent] = {}

    def take(self, prompt_index: int, output: RequestOutput) -> Iterator[Delta]:
        """The deltas that an output of the prompt of that index brings."""
        for choice in output.outputs:
            index = prompt_index * len(output.outputs) + choice.index
            sent = self._sent.setdefault(index, _Sent())
            ends = choice.finish_reason is not None and not sent.finished
            if len(choice.text) > sent.text or ends:
                yield _delta(index, output, choice, sent)


def _delta(index: int, output: RequestOutput, choice: CompletionOutput, sent: _Sent) -> Delta:
    delta = Delta(
        index,
        output,
        is_first=not sent.any,
        text=choice.text[sent.text :],
        token_ids=choice.token_ids[sent.tokens :],
        logprobs=None if choice.logprobs is None else choice.logprobs[sent.tokens :],
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
    )
    sent.text, sent.tokens = len(choice.text), len(choice.token_ids)
    sent.any, sent.finished = True, choice.finish_reason is not None
    return delta


async def merge(streams: Sequence[AsyncIterator[T]]) -> AsyncGenerator[tuple[int, T], None]:
    """The items of all streams as they come, each with the index of its stream. An item is taken from a stream only
    when the one before it was taken from here, so whoever reads slowly is not read ahead for."""
    if len(streams) == 1:  # nearly always: without a task an item
        async for item in streams[0]:
            yield 0, item
        return
    pending = {asyncio.ensure_future(_next(stream)): i for i, stream in enumerate(streams)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=pending.__getitem__):
                index = pending.pop(task)
                following = task.result()
                if following is None:
                    continue
                yield index, following
                pending[asyncio.ensure_future(_next(streams[index]))] = index
    finally:
        await _cancel(*pending)


async def _next(stream: AsyncIterator[T]) -> T | None:
    return await anext(stream, None)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away; for once the request's body is read.

    Raises:
        ClientDisconnect: the client has gone away.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        await _cancel(task, gone)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancels tasks and waits until they have cleaned up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """A response that sends events as they are made. A client that reads slowly holds up its own events only."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], headers: dict[str, str]) -> None:
        self._events = events
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            self._spoke = time.monotonic()
            pings = asyncio.ensure_future(self._ping(send))
            try:
                async for data in events:
                    self._spoke = math.inf  # while this is being sent
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    self._spoke = time.monotonic()
            finally:
                pings.cancel()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _ping(self, send: Send) -> None:
        """While a request waits, in the queue or for an engine that is being started again, it is heard of."""
        while True:
            silence = max(0.0, time.monotonic() - self._spoke)
            if silence >= PING_SECONDS:
                await send({"type": "http.response.body", "body": PING, "more_body": True})
                self._spoke, silence = time.monotonic(), 0.0
            await asyncio.sleep(PING_SECONDS - silence)
