"""A server in a thread of the test, on a port of its own: real HTTP, and its engine within reach."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import httpx2 as httpx
import openai
import uvicorn

from octavo import AsyncLLMEngine, EngineConfig
from octavo.engine.supervisor import SupervisorOptions
from octavo.server import ChatRenderer, Context, make_app
from octavo.server.protocol import MAX_CONNECTIONS, http_config
from tests.engine.failing_engine import MODULE

T = TypeVar("T")


class LiveServer:
    """As `octavo serve`, without the signals. Entering it waits until it serves."""

    def __init__(
        self,
        model: Path,
        *,
        max_waiting: int = 256,
        api_key: str | None = None,
        module: str = MODULE,
        max_connections: int = MAX_CONNECTIONS,
        cors_origins: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        """`module`: of the engine process, which does as `faults.json` beside the model says, if there is one."""
        self._module = module
        self._max_connections = max_connections
        self._cors_origins = cors_origins
        self._config = EngineConfig(str(model), num_threads=1, **{"num_kv_blocks": 512, **options})
        self._max_waiting = max_waiting
        self._api_key = api_key
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._started = threading.Event()
        self.context: Context
        self._loop: asyncio.AbstractEventLoop
        self._uvicorn: uvicorn.Server

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            supervision = SupervisorOptions(module=self._module)
            engine = await AsyncLLMEngine.start(self._config, max_waiting=self._max_waiting, options=supervision)
            renderer = ChatRenderer(engine.tokenizer, check_text=engine.check_text)
            names, aliases = ("tiny", "alias"), ("hidden",)
            self.context = Context(engine, renderer, names, self._api_key, aliases, self._cors_origins)
            app = make_app(self.context)
            config = http_config(app, self._max_connections)
            config.timeout_graceful_shutdown = 20  # as `octavo serve` has an end to it, too
            self._uvicorn = uvicorn.Server(config)
            self._loop.call_soon(self._started.set)
            await self._uvicorn.serve(sockets=[self._listener])
            renderer.close()
            await engine.close()
        finally:
            self._started.set()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def stats(self) -> dict[str, Any]:
        return self.run(self.context.engine.stats())

    def wait_until(self, holds: Callable[[dict[str, Any]], bool], seconds: float = 30) -> dict[str, Any]:
        """The engine's statistics, as soon as they are as they should be."""
        deadline = time.monotonic() + seconds
        while not holds(stats := self.stats()):
            assert time.monotonic() < deadline, stats
            time.sleep(0.01)
        return stats

    def wait_idle(self) -> None:
        """Nothing runs, nothing waits, and no block is held."""
        self.wait_until(lambda s: s["num_running"] == s["num_waiting"] == s["num_used_blocks"] == 0)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self._api_key or "none", max_retries=0, timeout=60)

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self._api_key or "none", max_retries=0, timeout=60)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """Without a client's help: `body` as JSON, or bytes as they are."""
        if isinstance(body, bytes):
            options = {"content": body, "headers": {"content-type": "application/json"}, **options}
        else:
            options = {"json": body, **options}
        return httpx.post(self.url + path, timeout=60, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **options)

    def __enter__(self) -> LiveServer:
        self._thread.start()
        assert self._started.wait(60)
        assert hasattr(self, "_uvicorn"), "the engine did not start"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._uvicorn.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()
