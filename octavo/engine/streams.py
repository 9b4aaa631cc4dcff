"""What a caller of AsyncLLMEngine reads a request from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from octavo.outputs import RequestOutput


class RequestStream:
    """An async iterator of a request's RequestOutput, which only grows; the last one is finished.

    Each time it gives the request as far as it has come since it was last asked: a slow reader gets more at once, and
    there is nothing to queue. The object is the engine's own and grows while you await other things: take what you need
    before you do.

    A request that nobody reads is ended: use the stream as a context manager, or let go of it.
    """

    def __init__(self, request_id: str, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._abort = abort
        self._moved = asyncio.Event()
        self._output: RequestOutput | None = None
        self._over = False  # the last output was read

    def abort(self) -> None:
        """Ends the request at once; what it has can still be read. One that has ended is left as it is."""
        if self._output is None or not self._output.finished:
            self._abort(self.request_id)

    def put(self, output: RequestOutput) -> None:
        """For the engine: the request has moved."""
        self._output = output
        self._moved.set()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._over:
            raise StopAsyncIteration
        await self._moved.wait()
        self._moved.clear()
        assert self._output is not None
        self._over = self._output.finished
        return self._output

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()
