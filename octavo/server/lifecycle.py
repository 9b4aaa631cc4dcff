"""The life of a server: bind, load, serve, drain, end."""

from __future__ import annotations

import asyncio
import re
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI

from octavo.config import EngineConfig
from octavo.engine.async_llm_engine import AsyncLLMEngine
from octavo.errors import ConfigError, OctavoError
from octavo.metrics import log_event
from octavo.server.app import make_app
from octavo.server.context import Context, public_name
from octavo.server.protocol import MAX_CONNECTIONS, http_config
from octavo.server.templates import ChatRenderer

LAST_BYTES_SECONDS = 5  # for slow clients to read what is there for them, once all is computed or lost
OTHER_FILES = 64  # descriptors that are no connections: with them an engine can be started again at any time


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How to serve; the flags of `octavo serve` beside the engine's.

    Raises:
        ConfigError: a value is out of its range.
    """

    host: str = "127.0.0.1"
    port: int = 8000  # 0 takes any that is free
    model_names: tuple[str, ...] = ()  # none: as the model is called in EngineConfig, without the folders
    model_aliases: tuple[str, ...] = ()  # what requests may call it too; not shown
    api_key: str | None = None
    chat_template: str | None = None  # Jinja source, or the name of one of the model's
    max_waiting: int = 1024  # sequences, beyond those that may run at once
    drain_seconds: float = 30.0
    cors_origins: tuple[str, ...] = ()  # web pages whose scripts may ask, such as "https://example.org"; "*": all

    def __post_init__(self) -> None:
        for name, most in (("port", 65535), ("max_waiting", 2**31 - 1), ("drain_seconds", 1e9)):
            value = getattr(self, name)
            if not 0 <= value <= most:  # a NaN is not either
                raise ConfigError(f"{name}={value}: must be at least 0 and at most {most:.0f}")
        if self.api_key == "":
            raise ConfigError("api_key='': must not be empty; leave it out to serve everybody")
        for origin in self.cors_origins:
            if origin != "*" and not re.fullmatch(r"\w[\w+.-]*://[^/\s]+", origin):
                raise ConfigError(f"cors_origin={origin!r}: expected an origin such as 'https://example.org', or '*'")


OnReady = Callable[[str, AsyncLLMEngine], None]


async def serve(config: EngineConfig, options: ServerOptions, *, on_ready: OnReady) -> int:
    """Loads the model and serves until a signal comes, or until the engine cannot be kept up.

    The first SIGTERM or SIGINT drains: new requests get a 503, those that are there are finished, or aborted when
    `drain_seconds` are over. Then, as after the loss of the engine, clients have some seconds to read what is there for
    them. The second signal stops at once, at any time.

    Args:
        on_ready: called with the server's URL when it serves.

    Returns:
        The exit code: 0 after a drain, 1 when the engine was lost or requests were cut off by a second signal.

    Raises:
        ConfigError: the address is taken, or an option cannot be honoured.
        ModelError: the model cannot be found, read or understood.
    """
    max_connections = _allow_many_connections()
    with _bound(options.host, options.port) as listener:
        async with await AsyncLLMEngine.start(config, max_waiting=options.max_waiting) as engine:
            with closing(ChatRenderer(engine.tokenizer, options.chat_template, engine.check_text)) as renderer:
                context = _context(config, options, engine, renderer)
                server = _Server(make_app(context), max_connections, lambda: on_ready(_url(listener), engine))
                return await _run(server, listener, context, options.drain_seconds)


def _context(config: EngineConfig, options: ServerOptions, engine: AsyncLLMEngine, renderer: ChatRenderer) -> Context:
    return Context(
        engine,
        renderer,
        options.model_names or (public_name(config.model),),
        options.api_key,
        options.model_aliases if options.model_names else (config.model,),
        options.cors_origins,
    )


async def _run(server: _Server, listener: socket.socket, context: Context, drain_seconds: float) -> int:
    with _signals() as signals:
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        lost = asyncio.ensure_future(context.engine.failure())
        stopped = asyncio.ensure_future(signals.get())
        try:
            await asyncio.wait((serving, lost, stopped), return_when=asyncio.FIRST_COMPLETED)
            hurried = False
            if stopped.done():
                hurried = await _drain(context, lost, signals, drain_seconds)
            code = 1 if hurried or lost.done() or serving.done() else 0
            await context.engine.close()  # what is not finished ends here, and its clients are told
            server.end(0 if hurried else LAST_BYTES_SECONDS)
            if stopped.done():
                stopped = asyncio.ensure_future(signals.get())
            await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                server.end(0)
            await serving
            return 1 if stopped.done() else code
        finally:
            for task in (serving, lost, stopped):
                task.cancel()


async def _drain(
    context: Context, lost: asyncio.Future[OctavoError], signals: asyncio.Queue[int], seconds: float
) -> bool:
    """Takes no more requests, and waits for those that are there, for their deadline, or for the loss of the engine.
    Whether another signal cut that short."""
    log_event("draining", {"seconds": seconds, "requests": context.engine.num_unfinished_requests})
    context.draining = True
    drained = asyncio.ensure_future(context.engine.drain(seconds))
    again = asyncio.ensure_future(signals.get())
    try:
        await asyncio.wait((drained, lost, again), return_when=asyncio.FIRST_COMPLETED)
        return again.done()
    finally:
        drained.cancel()
        again.cancel()


@contextmanager
def _signals() -> Iterator[asyncio.Queue[int]]:
    """The SIGTERMs and SIGINTs that come while the block runs."""
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    try:
        yield signals
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that has its address, and does not listen: until the model is loaded, clients are refused."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}, port {port} ({error}); choose others with --host and --port"
        ) from error
    with listener:
        yield listener


def _url(listener: socket.socket) -> str:
    """Where to reach it from this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _allow_many_connections() -> int:
    """Each takes a file descriptor, and many systems allow 1,024 unless asked for more. How many there may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, MAX_CONNECTIONS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    files = MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(soft, MAX_CONNECTIONS)
    return (files - OTHER_FILES) * 15 // 16  # some more are held for a moment, to be told that they are too many


class _Server(uvicorn.Server):
    """uvicorn, with the signals left to us, and a word when it listens."""

    def __init__(self, app: FastAPI, max_connections: int, on_started: Callable[[], None]) -> None:
        super().__init__(http_config(app, max_connections))
        self._on_started = on_started

    def end(self, seconds: float) -> None:
        """Stops listening; connections on which something is still to be sent are cut after that many seconds."""
        self.should_exit = True
        asyncio.get_running_loop().call_later(seconds, self._cut)

    def _cut(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def capture_signals(self) -> nullcontext[None]:  # type: ignore[override]
        return nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:  # another one was bound to the address too, and was the first to listen
            raise ConfigError(f"cannot listen ({error}); choose another address with --host and --port") from error
        self._on_started()
