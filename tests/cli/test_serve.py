"""`octavo serve` as a process: its URL, its signals, its end."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.engine.test_chat import ONE, TEMPLATE
from tests.tiny import make_llama

LONG = {"prompt": "the fox", "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("serve") / "long", max_position_embeddings=2**16)


class Served:
    """A process of `octavo serve`."""

    def __init__(self, model: Path, *flags: str, script: str | None = None) -> None:
        program = ["-m", "octavo"] if script is None else ["-c", script]
        command = [sys.executable, *program, "serve", str(model), "--port", "0", "--num-threads", "1", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.url = self.line(60)

    def line(self, seconds: float) -> str:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        assert ready, "nothing on stdout"
        return self.process.stdout.readline().removesuffix("\n")

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60)

    def start_stream(self, max_tokens: int) -> Iterator[str]:
        """The lines of a stream, of which the first has come."""
        lines = self._stream(max_tokens)
        first = next(lines)
        return (line for part in ([first], lines) for line in part)

    def _stream(self, max_tokens: int) -> Iterator[str]:
        body = {**LONG, "max_tokens": max_tokens}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=60) as response:
            assert response.status_code == 200
            yield from (line for line in response.iter_lines() if line)

    def engines(self) -> list[int]:
        """Children of the process."""
        try:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return []
        return [int(pid) for pid in children.split()]

    def end(self, seconds: float = 30) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def reason(line: str) -> str | None:
    return json.loads(line.removeprefix("data: "))["choices"][0]["finish_reason"]


def test_the_url_and_a_polite_end(model: Path) -> None:
    """Requests that run are finished, others get a 503, no process is left, and the exit code is 0."""
    with Served(model, "--served-model-name", "one", "--served-model-name", "two") as served:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", served.url)
        assert [card["id"] for card in httpx.get(served.url + "/v1/models").json()["data"]] == ["one", "two"]
        engines = served.engines()
        assert len(engines) == 1
        lines = served.start_stream(4000)
        served.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 20
        while (answer := served.post("/v1/completions", {"prompt": "a", "max_tokens": 1})).status_code == 200:
            assert time.monotonic() < deadline
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert httpx.get(served.url + "/ready").status_code == 503
        *_, last, done = list(lines)
        assert (reason(last), done) == ("length", "data: [DONE]")
        code, out, err = served.end()
        assert (code, out) == (0, "")
        assert "context 65536 tokens" in err
        assert "Traceback" not in err
        assert not any(Path(f"/proc/{pid}").exists() for pid in engines)


def test_the_deadline_of_a_drain(model: Path) -> None:
    with Served(model, "--drain-seconds", "0.3", "--quiet", "--verbose") as served:
        lines = served.start_stream(60_000)
        served.process.send_signal(signal.SIGTERM)
        *_, last, done = list(lines)
        assert (reason(last), done) == ("abort", "data: [DONE]")
        code, _, err = served.end()
        assert code == 0
        events = re.findall(r"INFO event=(\w+)", err)
        assert [event for event in events if event in ("draining", "request_finished")] == [
            "draining",
            "request_finished",
        ]


def test_a_second_signal_stops_at_once(model: Path) -> None:
    with Served(model) as served:
        lines = served.start_stream(60_000)
        engines = served.engines()
        served.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert served.process.poll() is None
        served.process.send_signal(signal.SIGINT)
        code, _, err = served.end(10)
        assert code == 1
        assert "Traceback" not in err
        list(lines)
        assert not any(Path(f"/proc/{pid}").exists() for pid in engines)


def ask_and_do_not_read(served: Served, connection: socket.socket) -> None:
    """For more than all buffers on the way can hold."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", int(served.url.rpartition(":")[2])))
    body = json.dumps({**LONG, "n": 2, "max_tokens": 60_000, "logprobs": 20}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
    connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
    time.sleep(1.5)


def test_a_client_that_does_not_read_cannot_hold_up_the_end(model: Path) -> None:
    """More is sent to it than all buffers on the way can hold."""
    with Served(model) as served, socket.socket() as connection:
        ask_and_do_not_read(served, connection)
        for _ in range(2):
            served.process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        code, _, err = served.end()
        assert code == 1
        assert "Traceback" not in err


def test_a_second_signal_stops_at_once_when_all_is_computed_too(model: Path) -> None:
    """While a client that does not read is given a last chance."""
    with Served(model, "--drain-seconds", "0.1", "--verbose") as served, socket.socket() as connection:
        ask_and_do_not_read(served, connection)
        served.process.send_signal(signal.SIGTERM)
        time.sleep(1.5)
        assert served.process.poll() is None
        assert served.engines() == []  # nothing is computed any more
        start = time.monotonic()
        served.process.send_signal(signal.SIGTERM)
        code, _, err = served.end()
        assert time.monotonic() - start < 1.5
        assert code == 1
        assert "Traceback" not in err


def test_a_killed_server_leaves_no_engine(model: Path) -> None:
    with Served(model) as served:
        served.start_stream(60_000)
        (engine,) = served.engines()
        served.process.kill()
        deadline = time.monotonic() + 10
        while Path(f"/proc/{engine}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_killed_engine_is_a_pause(model: Path) -> None:
    """The stream goes on, to the same text, and the server says what has happened."""
    body = {**LONG, "max_tokens": 1500, "stream": False}
    with Served(model) as served:
        expected = served.post("/v1/completions", body).json()["choices"][0]["text"]
        lines = served.start_stream(1500)
        os.kill(served.engines()[0], signal.SIGKILL)
        text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines if line != "data: [DONE]")
        assert text == expected
        health = httpx.get(served.url + "/health").json()
        assert (health["status"], health["num_restarts"]) == ("ok", 1)


IMPATIENT = """
import sys
from octavo.cli.main import main
from octavo.engine.async_llm_engine import AsyncLLMEngine
from octavo.engine.supervisor import SupervisorOptions
start = AsyncLLMEngine.start
options = SupervisorOptions(max_failures=3, restart_delay=0.1)
AsyncLLMEngine.start = lambda config, **named: start(config, options=options, **named)
sys.exit(main())
"""


def test_an_engine_that_cannot_be_kept_up(model: Path) -> None:
    """Its requests are told, and the process ends with an error."""
    with Served(model, script=IMPATIENT) as served:
        lines = served.start_stream(60_000)
        deadline = time.monotonic() + 30
        while served.process.poll() is None:
            assert time.monotonic() < deadline
            for engine in served.engines():
                with suppress(ProcessLookupError):
                    os.kill(engine, signal.SIGKILL)
            time.sleep(0.01)
        *_, failure, done = list(lines)
        assert "the engine died 3 times in a row" in json.loads(failure.removeprefix("data: "))["error"]["message"]
        assert done == "data: [DONE]"
        code, _, err = served.end()
        assert code == 1
        assert "Traceback" not in err


def test_who_waits_for_an_answer_in_one_piece_is_told_too(model: Path) -> None:
    """That the engine cannot be kept up: 500 with the reason, not a connection that is cut. One client reads slowly."""
    with Served(model, script=IMPATIENT) as served:
        port = int(served.url.rpartition(":")[2])
        body = json.dumps({**LONG, "stream": False, "max_tokens": 60_000}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
        for connection in connections:
            connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        time.sleep(0.3)
        lines = served.start_stream(60_000)
        deadline = time.monotonic() + 30
        while served.process.poll() is None:
            for engine in served.engines():
                with suppress(ProcessLookupError):
                    os.kill(engine, signal.SIGKILL)
            assert time.monotonic() < deadline
            time.sleep(0.002)
        assert "in a row" in list(lines)[-2]
        for connection in connections:
            answer = b""
            while piece := connection.recv(2**16):
                answer += piece
            assert answer.startswith(b"HTTP/1.1 500 ")
            assert b"3 times in a row" in answer
            connection.close()
        assert served.end()[0] == 1


def test_a_template_from_a_file(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text(TEMPLATE)
    with Served(model, "--chat-template", str(file)) as served:
        answer = served.post("/v1/chat/completions", {"messages": ONE, "max_tokens": 2, "return_token_ids": True})
        assert answer.json()["choices"][0]["prompt_token_ids"][0] == 2
        assert answer.json()["model"] == "long"


def test_a_local_model_is_called_by_its_last_part(model: Path) -> None:
    """The path is nobody's business; a request may say it all the same."""
    with Served(model) as served:
        assert [card["id"] for card in httpx.get(served.url + "/v1/models").json()["data"]] == ["long"]
        for name in ("long", str(model), None):
            answer = served.post("/v1/completions", {"model": name, "prompt": "a", "max_tokens": 1})
            assert answer.json()["model"] == "long"
        error = served.post("/v1/completions", {"model": "other", "prompt": "a"}).json()["error"]
        assert error["message"] == "model='other' does not exist; this server has 'long'"


def test_a_key(model: Path) -> None:
    with Served(model, "--api-key", "secret") as served:
        assert httpx.get(served.url + "/v1/models").status_code == 401
        answer = httpx.get(served.url + "/v1/models", headers={"authorization": "Bearer secret"})
        assert answer.status_code == 200


def run(*flags: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-m", "octavo", "serve", *flags], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_an_address_that_is_taken(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = run(str(model), "--port", str(port))
    assert (code, out) == (1, "")
    assert f"octavo: error: cannot listen on 127.0.0.1, port {port} (" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("flags", "message"), [
    (["--port", "70000"], "port=70000: must be at least 0 and at most 65535"),
    (["--host", "256.1.1.1"], "cannot listen on 256.1.1.1"),
    (["--max-waiting", "-1"], "max_waiting=-1: must be at least 0"),
    (["--drain-seconds", "-1"], "drain_seconds=-1.0: must be at least 0"),
    (["--drain-seconds", "nan"], "drain_seconds=nan: must be at least 0"),
    (["--max-num-seqs", "0"], "max_num_seqs=0: must be at least 1"),
    (["--chat-template", "nosuch"], "chat_template='nosuch' is neither Jinja source nor the name"),
    (["--api-key", ""], "api_key='': must not be empty"),
    (["--cors-origin", "example.org"], "cors_origin='example.org': expected an origin such as"),
])  # fmt: skip
def test_mistakes(model: Path, flags: list[str], message: str) -> None:
    code, out, err = run(str(model), *flags)
    assert (code, out) == (1, "")
    assert f"octavo: error: {message}" in err
    assert "Traceback" not in err


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    code, out, err = run(str(tmp_path / "nothing"))
    assert (code, out) == (1, "")
    assert err.startswith("octavo: error: ")


def test_idle_connections_are_cheap(model: Path) -> None:
    """300 that have asked once and stay, and the server serves on."""
    with Served(model) as served:
        port = int(served.url.rpartition(":")[2])

        def resident() -> int:
            pages = Path(f"/proc/{served.process.pid}/statm").read_text().split()[1]
            return int(pages) * os.sysconf("SC_PAGE_SIZE")

        served.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
        before = resident()
        idle = []
        for _ in range(300):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            idle.append(connection)
        assert resident() - before < 300 * 20_000
        assert served.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
        served.process.send_signal(signal.SIGTERM)
        assert served.end()[0] == 0
        for connection in idle:
            connection.close()
