"""The parent's side of chat_renderer.py: a small process that runs chat templates within limits.

jinja2's sandbox keeps a template from Python's internals, but not from looping for ever or from asking for all of the
memory. Only a process of its own can be stopped at any point:

    render ──► {"template", "variables"} ──stdin──►  chat_renderer.py   (address space limited)
       ▲                                                 │
       └────── {"text"} or {"error"} ◄──stdout───────────┘   no answer within the time: killed, and started again

It is started at the first use, and ends when its stdin closes, so it never outlives this process for long.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from octavo.errors import OctavoError, RequestError

RENDER_SECONDS = 5.0  # a render takes about a millisecond
MEMORY_BYTES = 2**29  # address space of the process; about 30 MB of it are Python and jinja2
MAX_CHARACTERS = 2**23
_START_SECONDS = 60.0
_SCRIPT = Path(__file__).with_name("chat_renderer.py")


class Sandbox:
    """Renders templates one at a time; safe to share between threads."""

    def __init__(self, seconds: float = RENDER_SECONDS) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., Sandbox] | None = None  # ends the process with this object, or at exit

    def render(self, template: str, variables: Mapping[str, object]) -> str:
        """The text that a Jinja template makes of JSON-like variables.

        Raises:
            RequestError: the template refuses the conversation (the message is its own), fails, reaches for what the
                sandbox forbids, or exceeds a limit.
        """
        line = json.dumps({"template": template, "variables": variables}).encode() + b"\n"
        with self._lock:
            answer = self._ask(line)
        if "error" in answer:
            raise RequestError(answer["error"])
        return answer["text"]

    def close(self) -> None:
        """Ends the process; the next render starts another."""
        with self._lock:
            self._stop()

    def _ask(self, line: bytes) -> dict[str, str]:
        try:
            process = self._running()
            start = time.monotonic()
            reply = _exchange(process, line, self.seconds)
        except BaseException:  # an interrupt: what still comes would be taken for the next answer
            self._stop()
            raise
        if reply.endswith(b"\n"):
            answer: dict[str, str] = json.loads(reply)
            return answer
        self._stop()
        if time.monotonic() - start >= self.seconds:
            raise RequestError(f"the chat template ran for more than {self.seconds:g} seconds and was stopped")
        raise RequestError(f"the chat template ended the process that renders it (exit code {process.returncode})")

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        limits = [str(MEMORY_BYTES), str(self.seconds), str(MAX_CHARACTERS)]
        command = [sys.executable, "-I", str(_SCRIPT), *limits, *_library_folders()]
        # In a session of its own, a Ctrl-C meant for this process does not reach it.
        self._process = process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._finalizer = weakref.finalize(self, _end, process)
        if not _exchange(process, b"", _START_SECONDS).endswith(b"\n"):
            self._stop()
            raise OctavoError(
                f"the renderer of chat templates does not start (exit code {process.returncode}); to see why, run: "
                f"{shlex.join(command)}"
            )
        return process

    def _stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None


def _exchange(process: subprocess.Popen[bytes], line: bytes, seconds: float) -> bytes:
    """Sends a line and returns the answering one; without its newline if the process died or was killed in time."""
    assert process.stdin is not None
    assert process.stdout is not None
    watchdog = threading.Timer(seconds, process.kill)
    watchdog.daemon = True
    watchdog.start()
    try:
        process.stdin.write(line)
        process.stdin.flush()
        return process.stdout.readline()
    except BrokenPipeError:
        return b""
    finally:
        watchdog.cancel()
        watchdog.join()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()  # reaps it and closes its pipes


def _library_folders() -> list[str]:
    """Where jinja2 and what it needs lie, for a child that does not look at PYTHONPATH or the user's packages."""
    specs = [find_spec(name) for name in ("jinja2", "markupsafe")]
    return sorted({str(Path(spec.origin).parent.parent) for spec in specs if spec is not None and spec.origin})
