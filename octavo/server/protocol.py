"""HTTP from clients that mean no good: uvicorn's protocol, with limits that it lacks."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo.server.errors import APIError, unavailable

MAX_HEAD_BYTES = 2**16  # request line and headers, of a request; trailers too
HEAD_SECONDS = 30.0  # in which they have to arrive
KEEP_ALIVE_SECONDS = 300  # of a connection without a request; it costs a socket and some kilobytes
MAX_CONNECTIONS = 2**16
BUSY_RETRY_SECONDS = 5.0
BACKLOG = 2048


def http_config(app: ASGIApp, max_connections: int = MAX_CONNECTIONS) -> uvicorn.Config:
    """How uvicorn serves us. A connection beyond `max_connections` gets a 503; there is room for a few of these."""
    return uvicorn.Config(
        app,
        http=_bounded(max_connections),
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )


def _bounded(max_connections: int) -> type[BoundedProtocol]:
    return type("Protocol", (BoundedProtocol,), {"max_connections": max_connections})


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Whoever sends headers or trailers without end, or takes for ever to send a head, is cut off; how
    long a body may take, and how large it may be, is decided where it is read (bodies.py).

    ::

        connection made, or first byte of a head               headers complete
              |<----------- at most HEAD_SECONDS ------------->|
    """

    max_connections = MAX_CONNECTIONS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None  # while a head is to come
        self._unparsed = 0  # bytes since a head, a part of a body or a request was complete
        self._got_on = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        excess = len(self.connections) - self.max_connections
        if excess > max(1, self.max_connections // 16):
            transport.abort()
        elif excess > 0:
            self.app = _too_many
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._have_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._in_request:
            self._expect_head()
        self._got_on = False
        super().data_received(data)
        self._unparsed = 0 if self._got_on else self._unparsed + len(data)
        if self._unparsed > MAX_HEAD_BYTES:
            self._refuse(431, f"the headers have more than {MAX_HEAD_BYTES} bytes; send less")

    def on_message_begin(self) -> None:
        self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._have_head()
        self._got_on = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._got_on = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._got_on = True
        super().on_message_complete()

    @property
    def _in_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._late)

    def _have_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _late(self) -> None:
        self._head_timer = None
        if self._unparsed == 0:  # nothing was asked
            self.transport.close()
        else:
            self._refuse(408, f"the headers have not arrived within {HEAD_SECONDS:g} seconds; send them faster")

    def _refuse(self, status: int, message: str) -> None:
        """Where there is no request that the application could answer."""
        if self.transport.is_closing():
            return
        if self._in_request:  # an earlier one: its response cannot be broken into
            self.transport.abort()
            return
        response = APIError(status, message, headers={"connection": "close"}).response()
        headers = b"".join(b"%s: %s\r\n" % header for header in response.raw_headers)
        reason = HTTPStatus(status).phrase.encode()
        self.transport.write(b"HTTP/1.1 %d %s\r\n%s\r\n" % (status, reason, headers) + bytes(response.body))
        self.transport.close()


async def _too_many(scope: Scope, receive: Receive, send: Send) -> None:
    """What a connection beyond the limit is told, whatever it asks."""
    error = unavailable("too many connections; close some, or try again later", BUSY_RETRY_SECONDS)
    error.headers["connection"] = "close"
    await error.response()(scope, receive, send)
