"""`octavo chat`, by a script on stdin and by a person on a terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.cli.main import main
from octavo.cli.terminal import show
from tests.engine.test_chat import TEMPLATE, with_template
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
