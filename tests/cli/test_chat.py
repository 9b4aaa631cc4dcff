"""`octavo chat`, by a script on stdin and by a person on a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.cli.main import main
from octavo.cli.terminal import show
from tests.engine.test_chat import TEMPLATE, with_template
from tests.server.live import LiveServer
from tests.tiny import make_llama

FLAGS = ["--num-kv-blocks", "64", "--num-threads", "1", "--temperature", "0", "--ignore-eos"]
TELLS = "{% if messages | length == 5 %}{{ raise_exception(messages | map(attribute='role') | join(', ')) }}{% endif %}"


@pytest.fixture(scope="module")
def model(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat") / "tiny"
    shutil.copytree(tiny_llama, path)
    return with_template(
        path, [{"name": "default", "template": TEMPLATE}, {"name": "tells", "template": TELLS + TEMPLATE}]
    )


@pytest.fixture
def octavo(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    def run(model: Path, lines: str, *flags: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        code = main(["chat", str(model), *FLAGS, *flags])
        return code, *capsys.readouterr()

    return run


def test_each_line_is_a_turn_of_one_conversation(octavo, model: Path) -> None:
    code, out, err = octavo(model, "the quick\n\na dog\n/clear\na dog\n", "--max-tokens", "9", "--system", "be brief")
    assert code == 0
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    turns: list[dict[str, str]] = []
    expected = ""
    with LLM(str(model), num_kv_blocks=64, num_threads=1) as llm:
        for text in ("the quick", "a dog", "/clear", "a dog"):
            if text == "/clear":
                turns = []
                continue
            turns.append({"role": "user", "content": text})
            reply = llm.chat([{"role": "system", "content": "be brief"}, *turns], params)[0].outputs[0].text
            turns.append({"role": "assistant", "content": reply})
            expected += reply if reply.endswith("\n") else reply + "\n"
    assert out == expected
    assert (
        len(re.findall(r"^\[9 tokens, [\d.]+ tokens/s, first after [\d.]+ s, cut by --max-tokens\]$", err, re.M)) == 3
    )
    assert "context 256 tokens" in err


def test_commands(octavo, model: Path) -> None:
    lines = "/system <b> be kind\nhi\n/system\nhi\n/help\n/huh\n/exit\nnever read\n"
    code, out, err = octavo(model, lines, "--max-tokens", "2")
    assert code == 1  # /huh was refused
    assert "octavo: error: there is no command /huh; /help lists them" in err
    assert err.index("the system message is set") < err.index("there is no system message now")
    assert "/system TEXT" in err
    assert err.count("[2 tokens") == 2
    _, kind, _ = octavo(model, "hi\n/exit\n", "--max-tokens", "2", "--system", "<b> be kind")
    assert out.startswith(kind)


def test_quiet(octavo, model: Path) -> None:
    code, out, err = octavo(model, "hi", "--quiet", "--max-tokens", "3")
    assert (code, err) == (0, "")
    assert out.endswith("\n")


def test_the_context_runs_full(octavo, model: Path) -> None:
    """CASES 5: without --max-tokens a reply goes on to the end of the context; then /clear helps."""
    code, out, err = octavo(model, "one\ntwo\n/clear\nthree\n")
    assert code == 1
    assert err.count("the context of 256 tokens is full: /clear starts afresh") == 2
    message = r"octavo: error: the conversation has \d+ tokens and the context holds 256: shorten .* or type /clear"
    assert len(re.findall(message, err)) == 1
    assert "Traceback" not in err
    assert out


def test_a_refused_turn_is_forgotten(octavo, model: Path) -> None:
    code, out, err = octavo(model, "one\ntwo\nthree\nfour\n", "--max-tokens", "2", "--chat-template", "tells")
    assert code == 1
    assert out
    assert err.count("octavo: error: user, assistant, user, assistant, user\n") == 2  # "four" is the fifth again


class TestTemplates:
    def test_none(self, octavo, tiny_llama: Path) -> None:
        code, out, err = octavo(tiny_llama, "hi\n")
        assert (code, out) == (1, "")
        assert "has no chat template; give one with --chat-template FILE" in err

    def test_from_a_file_with_variables(self, octavo, tiny_llama: Path, tmp_path: Path) -> None:
        file = tmp_path / "t.jinja"
        file.write_text("{% if enable_thinking is false %}{{ raise_exception('it arrived') }}{% endif %}hm")
        flags = ["--max-tokens", "2", "--chat-template", str(file)]
        assert octavo(tiny_llama, "hi\n", *flags)[0] == 0
        code, _, err = octavo(tiny_llama, "hi\n", *flags, "--chat-template-kwargs", '{"enable_thinking": false}')
        assert code == 1
        assert "octavo: error: it arrived\n" in err

    @pytest.mark.parametrize(("flags", "message"), [
        (["--chat-template-kwargs", "{"], "--chat-template-kwargs: '{' is not JSON"),
        (["--chat-template-kwargs", "[]"], "chat_template_kwargs=[]: expected an object"),
        (["--chat-template", "nosuch"], "chat_template='nosuch' is neither Jinja source nor the name"),
        (["--top-p", "0"], "top_p=0"),
    ])  # fmt: skip
    def test_mistakes(self, octavo, model: Path, flags: list[str], message: str) -> None:
        code, out, err = octavo(model, "hi\n", *flags)
        assert (code, out) == (1, "")
        assert message in err
        assert "Traceback" not in err


def test_as_a_process(model: Path) -> None:
    """Bytes in, bytes out: what is not UTF-8 does no harm, and the output is UTF-8 throughout."""
    command = [sys.executable, "-m", "octavo", "chat", str(model), *FLAGS, "--max-tokens", "60"]
    done = subprocess.run(command, input=b"caf\xe9 \xf0\x9f\x98\x80\nand\n", capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode()
    assert done.stderr.count(b"[60 tokens") == 2


class Terminal:
    """`octavo chat` on a pseudo-terminal of its own."""

    def __init__(self, *args: str) -> None:
        self.master, terminal = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "octavo", "chat", *args],
            env={**os.environ, "TERM": "dumb"},
            preexec_fn=lambda: os.login_tty(terminal),
        )
        os.close(terminal)
        self.seen = b""

    def type(self, text: str) -> None:
        self.seen = b""
        os.write(self.master, text.encode())

    def interrupt_prompt(self) -> None:
        """Presses Ctrl-C until it is seen: CPython misses one that comes just before it waits for a key."""
        self.seen = b""
        for _ in range(60):
            os.write(self.master, b"\x03")
            if select.select([self.master], [], [], 1)[0]:
                break
        self.expect(r"/exit or Ctrl-D leaves\s+> ")

    def expect(self, pattern: str, seconds: float = 60) -> str:
        """Reads until the output since the last `type` matches."""
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.seen.decode(errors="replace")):
            ready, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {pattern!r} in {self.seen!r}"
            self.seen += os.read(self.master, 65536)
        return self.seen.decode(errors="replace")

    def close(self) -> int:
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            os.close(self.master)


def test_on_a_terminal(tmp_path: Path) -> None:
    """Ctrl-C stops a reply, what was said stays, and the conversation goes on; Ctrl-D leaves."""
    path = with_template(make_llama(tmp_path / "long", max_position_embeddings=8192), TELLS + TEMPLATE)
    flags = [flag for flag in FLAGS if flag not in ("--num-kv-blocks", "64")]
    terminal = Terminal(str(path), *flags)
    terminal.expect(r"/help lists the commands\s+> ")
    terminal.interrupt_prompt()
    for message in ("the quick", "a dog"):
        terminal.type(f"{message}\r")
        terminal.expect(re.escape(message) + r"\s+[^>]{20}")  # its echo, then some text of the reply
        terminal.type("\x03")
        shown = terminal.expect(r"\[\d+ tokens, [\d.]+ tokens/s, first after [\d.]+ s, stopped\]\s+> ")
        assert int(re.findall(r"\[(\d+) tokens", shown)[0]) < 8000
    terminal.type("third\r")  # the template tells what it is given
    terminal.expect(r"octavo: error: user, assistant, user, assistant, user\s+> ")
    terminal.type("fixx\x7f\x7f\x08\x08\x01/nosuch\x05\r")  # editing: erase, go to the start, go to the end
    terminal.expect(r"there is no command /nosuch; /help lists them\s+> ")
    terminal.type("\x1b[A\r")  # history: the line before
    terminal.expect(r"there is no command /nosuch; /help lists them\s+> ")
    terminal.type("\x04")
    assert terminal.close() == 0


def test_control_characters_do_not_reach_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, expected in ((Screen(), "a\ufffd[2Jb\n\tü\ufffd"), (io.StringIO(), "a\x1b[2Jb\n\tü\x9b")):
        monkeypatch.setattr(sys, "stdout", stream)
        show("a\x1b[2Jb\n\tü\x9b")
        assert stream.getvalue() == expected


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path = tmp_path_factory.mktemp("served") / "tiny"
    shutil.copytree(tiny_llama, path)
    with LiveServer(with_template(path, TELLS + TEMPLATE), api_key="secret") as server:
        yield server


class TestServer:
    """`octavo chat --url`."""

    FLAGS = ("--temperature", "0", "--ignore-eos")

    @pytest.fixture
    def talk(
        self, server: LiveServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> Callable[..., tuple[int, str, str]]:
        def run(lines: str, *flags: str, url: str | None = None) -> tuple[int, str, str]:
            monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
            code = main(["chat", "--url", url or server.url, "--api-key", "secret", *self.FLAGS, *flags])
            return code, *capsys.readouterr()

        return run

    @pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
    def test_the_replies_are_those_of_the_model(
        self, talk: Callable[..., tuple[int, str, str]], server: LiveServer, octavo, model: Path, end: str
    ) -> None:
        lines = "the quick\n\na dog\n/clear\na dog\n"
        flags = ["--max-tokens", "9", "--system", "be brief", "--logit-bias", "70=5", "--repetition-penalty", "1.2"]
        code, out, err = talk(lines, *flags, url=server.url + end)
        assert (code, out) == octavo(model, lines, *flags)[:2]
        summary = r"^\[9 tokens, [\d.]+ tokens/s, first after [\d.]+ s, cut by --max-tokens\]$"
        assert len(re.findall(summary, err, re.M)) == 3
        assert f"tiny at {server.url}{end}, context 256 tokens\n" in err

    def test_another_name_of_the_model(self, talk: Callable[..., tuple[int, str, str]]) -> None:
        code, out, err = talk("hi\n", "--model", "alias", "--max-tokens", "2", "--quiet")
        assert (code, err) == (0, "")
        assert out

    def test_the_context_runs_full(self, talk: Callable[..., tuple[int, str, str]]) -> None:
        code, out, err = talk("one\ntwo\n/clear\nthree\n")
        assert code == 1
        assert err.count("the context of 256 tokens is full: /clear starts afresh") == 2
        assert len(re.findall(r"^octavo: error: .*256", err, re.M)) == 1
        assert out

    def test_a_refused_turn_is_forgotten(self, talk: Callable[..., tuple[int, str, str]]) -> None:
        code, out, err = talk("one\ntwo\nthree\nfour\n", "--max-tokens", "2")
        assert code == 1
        assert out
        assert err.count("octavo: error: user, assistant, user, assistant, user\n") == 2

    @pytest.mark.parametrize(("flags", "message"), [
        (["--api-key", "wrong"], "wants another API key"),
        (["--api-key", "a\nb"], "--api-key: a key is made of ASCII characters"),
        (["--model", "nosuch"], "--model nosuch: http://127.0.0.1:"),
        (["--url", "127.0.0.1:8000"], "expected a URL such as http://127.0.0.1:8000"),
        (["--url", "http://127.0.0.1:port"], "--url http://127.0.0.1:port: "),
        (["--url", "http://127.0.0.1:1"], "nothing answers at http://127.0.0.1:1 ("),
        (["--top-p", "0"], "top_p=0"),
        (["--chat-template-kwargs", "{"], "--chat-template-kwargs: '{' is not JSON"),
        (["some-model"], "M is for a model that is loaded here: leave --url out"),
        (["--num-threads", "1"], "--num-threads is for a model that is loaded here: leave --url out"),
        (["--chat-template", "tells"], "--chat-template is for a model that is loaded here: leave --url out"),
    ])  # fmt: skip
    def test_mistakes(self, talk: Callable[..., tuple[int, str, str]], flags: list[str], message: str) -> None:
        code, out, err = talk("hi\n", *flags)
        assert (code, out) == (1, "")
        assert message in err
        assert err.count("\n") == 1

    def test_something_else_answers(self, talk: Callable[..., tuple[int, str, str]], server: LiveServer) -> None:
        code, _, err = talk("hi\n", url=f"{server.url}/elsewhere")
        assert code == 1
        assert "has no list of models at /elsewhere/v1/models: not OpenAI's API\n" in err

    def test_flags_of_a_server_without_one(self, octavo, model: Path) -> None:
        for flag in ("--api-key", "--model"):
            code, out, err = octavo(model, "hi\n", flag, "x")
            assert (code, out, err) == (1, "", f"octavo: error: {flag} is for a server: give its --url\n")

    def test_answers_that_go_wrong(self, talk: Callable[..., tuple[int, str, str]]) -> None:
        """A turn that fails is told and forgotten, and the next one is asked."""
        said = b'data: {"choices": [{"delta": {"content": "well"}}]}\n\n'
        answers = [
            (200, said),
            (200, said + b'data: {"error": {"message": "the engine\\nhas died"}}\n\n'),
            (200, said + b"data: {\n\n"),
            (502, b"<html>bad\n gateway"),
            (200, said + b": a comment\n\ndata: [DONE]\n\n"),
        ]
        with ScriptedServer(answers) as scripted:
            code, out, err = talk("a\nb\nc\nd\ne\n", "--quiet", url=scripted.url)
        assert (code, out) == (1, "well" * 4 + "\n")
        errors = re.findall("^octavo: error: (.*)$", err, re.M)
        assert err.count("\n") == len(errors) == 4
        assert "is lost in the middle of the reply" in errors[0]
        assert errors[1] == "the engine has died"
        assert "has sent an event that is not JSON" in errors[2]
        assert errors[3] == "502 Bad Gateway: <html>bad gateway"
        assert [len(asked["messages"]) for asked in scripted.asked] == [1] * 5
        assert scripted.asked[0] == {
            "model": "m",
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.0,
            "top_p": 0.95,
            "ignore_eos": True,
            "messages": [{"role": "user", "content": "a"}],
        }

    def test_on_a_terminal(self, tmp_path: Path) -> None:
        """Ctrl-C stops a reply, here and there, and the conversation goes on."""
        path = with_template(make_llama(tmp_path / "long", max_position_embeddings=8192), TELLS + TEMPLATE)
        with LiveServer(path, num_kv_blocks=1024) as server:
            terminal = Terminal("--url", server.url, *self.FLAGS)
            terminal.expect(r"/help lists the commands\s+> ")
            for message in ("the quick", "a dog"):
                terminal.type(f"{message}\r")
                terminal.expect(re.escape(message) + r"\s+[^>]{20}")
                terminal.type("\x03")
                terminal.expect(r"\[first after [\d.]+ s, stopped\]\s+> ")
                server.wait_idle()
            terminal.type("third\r")
            terminal.expect(r"octavo: error: user, assistant, user, assistant, user\s+> ")
            terminal.type("\x04")
            assert terminal.close() == 0


class ScriptedServer:
    """Has one model, and answers each request with what it was told to, then closes the connection."""

    def __init__(self, answers: list[tuple[int, bytes]]) -> None:
        self.asked: list[Any] = []
        outer, remaining = self, iter(answers)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200, b'{"data": [{"id": "m"}]}')

            def do_POST(self) -> None:
                outer.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                self._answer(*next(remaining))

            def _answer(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> ScriptedServer:
        threading.Thread(target=self._server.serve_forever).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
