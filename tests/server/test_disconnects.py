"""Clients that go away leave nothing behind, and clients that read slowly hold up nobody."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_chat import ONE, TEMPLATE, with_template
from tests.server.live import LiveServer
from tests.tiny import make_llama

ENDLESS = {"temperature": 0, "max_tokens": 100_000, "ignore_eos": True}


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Requests here take many seconds unless they are ended."""
    path: Path = make_llama(tmp_path_factory.mktemp("long") / "long", max_position_embeddings=2**17)
    with LiveServer(with_template(path, TEMPLATE), num_kv_blocks=2**14) as server:
        yield server


def ask(server: LiveServer, path: str, body: dict[str, Any]) -> socket.socket:
    """Sends a request and returns the connection, on which nothing is read yet."""
    port = int(server.url.rpartition(":")[2])
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    data = json.dumps({**ENDLESS, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


REQUESTS = [
    ("/v1/completions", {"prompt": "the fox"}),
    ("/v1/completions", {"prompt": "the fox", "stream": True}),
    ("/v1/completions", {"prompt": ["the fox", "a", "b"], "n": 2, "temperature": 1}),
    ("/v1/completions", {"prompt": ["the fox", "a", "b"], "n": 2, "temperature": 1, "stream": True}),
    ("/v1/chat/completions", {"messages": ONE}),
    ("/v1/chat/completions", {"messages": ONE, "stream": True}),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_a_client_that_leaves_ends_its_request(long: LiveServer, path: str, body: dict[str, Any]) -> None:
    connection = ask(long, path, body)
    long.wait_until(lambda s: s["num_running"] > 0)
    connection.close()
    long.wait_idle()


def test_500_that_leave_at_any_moment(long: LiveServer) -> None:
    for i in range(500):
        path, body = REQUESTS[i % len(REQUESTS)]
        connection = ask(long, path, body)
        time.sleep(i % 7 * 0.003)
        connection.close()
    long.wait_idle()
    assert long.post("/v1/completions", {"prompt": "the fox", "max_tokens": 4}).status_code == 200


def test_one_that_leaves_while_others_wait(long: LiveServer) -> None:
    """Half a body, then nothing; and a request that was never finished."""
    port = int(long.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        connection.sendall(b"content-length: 100\r\n\r\n{")
        time.sleep(0.05)
    assert long.get("/health").status_code == 200
    long.wait_idle()


def test_a_slow_reader(long: LiveServer) -> None:
    """One does not read at all; the others are served at their usual pace."""

    def seconds() -> float:
        start = time.monotonic()
        answer = long.post("/v1/completions", {**ENDLESS, "prompt": "the fox", "max_tokens": 200})
        assert answer.json()["usage"]["completion_tokens"] == 200
        return time.monotonic() - start

    def held_up() -> int:
        """Connections on which nothing more can be sent."""
        return sum(connection.flow.write_paused for connection in list(long._uvicorn.server_state.connections))

    alone = min(seconds() for _ in range(3))
    with ask(long, "/v1/completions", {"prompt": "a", "stream": True, "logprobs": 20}):
        long.wait_until(lambda s: held_up() == 1)
        before = long.stats()["num_generated_tokens"]
        beside = min(seconds() for _ in range(3))
        assert held_up() == 1
        assert long.stats()["num_generated_tokens"] - before > 3 * 200 + 100  # it is computed all the while
    long.wait_idle()
    assert beside < 3 * alone + 0.2  # two requests share each step then, and one has logprobs


def test_a_slow_reader_gets_it_all_in_the_end(long: LiveServer) -> None:
    body = {"prompt": "the fox", "max_tokens": 3000, "logprobs": 5, "return_token_ids": True}
    expected = long.post("/v1/completions", {**ENDLESS, **body}).json()["choices"][0]
    connection = ask(long, "/v1/completions", {**body, "stream": True})
    long.wait_idle()
    time.sleep(0.2)
    received = b""
    while b"[DONE]" not in received:
        piece = connection.recv(2**16)
        assert piece
        received += piece
        if len(received) < 20_000:
            time.sleep(0.02)
    connection.close()
    head, _, rest = received.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head.lower()
    content = b""
    while not rest.startswith(b"0\r\n") and rest:
        size, _, rest = rest.partition(b"\r\n")
        content += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    chunks = [json.loads(part[6:]) for part in content.split(b"\n\n") if part.startswith(b"data: {")]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == expected["text"]
    assert [i for choice in choices for i in choice["token_ids"]] == expected["token_ids"]
    logprobs = [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]
    assert logprobs == expected["logprobs"]["token_logprobs"]
