"""Requests that are too long, too slow or too many: refused early, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.server import bodies, protocol
from octavo.server.protocol import MAX_HEAD_BYTES
from tests.engine.test_chat import ONE
from tests.server.live import LiveServer


def connect(server: LiveServer) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    connection.settimeout(20)
    return connection


def answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of a response after which the connection is closed."""
    data = b""
    while piece := connection.recv(2**16):
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    return int(status.split()[1]), dict(line.lower().split(": ", 1) for line in lines), body


def served(connection: socket.socket) -> bool:
    """Reads a small response, after which the connection stays."""
    data = b""
    while not data.endswith(b"}"):
        piece = connection.recv(2**16)
        assert piece
        data += piece
    return data.startswith(b"HTTP/1.1 200 OK")


@pytest.fixture
def threads(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], list[bool]]:
    """Watches a method: for each call, whether it was in the thread of the server's loop."""

    def watch(owner: Any, name: str) -> list[bool]:
        calls: list[bool] = []
        method = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            calls.append(threading.current_thread() is server._thread)
            return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)
        return calls

    return watch


class TestOffTheLoop:
    def test_detokenize(self, server: LiveServer, threads: Any) -> None:
        calls = threads(server.context.engine.tokenizer, "decode")
        tokens = [5 + i % 200 for i in range(50_000)]
        text = server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
        assert server.post("/tokenize", {"prompt": text}).json()["count"] > 0
        assert calls == [False]
        refused = server.post("/detokenize", {"tokens": [*tokens, 320]})
        assert "tokens: 320 is not a token id; the model's are 0 to 319" in refused.json()["error"]["message"]
        assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}

    def test_token_texts(self, server: LiveServer, threads: Any) -> None:
        calls = threads(server.context.engine.tokenizer, "token_text")
        tokens = server.post("/tokenize", {"prompt": "the fox " * 500, "return_token_strs": True}).json()
        assert "".join(tokens["token_strs"]) == "the fox " * 500
        assert set(calls) == {False}

    @pytest.mark.parametrize(("count", "in_loop"), [(3, True), (1000, False)])
    def test_bad_words(self, server: LiveServer, threads: Any, count: int, in_loop: bool) -> None:
        """They are tokenised, once for all prompts; many of them in a thread."""
        calls = threads(server.context.engine._inputs, "_forms")
        words = [f"never say {i}" for i in range(count)]
        body = {"prompt": ["a", "b", "c"], "max_tokens": 1, "bad_words": words}
        assert server.post("/v1/completions", body).status_code == 200
        assert calls == [in_loop] * count

    def test_allowed_tokens(self, server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
        body = {"prompt": "a", "max_tokens": 1, "allowed_token_ids": [5] * (2**20 + 1)}
        error = server.post("/v1/completions", body).json()["error"]
        assert error["message"] == "allowed_token_ids: 1048577 of them; at most 1048576 may be given"
        assert error["param"] == "allowed_token_ids"


class TestFarTooLong:
    """A text that could not fit however it is tokenised is not tokenised; the tiny model's longest token has 8."""

    @pytest.fixture(autouse=True)
    def _never_tokenised(self, server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
        tokenizer = server.context.engine.tokenizer
        limit = 256 * tokenizer.longest_token
        encode, encode_guarded = tokenizer.encode, tokenizer.encode_guarded

        def watched(text: str, *args: Any, **kwargs: Any) -> list[int]:
            assert len(text) <= limit
            return encode(text, *args, **kwargs)

        def watched_guarded(text: str, guard: str) -> list[int]:
            assert len(text) <= limit
            return encode_guarded(text, guard)

        monkeypatch.setattr(tokenizer, "encode", watched)
        monkeypatch.setattr(tokenizer, "encode_guarded", watched_guarded)

    def test_the_longest_token(self, server: LiveServer) -> None:
        tokenizer = server.context.engine.tokenizer
        assert tokenizer.longest_token == max(len(tokenizer.token_text(i)) for i in range(tokenizer.vocab_size))

    def test_prompts(self, server: LiveServer) -> None:
        limit = 256 * server.context.engine.tokenizer.longest_token
        error = server.post("/v1/completions", {"prompt": ["a", "x" * (limit + 1)]}).json()["error"]
        assert f"prompt[1]: the prompt has {limit + 1} characters; the context holds 256 tokens" in error["message"]
        assert error["param"] == "prompt"
        message = server.post("/v1/completions", {"prompt": "x" * limit}).json()["error"]["message"]
        assert "the prompt has" in message
        assert "tokens; the context holds 256, and at least one" in message

    @pytest.mark.parametrize("text", ["x", "<|turn|>"])
    def test_conversations(self, server: LiveServer, text: str) -> None:
        limit = 256 * server.context.engine.tokenizer.longest_token
        messages = [{"role": "user", "content": text * limit}]
        for path in ("/v1/chat/completions", "/tokenize"):
            refused = server.post(path, {"messages": messages})
            assert refused.status_code == 400
            assert "characters; the context holds 256 tokens, of " in refused.json()["error"]["message"]


def test_conversations_are_tokenised_beside_each_other(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes long holds up no other."""
    templates = server.context.renderer._templates
    tokenize, release, entered = templates.tokenize, threading.Event(), threading.Event()

    def slow(written: Any) -> Any:
        if "slow" in written.text:
            entered.set()
            assert release.wait(20)
        return tokenize(written)

    monkeypatch.setattr(templates, "tokenize", slow)
    statuses: list[int] = []
    body = {"messages": [{"role": "user", "content": "slow"}], "max_tokens": 1}
    waiting = threading.Thread(target=lambda: statuses.append(server.post("/v1/chat/completions", body).status_code))
    waiting.start()
    try:
        assert entered.wait(20)
        quick = server.post("/v1/chat/completions", {"messages": ONE, "max_tokens": 1})
        assert (quick.status_code, statuses) == (200, [])
    finally:
        release.set()
        waiting.join()
    assert statuses == [200]


class TestSlowClients:
    def test_a_body_that_drips(self, server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each byte comes soon after the one before, and the whole never."""
        monkeypatch.setattr(bodies, "BODY_SECONDS", 0.5)
        with connect(server) as connection:
            head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1000"
            connection.sendall(head.encode() + b"\r\n\r\n")
            start = time.monotonic()
            for _ in range(10):
                connection.sendall(b" ")
                time.sleep(0.04)
            status, headers, body = answer(connection)
        assert 0.4 < time.monotonic() - start < 5
        assert (status, headers["connection"]) == (408, "close")
        assert "the body has not arrived within 0.5 seconds" in json.loads(body)["error"]["message"]
        assert server.stats()["num_unfinished_requests"] == 0

    @pytest.mark.parametrize("sent", [b"GET /health HTTP/1.1\r\nhost: x\r\nx-", b"GET /hea", b""])
    def test_a_head_that_does_not_come(self, server: LiveServer, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
        monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)
        with connect(server) as connection:
            connection.sendall(sent)
            if sent:
                status, _, body = answer(connection)
                assert status == 408
                assert "the headers have not arrived" in json.loads(body)["error"]["message"]
            assert connection.recv(100) == b""

    def test_one_after_another_on_a_connection_that_stays(
        self, server: LiveServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The time between two requests is no part of a head's; that of a second head is."""
        monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.2)
        with connect(server) as connection:
            for _ in range(3):
                connection.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
                assert served(connection)
                time.sleep(0.3)
            connection.sendall(b"GET /version HTTP/1.1\r\n")
            assert answer(connection)[0] == 408


def test_a_head_without_end(server: LiveServer) -> None:
    """Of many lines, of one line, and of a request line."""
    for start, more in (
        (b"GET /health HTTP/1.1\r\n", b"x-filler: 0123456789\r\n"),
        (b"GET /health HTTP/1.1\r\nx: ", b"0123456789"),
        (b"GET /", b"0123456789"),
    ):
        with connect(server) as connection:
            connection.sendall(start)
            sent = len(start)
            try:
                while sent < 3 * MAX_HEAD_BYTES:
                    connection.sendall(more * 100)
                    sent += 100 * len(more)
                    time.sleep(0.0005)
                status, _, body = answer(connection)
                assert status == 431
                assert f"more than {MAX_HEAD_BYTES} bytes" in json.loads(body)["error"]["message"]
            except ConnectionError:
                pass  # it was cut off as we sent
            assert sent < 3 * MAX_HEAD_BYTES
    assert server.get("/health").status_code == 200


def test_trailers_without_end(server: LiveServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with connect(server) as connection:
        connection.sendall(head + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nx: ")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 4 * MAX_HEAD_BYTES:
                sent += connection.send(b"0" * 1000)
                time.sleep(0.0005)
        assert sent < 4 * MAX_HEAD_BYTES
    assert server.get("/health").status_code == 200


def test_headers_of_a_usual_size(server: LiveServer) -> None:
    assert server.get("/health", headers={"x-filler": "0" * 30_000}).status_code == 200


@pytest.fixture(scope="module")
def few(model: Path) -> Iterator[LiveServer]:
    with LiveServer(model, max_connections=4, num_kv_blocks=32) as server:
        yield server


def test_too_many_connections(few: LiveServer) -> None:
    """One more gets a 503 that says so, two more are cut off, and those that there were are served on."""
    request = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    held = [connect(few) for _ in range(4)]
    for connection in held:
        connection.sendall(request)
        assert served(connection)
    with connect(few) as refused, connect(few) as cut:
        refused.sendall(request)
        status, headers, body = answer(refused)
        assert (status, headers["connection"]) == (503, "close")
        assert int(headers["retry-after"]) >= 1
        error = json.loads(body)["error"]
        assert (error["code"], error["type"]) == ("unavailable", "server_error")
        assert "too many connections" in error["message"]
        with contextlib.suppress(ConnectionResetError):
            assert cut.recv(100) == b""
    for connection in held:
        connection.sendall(request)
        assert served(connection)
        connection.close()
    deadline = time.monotonic() + 10
    while few.run(open_connections(few)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert few.get("/health").status_code == 200


async def open_connections(server: LiveServer) -> int:
    await asyncio.sleep(0)
    return len(server._uvicorn.server_state.connections)
