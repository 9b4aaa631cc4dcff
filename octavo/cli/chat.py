"""`octavo chat`: talk with a model on the terminal, or let a script do so, one line a turn."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from types import FrameType
from typing import Any

from rich.console import Console

from octavo.cli.fetch import fetch
from octavo.cli.options import add_engine_flags, add_sampling_flags, engine_from, read_chat_template, sampling_from
from octavo.cli.terminal import show
from octavo.config import DEMO_MODEL
from octavo.engine import LLMEngine
from octavo.errors import OctavoError, RequestError
from octavo.llm import load_engine
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.tokenizer import ChatTemplates

HELP = """\
/clear         forget the conversation; the system message stays
/system TEXT   set the system message; without TEXT, remove it
/help          this list
/exit          leave, as does Ctrl-D
Ctrl-C         stop the reply; what was said stays in the conversation
A message that begins with a slash: put a space before it."""

_REQUEST = "reply"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "chat",
        help="talk with a model",
        description="Talks with a model on the terminal. Without a terminal each line of stdin is a turn, and stdout "
        "holds the replies.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", default=DEMO_MODEL, metavar="M", help=f"(default: {DEMO_MODEL})")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument(
        "--chat-template", metavar="FILE", help="a Jinja file, or the name of one of the model's templates"
    )
    parser.add_argument(
        "--chat-template-kwargs", metavar="JSON", help="variables of the template, as in '{\"enable_thinking\": false}'"
    )
    parser.add_argument("--quiet", action="store_true", help="neither boot report nor statistics on stderr")
    single = ("n", "best_of", "logprobs", "prompt_logprobs")
    add_sampling_flags(parser, without=single, temperature=0.7, top_p=0.95, max_tokens=None)
    add_engine_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    params = sampling_from(args)
    options = {
        "chat_template": read_chat_template(args.chat_template),
        "chat_template_kwargs": _variables(args.chat_template_kwargs),
    }
    config = engine_from(args)
    notes = Console(stderr=True, quiet=args.quiet, highlight=False, soft_wrap=True, style="dim")
    engine = load_engine(replace(config, model=str(fetch(config.model))), progress=False if args.quiet else None)
    templates = ChatTemplates(engine.tokenizer)
    try:
        if args.chat_template is None and not engine.tokenizer.chat_templates:
            raise OctavoError(f"{args.model} has no chat template; give one with --chat-template FILE")
        notes.print(str(engine.boot_report), markup=False)
        return Repl(engine, templates, params, options, args.system, notes).run()
    finally:
        templates.close()
        engine.close()


def _variables(given: str | None) -> Any:
    try:
        return None if given is None else json.loads(given)
    except json.JSONDecodeError as error:
        raise OctavoError(f"--chat-template-kwargs: {given!r} is not JSON ({error})") from error


class Repl:
    """Reads a line, streams the reply, and keeps the conversation.

    Replies go to stdout, all else to stderr.
    """

    def __init__(
        self,
        engine: LLMEngine,
        templates: ChatTemplates,
        params: SamplingParams,
        options: dict[str, Any],
        system: str | None,
        notes: Console,
    ) -> None:
        self.engine = engine
        self.templates = templates
        self.params = params
        self.options = options
        self.system = system
        self.notes = notes
        self.turns: list[dict[str, str]] = []
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()

    def run(self) -> int:
        """Until the input ends. Returns the exit code: 1 if a turn of a script was refused."""
        for stream in (sys.stdin, sys.stdout):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        refused = False
        for line in self._lines():
            text = line.strip()
            if text == "/exit":
                break
            try:
                if line.startswith("/"):
                    self._command(text)
                elif text:
                    self._answer(text)
            except RequestError as error:
                refused = True
                print(f"octavo: error: {error}", file=sys.stderr)
        return 1 if refused and not self.interactive else 0

    def _lines(self) -> Iterator[str]:
        if not self.interactive:
            yield from sys.stdin
            return
        if find_spec("readline") is not None:  # some builds of Python lack it; then the terminal's own editing must do
            importlib.import_module("readline")
        self._tell("/help lists the commands")
        while True:
            try:
                yield input("> ")
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                self._tell("/exit or Ctrl-D leaves")

    def _command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        if name == "/clear":
            self.turns.clear()
            self._tell("the conversation is forgotten")
        elif name == "/system":
            self.system = rest.strip() or None
            self._tell("the system message is set" if self.system else "there is no system message now")
        elif name == "/help":
            self._tell(HELP)
        else:
            raise RequestError(f"there is no command {name}; /help lists them")

    def _answer(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})
        try:
            with _catch_interrupt() as interrupted:
                self._start()
                output = self._stream(interrupted)
            if output.error is not None:
                raise RequestError(output.error)
        except BaseException:
            self.engine.abort(_REQUEST)
            self.turns.pop()
            raise
        reply = output.outputs[0]
        if reply.finish_reason == "abort" and not reply.text:
            self.turns.pop()
            self._tell("stopped before the first word; the message is forgotten")
            return
        self.turns.append({"role": "assistant", "content": reply.text})
        print(end="" if reply.text.endswith("\n") else "\n", flush=True)
        self._tell(f"[{self._summary(output)}]")

    def _start(self) -> None:
        """Checks the conversation and queues it."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        token_ids = self.templates.render(system + self.turns, **self.options).token_ids
        if len(token_ids) >= self._context:
            raise RequestError(
                f"the conversation has {len(token_ids)} tokens and the context holds {self._context}: shorten the "
                "message, or type /clear to start afresh"
            )
        self.engine.add_request(_REQUEST, {"prompt_token_ids": token_ids}, self.params)

    def _stream(self, interrupted: threading.Event) -> RequestOutput:
        shown = 0
        while True:
            outputs = self.engine.step()
            if interrupted.is_set() and (aborted := self.engine.abort(_REQUEST)) is not None:
                outputs = [aborted]
            for output in outputs:
                text = output.outputs[0].text
                show(text[shown:])
                shown = len(text)
                if output.finished:
                    return output

    def _summary(self, output: RequestOutput) -> str:
        reply, metrics = output.outputs[0], output.metrics
        count = len(reply.token_ids)
        parts = [f"{count} tokens" if count != 1 else "1 token"]
        if count > 1:
            parts.append(f"{(count - 1) / max(metrics.decode_time, 1e-9):.1f} tokens/s")
        parts.append(f"first after {metrics.queue_time + metrics.prefill_time:.2f} s")
        if reply.finish_reason == "abort":
            parts.append("stopped")
        elif len(output.prompt_token_ids) + count >= self._context:
            parts.append(f"the context of {self._context} tokens is full: /clear starts afresh")
        elif reply.finish_reason == "length":
            parts.append("cut by --max-tokens")
        return ", ".join(parts)

    @property
    def _context(self) -> int:
        return self.engine.boot_report.memory.max_model_len

    def _tell(self, text: str) -> None:
        self.notes.print(text, markup=False)


@contextmanager
def _catch_interrupt() -> Iterator[threading.Event]:
    """Inside, the first Ctrl-C only sets the event, so that no step of the engine is cut in two; a second one raises
    KeyboardInterrupt."""
    pressed = threading.Event()

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
